"""The user's C++ compiler, and what it is told."""

import functools
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from .process import run_command
from .processor import is_limited

# What is looked for on each system, and what to install where it is not there. Windows has none: Clang's OpenMP and
# torch's, in one process, end it.
KNOWN = {
    "linux": (("c++", "g++", "clang++"), "install g++"),
    "darwin": (("c++", "clang++"), "install Xcode's command line tools: xcode-select --install"),
}
# Without either, macOS's `c++` asks the user to install them.
XCODE = "/Library/Developer/CommandLineTools", "/Applications/Xcode.app"


def list_flags() -> tuple[str, ...]:
    """For this system and processor, where libraries are built for what the processor has."""
    arm = platform.machine().lower() in ("aarch64", "arm64")
    # The first processor with AVX2; GCC before 11 does not know x86-64-v3. Else its tuning would be for that one, too.
    limited = "-march=haswell", "-mtune=generic"
    built_for = ("-mcpu=native",) if arm else limited if is_limited() else ("-march=native",)
    return (
        *("-std=c++17", "-O3", *built_for, *_use_openmp(), "-shared", "-fPIC", "-w"),
        # Sums may be reordered, as vectors need. Not -ffast-math: loading a library linked with it changes the rounding
        # of the whole process.
        *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
    )


def _use_openmp() -> tuple[str, ...]:
    if sys.platform != "darwin":
        return ("-fopenmp",)
    # Xcode's compiler knows OpenMP and has no library of it. Torch's is loaded already, and no process may have two.
    found = Path(torch.__file__).parent / "lib"
    folder = found if (found / "libomp.dylib").exists() else Path(sys.prefix, "lib")  # the latter is conda's
    return "-Xclang", "-fopenmp", f"-L{folder}", "-lomp", f"-Wl,-rpath,{folder}"


def find_compiler() -> str:
    """The path of a C++ compiler; OSError, if there is none, or none is known to build for this system."""
    if sys.platform not in KNOWN:
        raise OSError(f"it is built on Linux, Windows' one (WSL) included, and on macOS, not on {sys.platform}")
    names, advice = KNOWN[sys.platform]
    if sys.platform == "darwin" and not any(map(os.path.exists, XCODE)):
        names = ()
    for candidate in (os.environ.get("CXX"), *names):
        if candidate and (path := shutil.which(candidate)):
            return path
    raise OSError(f"there is no C++ compiler ({advice}, or name one in CXX)")


def has_compiler() -> bool:
    """Whether kernels can be built here, as far as can be told without building one."""
    try:
        find_compiler()
    except OSError:
        return False
    return True


@functools.cache
def read_version(compiler: str) -> str:
    """All that the compiler says of its version."""
    return run_command([compiler, "--version"], timeout=60).stdout
