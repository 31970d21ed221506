"""Measuring in processes of their own, and what a process takes."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from qada_cache.process_memory import trim

SMAPS = Path("/proc/self/smaps_rollup")  # Linux's


def run_alone(command: str, part: str, **options: object) -> dict[str, Any]:
    """What `python -m eval.COMMAND PART` prints in its last line, JSON, with `options` by their names. If it fails, it
    has said why, and this process ends as it did."""
    told = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    line = [sys.executable, "-m", f"eval.{command}", part, *told]
    if (done := subprocess.run(line, check=False, stdout=subprocess.PIPE, text=True)).returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def count_process() -> dict[str, int]:
    """Bytes of this process in memory, all and what lies in files; a page that is mapped several times counts once."""
    gc.collect()
    trim()
    lines = SMAPS.read_text().splitlines()[1:]
    found = {name: int(size.split()[0]) * 1024 for name, size in (line.split(":") for line in lines)}
    return {"all": found["Pss"], "file": found["Pss_File"]}
