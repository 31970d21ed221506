"""Which instructions kernels for prompts may use, by what the processor and the system say. A virtual machine may mask
any."""

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Kind(NamedTuple):
    """Processors of one kind, as `operations.h` knows them."""

    needed: frozenset[str]  # instructions that the source asks for, by the names that Linux has for them
    better: dict[str, str]  # those that it can do without, and how the compiler is told of one that is not there


# Compilers of today write the first three by themselves, so that they have to know; not all know the others' names.
X86 = Kind(
    frozenset({"avx2", "fma"}),
    {
        "avx512f": "-mno-avx512f", "avx512bw": "-mno-avx512bw", "avx512dq": "-mno-avx512dq",
        "avx512_vnni": "-mno-avx512vnni", "avx512_bf16": "-U__AVX512BF16__", "avx_vnni": "-U__AVXVNNI__",
        "amx_tile": "-U__AMX_TILE__", "amx_bf16": "-U__AMX_BF16__",
    },
)  # fmt: skip
ARM = Kind(
    frozenset({"asimd"}),
    {"asimddp": "-U__ARM_FEATURE_DOTPROD", "bf16": "-U__ARM_FEATURE_BF16_VECTOR_ARITHMETIC"},
)
MULTIPLIES_TILES = frozenset({"avx512_bf16", "amx_tile", "amx_bf16"})  # of bfloat16, as operations.h has it
BEYOND_AVX2 = "avx512", "avx_", "amx"
CPUINFO = Path("/proc/cpuinfo")
# Linux gives a process tiles when it asks for them: the system call, and its arguments.
ARCH_PRCTL, REQUEST, TILES = 158, 0x1023, 18
# macOS's names for what is asked of an Arm processor.
OF_MACOS = {"asimd": "arm64", "asimddp": "arm.FEAT_DotProd", "bf16": "arm.FEAT_BF16"}


@functools.cache
def read_instructions() -> frozenset[str]:
    """The names of instruction sets that the processor and the system have, where the system tells."""
    if sys.platform == "darwin":
        return frozenset(_ask_macos())
    lines = (line for line in _read_lines() if line.startswith(("flags", "Features")))
    found = next((frozenset(line.split()) for line in lines), frozenset())
    if is_limited():
        return _without(BEYOND_AVX2, found)
    return found if "amx_tile" not in found or _get_tiles() else _without(("amx",), found)


def _without(beginnings: tuple[str, ...], names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if not name.startswith(beginnings))


def _get_tiles() -> bool:
    """Whether Linux lets this process use tiles of AMX, from now on."""
    return platform.machine() == "x86_64" and ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILES) == 0


def is_limited() -> bool:
    """Whether torch is told to use nothing beyond AVX2: so are our kernels."""
    return os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"


def find_kind(instructions: frozenset[str]) -> Kind | None:
    """The kind of a processor with these; None where a needed one is missing."""
    return next((kind for kind in (X86, ARM) if instructions >= kind.needed), None)


def identify() -> list[str]:
    """Lines that tell what "native" means to a compiler: machines that share a folder may differ in them."""
    fields = "flags", "Features", "model name", "CPU implementer", "CPU part"
    known = {line for line in _read_lines() if line.startswith(fields)}
    return sorted(known) or [platform.platform(), *sorted(read_instructions())]


def _read_lines() -> list[str]:
    """Lines of Linux about each core; none on another system."""
    try:
        return CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _ask_macos() -> Iterator[str]:
    ask = ctypes.CDLL(None).sysctlbyname
    for name, known in OF_MACOS.items():
        value = ctypes.c_int(0)
        size = ctypes.c_size_t(ctypes.sizeof(value))
        failed = ask(f"hw.optional.{known}".encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
        if not failed and value.value:
            yield name
