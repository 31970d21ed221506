"""C++ built on the user's machine: a source beside this file, as a library for the sizes that macros give.

A library is kept in the user's cache folder, under a name that says all that it was built from. Whoever needs one waits
for a build of it that is under way, in a thread of this process or in another process.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from ... import files
from ...said_once import warn_once
from . import processor
from .compiler import find_compiler, has_compiler, list_flags, read_version
from .process import run_command

logger = logging.getLogger(__name__)

FOLDER = "kernels"  # in `files.find_home()`
SCRATCH = "qada-kernels-"  # how names of temporary folders begin
DIGEST_BYTES = 32
WAIT_SECONDS = 60  # for another process that builds the same library, which may have been stopped
FLAGS = list_flags()
OF_DESCRIPTORS = "/proc/self/fd" if sys.platform.startswith("linux") else None  # folders that paths may go by


class Library(NamedTuple):
    """A source with the headers beside it, built with macros (`-DNAME=VALUE`)."""

    source: Path
    macros: tuple[str, ...]
    build: Callable[[], ctypes.CDLL | None]  # the function that returns the library, built now if need be


class _Builds:
    """The builds of this process's threads."""

    def __init__(self) -> None:
        # By `_find_key`: a build that is under way, or done and not requested yet; None: it was returned.
        self.futures: dict[tuple[Any, ...], Future[ctypes.CDLL] | None] = {}
        self.lock = threading.Lock()  # of `futures`
        self.turn = threading.Lock()  # for builds in the background, one at a time


_builds = _Builds()


def _forget_builds() -> None:
    global _builds
    _builds = _Builds()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_builds)  # a forked process has none of the threads that build


def build_library(source: Path, macros: tuple[str, ...], warning: str) -> ctypes.CDLL | None:
    """`source` and the headers beside it built with `macros` (`-DNAME=VALUE`), before or now; None, with one `warning`
    that goes on with the reason, if it cannot be built."""
    builds, key = _builds, _find_key(source, macros)
    with builds.lock:
        known = builds.futures.get(key)
        build = builds.futures[key] = known or Future()
    if known is None:
        run = functools.partial(_carry_out, build, source, macros)
        if not _start(run):  # a thread of its own, as whoever waits may be interrupted, and others wait too
            run()
    try:
        return build.result()
    except (OSError, subprocess.SubprocessError) as error:
        warn_once(logger, f"{warning}: {error}")
        return None
    finally:
        with builds.lock:
            if build.done() and builds.futures[key] is build:
                builds.futures[key] = None


def build_ahead(libraries: Sequence[Library]) -> threading.Thread | None:
    """Build in the background, one after the other, those of these libraries that this process has not asked for yet.
    Returns the thread, None if there is nothing to do or no compiler. Errors are for those who ask for a library."""
    if all(_find_key(*each[:2]) in _builds.futures for each in libraries) or not has_compiler():
        return None
    return _start(functools.partial(_build_in_turn, _builds, libraries))


def check_size(ours: type[ctypes.Structure], size: int, source: Path) -> None:
    """Raise RuntimeError if `source` has a structure of this name of another size, in bytes."""
    if size != ctypes.sizeof(ours):
        name = ours.__name__
        raise RuntimeError(f"{source.name} has a {name} of {size} bytes, and its module of {ctypes.sizeof(ours)}")


def check_memory(failed: Any, *_: Any) -> Any:
    """The `errcheck` of a function that returns 1 where memory ran out."""
    if failed:
        raise MemoryError("there is no memory for the temporaries of attention on the CPU")
    return failed


def _find_key(source: Path, macros: tuple[str, ...]) -> tuple[Any, ...]:
    return files.find_home(), FLAGS, source, macros


def _start(run: Callable[[], None]) -> threading.Thread | None:
    """A thread that runs this, and that the end of the interpreter does not wait for; None, if there can be none."""
    thread = threading.Thread(target=run, name="qada-build", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there are as many as there can be, or the interpreter ends
        return None
    return thread


def _build_in_turn(builds: _Builds, libraries: Sequence[Library]) -> None:
    for source, macros, _ in libraries:
        with builds.turn:
            with builds.lock:
                if (key := _find_key(source, macros)) in builds.futures:
                    continue
                build = builds.futures[key] = Future()
            _carry_out(build, source, macros)


def _carry_out(build: Future[ctypes.CDLL], source: Path, macros: tuple[str, ...]) -> None:
    try:
        build.set_result(_load(source, macros))
    except BaseException as error:  # whatever it is, those who wait are to hear of it
        build.set_exception(error)


def _load(source: Path, macros: tuple[str, ...]) -> ctypes.CDLL:
    """As `build_library`; OSError or SubprocessError, if it cannot be built. The library is kept in a folder that only
    the user can write to, if there is one."""
    compiler = find_compiler()
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))]
    built_from = (*texts, *FLAGS, *macros, compiler, read_version(compiler), *processor.identify())
    name = hashlib.sha256("\0".join(built_from).encode()).hexdigest()[:32] + ".so"
    if (kept := _load_kept(name)) is not None:
        return kept
    with _keep_others_waiting(name):
        kept = _load_kept(name)  # another process may have built it meanwhile
        return _build(compiler, source, macros, name) if kept is None else kept


def _build(compiler: str, source: Path, macros: tuple[str, ...], name: str) -> ctypes.CDLL:
    _remove_left_scratch()
    with _make_scratch() as scratch:
        library = scratch / "library.so"
        done = run_command([compiler, *FLAGS, *macros, str(source), "-o", str(library)], timeout=300, scratch=scratch)
        if done.returncode:
            told = done.stderr.splitlines() or [str(done.returncode)]
            # Lines that only say where ("In file included from a.h:1,", "In function 'f':") come before the error's.
            error = next((line for line in told if not line.endswith((":", ","))), told[0])
            raise OSError(f"{compiler} failed with {error} (CXX can name another compiler)")
        built = library.read_bytes()
        try:
            with files.open_folder(FOLDER, make=True) as folder:
                files.write(name, (built, hashlib.sha256(built).digest()), folder=folder)
                files.remove_unused_kernels(folder)
                return _link_or_remove(folder, name)
        except OSError as error:  # a cache folder that cannot be used is no reason to be slow
            loaded = ctypes.CDLL(str(library))  # which needs no file once it is loaded; another error, if it is broken
            where = files.find_home() / FOLDER
            warn_once(logger, f"kernels cannot be kept in {where} ({error}): they will be built in every process")
            return loaded


def _link_or_remove(folder: int, name: str) -> ctypes.CDLL:
    """As `_link`. A library that cannot be loaded is not kept: other processes could not load it either."""
    try:
        return _link(folder, name)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise


@contextlib.contextmanager
def _make_scratch() -> Iterator[Path]:
    """A temporary folder. No `TemporaryDirectory`: at the end of a process that is forked meanwhile, it would remove
    this process's folder."""
    path = tempfile.mkdtemp(prefix=SCRATCH)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_left_scratch() -> None:
    """Remove temporary folders that this user's killed processes left behind."""
    for path in Path(tempfile.gettempdir()).glob(f"{SCRATCH}{'[a-z0-9_]' * 8}"):  # names that `mkdtemp` makes
        with contextlib.suppress(OSError):  # another process was faster
            found = path.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > files.STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _keep_others_waiting(name: str) -> Iterator[None]:
    """Build the library of this name while no other process does, where the folder tells them. A failed build leaves no
    folder behind that was made for it."""
    home = files.find_home()
    made = [path for path in (home / FOLDER, home) if not os.path.exists(path)]
    try:
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # a folder that cannot be used is no reason to fail
                folder = held.enter_context(files.open_folder(FOLDER, make=True))
                held.enter_context(files.lock(folder, name, seconds=WAIT_SECONDS))
            yield
    finally:
        with contextlib.suppress(OSError):  # something is in it
            for path in made:
                path.rmdir()


def _load_kept(name: str) -> ctypes.CDLL | None:
    """The kept library of this name, if its bytes are those that were built: loading others may end the process. Its
    digest follows it in its file, where no loader looks."""
    with (
        contextlib.suppress(OSError),
        files.open_folder(FOLDER) as folder,
    ):  # a warning comes with the first write to it
        try:
            content = files.read(folder, name)
            if hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]:
                return _link(folder, name)
            raise OSError("it is damaged")
        except FileNotFoundError:
            pass
        except OSError as error:
            warn_once(logger, f"the kernel {files.find_home() / FOLDER / name} is built again: {error}")
    return None


def _link(folder: int, name: str) -> ctypes.CDLL:
    # By the descriptor, as the folder's path may lead to another folder by now. Loaded libraries are told apart by such
    # paths; equal names are equal libraries.
    if OF_DESCRIPTORS is not None:
        return ctypes.CDLL(f"{OF_DESCRIPTORS}/{folder}/{name}")
    # Elsewhere no path goes by a descriptor, and a loader may look at all of a file, its digest included.
    with _make_scratch() as scratch:
        copy = scratch / name
        copy.write_bytes(files.read(folder, name)[:-DIGEST_BYTES])
        return ctypes.CDLL(str(copy))  # which needs no file once it is loaded
