"""C++ built on the user's machine: a source beside this file, as a library for the sizes that macros give.

A library is kept in the user's cache folder, under a name that says all that it was built from.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ... import files

logger = logging.get_logger(__name__)

FOLDER = "kernels"  # of `files.find_home()`
DIGEST_BYTES = 32
# Sums may be reordered, as vectors need. Not -ffast-math: loading a library linked with it changes the rounding of the
# whole process.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)


def build_library(source: Path, macros: tuple[str, ...], warning: str) -> ctypes.CDLL | None:
    """`source` and the headers beside it built with `macros` (`-DNAME=VALUE`), before or now; None, with one `warning`
    that goes on with the reason, if it cannot be built."""
    try:
        return _load(source, macros)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning_once(f"{warning}: {error}")
        return None


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


def _load(source: Path, macros: tuple[str, ...]) -> ctypes.CDLL:
    """As `build_library`; OSError or SubprocessError, if it cannot be built. The library is kept in a folder that only
    the user can write to, if there is one."""
    compiler = find_compiler()
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))]
    # What `-march=native` means: different machines may share the cache folder.
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    built_from = (*texts, *FLAGS, *macros, compiler, _read_version(compiler), *processor)
    name = hashlib.sha256("\0".join(built_from).encode()).hexdigest()[:32] + ".so"
    if (kept := _load_kept(name)) is not None:
        return kept
    with tempfile.TemporaryDirectory(prefix="qada-kernels-") as temporary:
        library = Path(temporary, "library.so")
        done = _run([compiler, *FLAGS, *macros, str(source), "-o", str(library)], timeout=300)
        if done.returncode:
            raise OSError(f"{compiler} failed with {(done.stderr.splitlines() or [str(done.returncode)])[0]}")
        built = library.read_bytes()
        try:
            with files.open_folder(FOLDER, make=True) as folder:
                files.write(name, (built, hashlib.sha256(built).digest()), folder=folder)
                files.remove_unused_kernels(folder)
                return _link(folder, name)
        except OSError as error:  # a cache folder that cannot be used is no reason to be slow
            where = files.find_home() / FOLDER
            logger.warning_once(f"kernels cannot be kept in {where} ({error}): they will be built in every process")
        return ctypes.CDLL(str(library))  # which needs no file once it is loaded


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
            logger.warning_once(f"the kernel {files.find_home() / FOLDER / name} is built again: {error}")
    return None


def _link(folder: int, name: str) -> ctypes.CDLL:
    # By the descriptor, as the folder's path may lead to another folder by now. Loaded libraries are told apart by such
    # paths; equal names are equal libraries.
    return ctypes.CDLL(f"/proc/self/fd/{folder}/{name}")


def _run(command: list[str], timeout: int) -> subprocess.CompletedProcess[str]:
    # Compilers speak the user's language, in whatever encoding.
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)


def find_compiler() -> str:
    """The path of a C++ compiler; OSError, if there is none, or none is known to build for this system."""
    if not sys.platform.startswith("linux"):
        raise OSError(f"it is built on Linux only, not on {sys.platform}")
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if candidate and (path := shutil.which(candidate)):
            return path
    raise OSError("there is no C++ compiler (install g++, or name one in CXX)")


def has_compiler() -> bool:
    """Whether kernels can be built here, as far as can be told without building one."""
    try:
        find_compiler()
    except OSError:
        return False
    return True


@functools.cache
def _read_version(compiler: str) -> str:
    return _run([compiler, "--version"], timeout=60).stdout
