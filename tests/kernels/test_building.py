"""Kernels are built once for all who want them: threads, processes, and who builds them ahead."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compilers import compiler, needs_compiler
from forked import fork

from qada_cache import files
from qada_cache.kernels.cpu import building
from qada_cache.kernels.cpu.building import Library
from qada_cache.said_once import warn_once

SECONDS = 20  # the most that anything here waits


def wait_for(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit; fi
echo called >> {0}/calls
while [ -e {0}/hold ]; do sleep 0.01; done
if [ -e {0}/fail ]; then echo no such option >&2; exit 1; fi
for output; do :; done
cp {0}/built.so "$output"
"""


class Slow:
    """Builds one library, while there is no file `hold`."""

    def __init__(self, folder: Path) -> None:
        self.hold, self.fail, self._calls = folder / "hold", folder / "fail", folder / "calls"
        (folder / "cc").write_text(COMPILER.format(folder))
        (folder / "cc").chmod(0o755)
        (folder / "built.cpp").write_text('extern "C" int answer() { return 42; }')
        command = [str(compiler()), "-shared", "-fPIC", str(folder / "built.cpp"), "-o", str(folder / "built.so")]
        subprocess.run(command, check=True)
        self.source = folder / "built.cpp"

    @property
    def calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0

    def want(self) -> bool:
        """Whether it is there, once it could be."""
        found = building.build_library(self.source, (), "it could not be built")
        return found is not None and found.answer() == 42

    def build_ahead(self) -> Any:
        return building.build_ahead([Library(self.source, (), lambda: None)])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder of a user, in a process, that has built nothing yet."""
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(building, "_builds", building._Builds())
    warn_once.cache_clear()
    return tmp_path / "home"


@pytest.fixture
def slow(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slow:
    (tmp_path / "compiler").mkdir()
    found = Slow(tmp_path / "compiler")
    monkeypatch.setenv("CXX", str(tmp_path / "compiler/cc"))
    return found


def in_threads(count: int, run: Callable[[], Any]) -> Callable[[], list[Any]]:
    """Starts; the results, when they are asked for."""
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(run())) for _ in range(count)]
    for thread in threads:
        thread.start()

    def collect() -> list[Any]:
        for thread in threads:
            thread.join(SECONDS)
        return results

    return collect


def ends_well(child: int) -> bool:
    wait_for(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    return os.waitpid(child, 0)[1] == 0


@needs_compiler
@pytest.mark.parametrize("kept", [True, False])
def test_threads_build_once(kept: bool, slow: Slow, home: Path) -> None:
    """Whether or not there is a folder to keep it in."""
    if not kept:
        home.write_text("in the way")
    slow.hold.touch()
    collect = in_threads(3, slow.want)
    wait_for(lambda: slow.calls)
    time.sleep(0.05)
    slow.hold.unlink()
    assert collect() == [True] * 3
    assert slow.calls == 1


@needs_compiler
@pytest.mark.parametrize("kept", [True, False])
def test_whoever_wants_it_waits_for_what_is_built_ahead(kept: bool, slow: Slow, home: Path) -> None:
    if not kept:
        home.write_text("in the way")
    slow.hold.touch()
    assert slow.build_ahead() is not None
    wait_for(lambda: slow.calls)
    collect = in_threads(2, slow.want)
    time.sleep(0.05)
    slow.hold.unlink()
    assert collect() == [True] * 2
    assert slow.build_ahead() is None
    assert slow.calls == 1


@needs_compiler
def test_built_ahead_and_wanted_later(slow: Slow, home: Path) -> None:
    """A kernel that is built ahead serves later callers without another build, even if no folder can keep it."""
    home.write_text("in the way")
    slow.build_ahead().join(SECONDS)
    assert slow.want()
    assert slow.calls == 1


@needs_compiler
def test_a_failure_is_told_when_it_is_wanted(slow: Slow, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failed build ahead gives one warning, when the kernel is wanted. There is one try, and no file is left."""
    slow.fail.touch()
    with caplog.at_level(logging.WARNING):
        slow.build_ahead().join(SECONDS)
        assert not caplog.records
        assert not slow.want()
        assert slow.build_ahead() is None
    assert slow.calls == 1
    (told,) = caplog.records
    assert told.getMessage().startswith("it could not be built: ")
    assert told.getMessage().endswith("cc failed with no such option (CXX can name another compiler)")
    assert not home.exists()


@needs_compiler
def test_a_library_that_cannot_be_loaded(slow: Slow, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not kept, and no folder is blamed."""
    (slow.source.parent / "built.so").write_text("no library")
    with caplog.at_level(logging.WARNING):
        assert not slow.want()
    (told,) = caplog.records
    assert told.getMessage().startswith("it could not be built: ")
    assert not home.exists()


@needs_compiler
def test_processes_build_once(slow: Slow, home: Path) -> None:
    """The second one waits for the first; one that was killed keeps nobody waiting."""
    slow.hold.touch()
    killed = fork(slow.want)
    wait_for(lambda: slow.calls == 1)
    os.kill(killed, signal.SIGKILL)
    assert not ends_well(killed)
    others = [fork(slow.want) for _ in range(2)]
    wait_for(lambda: slow.calls == 2)
    collect = in_threads(1, slow.want)
    time.sleep(0.2)
    assert slow.calls == 2
    slow.hold.unlink()
    assert all(map(ends_well, others))
    assert collect() == [True]
    assert slow.calls == 2
    assert [path.suffix for path in (home / "kernels").iterdir()] == [".so"]


@needs_compiler
def test_a_process_forked_meanwhile(slow: Slow) -> None:
    """It has no thread that builds, and waits for the process that has."""
    slow.hold.touch()
    slow.build_ahead()
    wait_for(lambda: slow.calls)
    child = fork(slow.want)
    slow.hold.unlink()
    assert ends_well(child)
    assert slow.want()
    assert slow.calls == 1


FORKING = """
import os, sys, time
from pathlib import Path
from qada_cache.kernels.cpu import building
folder = Path(sys.argv[1])
building.build_ahead([building.Library(folder / "built.cpp", (), lambda: None)])
while not (folder / "calls").exists():
    time.sleep(0.01)
if not (child := os.fork()):
    sys.exit()
os.waitpid(child, 0)
(folder / "hold").unlink()
assert building.build_library(folder / "built.cpp", (), "it could not be built").answer() == 42
"""


@needs_compiler
def test_a_forked_process_that_ends_meanwhile(slow: Slow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It leaves this process's temporary folder alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    slow.hold.touch()
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(slow.source.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.glob("qada-kernels-*"))


@needs_compiler
def test_what_killed_processes_left_is_removed(slow: Slow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next build removes their temporary folders, unless these are new, another user's, or no folders, and none
    of other names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = "old_0000", "link0000", "new_0000", "notes"
    old, link, new, other = (tmp_path / f"qada-kernels-{name}" for name in names)
    for folder in (old, new, other, tmp_path / "elsewhere"):
        folder.mkdir()
        (folder / "library.so").touch()
    link.symlink_to(tmp_path / "elsewhere")
    for path in (old, link, other):
        os.utime(path, (0, 0), follow_symlinks=False)
    own = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own + 1)
        building._remove_left_scratch()
        assert old.exists()
    assert slow.want()
    assert set(tmp_path.glob("qada-kernels-*")) == {link, new, other}
    assert (link / "library.so").exists()


@needs_compiler
def test_a_build_that_stands_still(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has been stopped: after some time others build by themselves."""
    monkeypatch.setattr(building, "WAIT_SECONDS", 0.1)
    slow.hold.touch()
    stopped = fork(slow.want)
    wait_for(lambda: slow.calls == 1)
    os.kill(stopped, signal.SIGSTOP)
    collect = in_threads(1, slow.want)
    wait_for(lambda: slow.calls == 2)
    slow.hold.unlink()
    assert collect() == [True]
    os.kill(stopped, signal.SIGCONT)
    assert ends_well(stopped)


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    """Though a process that it forked lives on."""
    going_on = tmp_path / "going on"
    going_on.touch()

    def take() -> bool:
        with files.open_folder_at(tmp_path / "folder", make=True) as folder, files.lock(folder, "it", seconds=0):
            fork(lambda: wait_for(lambda: not going_on.exists()))
            os._exit(0)

    assert ends_well(fork(take))
    with files.open_folder_at(tmp_path / "folder") as folder:
        begun = time.monotonic()
        with files.lock(folder, "it", seconds=SECONDS):
            assert time.monotonic() - begun < SECONDS / 2
            assert len(list((tmp_path / "folder").iterdir())) == 1
    assert not list((tmp_path / "folder").iterdir())
    going_on.unlink()


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch, slow: Slow) -> None:
    """If no thread can be started to build a kernel ahead, the first caller that wants the kernel builds it."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert slow.build_ahead() is None
    assert slow.want()
    assert slow.calls == 1
