"""Shared libraries from C++ source, built at first use and kept in the user's cache folder."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ..files import home

# Sums may be reordered, which is what vectors do. Not -ffast-math: loading what was linked with it changes the
# rounding of the whole process.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)


def library(source: Path, macros: tuple[str, ...]) -> Path:
    """The path of `source` and the headers beside it built with `macros` (`-DNAME=VALUE`): built before, or now.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be built here; the message says why.
    """
    compiler = _compiler()
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    built_from = (*texts, *FLAGS, *macros, compiler, _version(compiler), _processor())
    name = hashlib.sha256("\0".join(built_from).encode()).hexdigest()[:32] + ".so"
    folder = home() / "kernels"
    if (folder / name).is_file():
        return folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        workplace = tempfile.mkdtemp(prefix=".", dir=folder)
    except OSError:  # a cache folder that cannot be written to is no reason to be slow
        folder = Path(_session_folder().name)
        workplace = tempfile.mkdtemp(dir=folder)
    try:
        unfinished = Path(workplace, name)
        command = [compiler, *FLAGS, *macros, str(source), "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise OSError(f"{compiler} failed with {(done.stderr.splitlines() or [str(done.returncode)])[0]}")
        os.replace(unfinished, folder / name)  # another process sees a whole library or none
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return folder / name


@functools.cache
def _session_folder() -> tempfile.TemporaryDirectory:
    """Removed when the interpreter exits."""
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
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout


@functools.cache
def _processor() -> str:
    """What `-march=native` stands for, as the cache folder may be shared by different machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
