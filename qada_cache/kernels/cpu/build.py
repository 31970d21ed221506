"""Shared libraries from C++ source, built at first use and kept in the user's cache folder."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

from ...files import private

logger = logging.get_logger(__name__)

FOLDER = "kernels"  # of `private.home()`
DIGEST_BYTES = 32
# Sums may be reordered, as vectors need. Not -ffast-math: loading a library linked with it changes the rounding of the
# whole process.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)


def load(source: Path, macros: tuple[str, ...]) -> ctypes.CDLL:
    """`source` and the headers beside it built with `macros` (`-DNAME=VALUE`): before, or now.

    The library is kept in a folder that only the user can write to, else in one that lasts as long as the process.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be built here; the message says why.
    """
    compiler = _compiler()
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))]
    built_from = (*texts, *FLAGS, *macros, compiler, _version(compiler), _processor())
    name = hashlib.sha256("\0".join(built_from).encode()).hexdigest()[:32] + ".so"
    if (kept := _kept(name)) is not None:
        return kept
    built = _built(compiler, source, macros)
    digest = hashlib.sha256(built).digest()
    try:
        with private.opened(FOLDER, make=True) as folder:
            private.write(name, (built, digest), folder=folder)
            return _linked(folder, name)
    except OSError as error:  # a cache folder that cannot be used is no reason to be slow
        where = private.home() / FOLDER
        logger.warning_once(f"kernels cannot be kept in {where} ({error}): they will be built in every process")
    path = Path(_session_folder().name, name)
    private.write(path, (built, digest))
    return ctypes.CDLL(str(path))


def _kept(name: str) -> ctypes.CDLL | None:
    """The kept library of this name, if its bytes are those that were built: loading others may end the process.

    The digest of the library follows it in its file, where no loader looks.
    """
    try:
        with private.opened(FOLDER) as folder:
            try:
                content = private.read(folder, name)
                if hashlib.sha256(content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
                    raise OSError("it is damaged")
                return _linked(folder, name)
            except FileNotFoundError:
                return None
            except OSError as error:
                logger.warning_once(f"the kernel {private.home() / FOLDER / name} is built again: {error}")
                return None
    except OSError:  # a warning comes with the first write to the folder
        return None


def _linked(folder: int, name: str) -> ctypes.CDLL:
    # By the descriptor, as the folder's path may lead to another folder by now. Loaded libraries are told apart by such
    # paths; equal names are equal libraries.
    return ctypes.CDLL(f"/proc/self/fd/{folder}/{name}")


def _built(compiler: str, source: Path, macros: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="qada-kernels-") as folder:
        library = Path(folder, "library.so")
        done = _run([compiler, *FLAGS, *macros, str(source), "-o", str(library)], timeout=300)
        if done.returncode:
            raise OSError(f"{compiler} failed with {(done.stderr.splitlines() or [str(done.returncode)])[0]}")
        return library.read_bytes()


def _run(command: list[str], timeout: int) -> subprocess.CompletedProcess[str]:
    # Compilers speak the user's language, in whatever encoding.
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)


@functools.cache
def _session_folder() -> tempfile.TemporaryDirectory:
    """For the user alone; removed when the interpreter exits."""
    return tempfile.TemporaryDirectory(prefix="qada-kernels-")


def _compiler() -> str:
    """The path of a C++ compiler.

    Raises:
        OSError: there is none, or it is not known to build for this system.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(f"it is built on Linux only, not on {sys.platform}")
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if candidate and (path := shutil.which(candidate)):
            return path
    raise OSError("there is no C++ compiler (install g++, or name one in CXX)")


@functools.cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"], timeout=60).stdout


@functools.cache
def _processor() -> str:
    """The processor that `-march=native` means; different machines may share the cache folder."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
