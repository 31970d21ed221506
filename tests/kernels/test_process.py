"""Commands that this package starts do not outlive its process."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_building import SECONDS, wait_for

from qada_cache.kernels.cpu import process

ENDING = """
import atexit, contextlib, importlib.util, sys, tempfile, threading, time
from pathlib import Path

def start_another(name):
    with contextlib.suppress(OSError):
        process.run_command(["touch", f"{sys.argv[2]}/{name}"], timeout=100)

atexit.register(start_another, "late")  # this is called after the module's own function
spec = importlib.util.spec_from_file_location("process", sys.argv[1])
process = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process)

def build():
    with tempfile.TemporaryDirectory(dir=sys.argv[2]) as folder:
        process.run_command(["sh", "-c", f"sleep 100 & echo $! > {folder}/begun; sleep 100"], timeout=100)
    start_another("second")

threading.Thread(target=build, daemon=True).start()
while not (found := [path.read_text() for path in Path(sys.argv[2]).glob("*/begun")]) or not found[0]:
    time.sleep(0.01)
print(found[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kernels are built on Linux")
def test_a_process_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither a compiler, nor what that has started, nor a second one, nor a file, nor a word; nor does it wait."""
    command = [sys.executable, "-c", ENDING, process.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())
    left = Path("/proc", done.stdout.strip(), "stat")
    wait_for(lambda: not left.exists() or left.read_text().rpartition(")")[2].split()[0] == "Z")
