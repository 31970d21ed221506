"""Compiles the C++ kernels for several sizes and instruction sets, with every warning an error: `python -m
tests.helpers.check_cpp` for this processor, or with names of `TARGETS`."""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from qada_cache.kernels import cpu
from qada_cache.kernels.cpu import building, correlating, latent, prompt, quantizing, recording, selected_prompt
from qada_cache.kernels.cpu.processor import ARM, X86
from qada_cache.sketch.coded import RecordLayout

# Element type, dim, value_dim, queries and bits of a bulk.
SIZES = (
    *(("BFLOAT16", 64, 64, 4, 16), ("FLOAT32", 128, 128, 1, 16), ("FLOAT16", 80, 64, 7, 16)),
    *(("BFLOAT16", 64, 64, 4, 8), ("FLOAT32", 80, 128, 2, 4)),
)
WARNINGS = ("-Wall", "-Wextra", "-Werror")
# -Wpsabi warns that instruction sets differ in how functions pass wide vectors: nothing else is linked with a kernel.
# GCC's own headers for AVX-512 leave values uninitialised.
UNINITIALIZED = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
UNWARNED = {"x86-64": ("-Wno-psabi",)} | dict.fromkeys(("x86-64-v4", "cooperlake", "sapphirerapids"), UNINITIALIZED)
LATENT_SIZES = ((torch.bfloat16, 576, 512, 8), (torch.float16, 48, 32, 16), (torch.float32, 40, 24, 4))
QUANTIZER_SIZES = ((torch.bfloat16, 64), (torch.float16, 80), (torch.float32, 576))
PROMPT_SIZES = ((64, 64), (128, 128), (80, 48))
ZIG = sys.executable, "-m", "ziglang", "c++", "-target"  # has a compiler for each system in one package


class Target(NamedTuple):
    """A system and its compiler, with the processors that kernels are compiled for."""

    compiler: tuple[str, ...]
    tell: str  # the compiler's flag that names a processor
    processors: tuple[str, ...]  # for kernels for decoding
    of_prompts: dict[str, frozenset[str]]  # for kernels for prompts: by processor, its set of instructions


AVX512 = {"avx512f", "avx512bw", "avx512dq"}
OF_X86 = {
    "x86-64-v3": X86.needed,
    "x86-64-v4": X86.needed | AVX512,
    "alderlake": X86.needed | {"avx_vnni"},
    "cooperlake": X86.needed | AVX512 | {"avx512_vnni", "avx512_bf16"},
    "sapphirerapids": X86.needed | set(X86.better),
}
OF_ARM = {
    "armv8-a": ARM.needed,
    "armv8.2-a+dotprod": ARM.needed | {"asimddp"},
    "armv8.6-a": ARM.needed | set(ARM.better),
}
OF_MACS = {"apple_m1": ARM.needed | {"asimddp"}, "apple_m2": ARM.needed | set(ARM.better)}
OF_WINDOWS = {"x86_64_v3": X86.needed, "x86_64_v4": X86.needed | AVX512}
TARGETS = {
    "x86_64": Target(
        (os.environ.get("CXX", "c++"),), "-march", ("x86-64", "x86-64-v3", "alderlake", "x86-64-v4"), OF_X86
    ),
    "aarch64": Target(("aarch64-linux-gnu-g++",), "-march", tuple(OF_ARM), OF_ARM),
    "macos": Target((*ZIG, "aarch64-macos"), "-mcpu", tuple(OF_MACS), OF_MACS),
    "windows": Target((*ZIG, "x86_64-windows-gnu"), "-mcpu", tuple(OF_WINDOWS), OF_WINDOWS),
}


class Build(NamedTuple):
    """One compilation: a source file, `-D` options and a processor of the target."""

    source: Path
    macros: tuple[str, ...]
    processor: str


def main(names: Sequence[str]) -> int:
    """Compile for the targets of these `names`, or for this machine; return the number of builds that failed."""
    return sum(map(count_failures, [TARGETS[name] for name in names or (platform.machine(),) if name in TARGETS]))


def count_failures(target: Target) -> int:
    """The number of the target's builds that failed. As many compilers run at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(not clean for clean in pool.map(partial(is_clean, target), list_builds(target)))


def list_builds(target: Target) -> list[Build]:
    """All builds of the target."""
    builds = []
    for (element, dim, value_dim, queries, bits), processor in product(SIZES, target.processors):
        records = RecordLayout.from_bits(dim, value_dim, bits)
        builds.append(Build(cpu.SOURCE, cpu.define(element, dim, value_dim, queries, records), processor))
        if records is not None:
            macros = cpu.define("FLOAT32", dim, value_dim, 1, records)
            builds.append(Build(recording.SOURCE, macros, processor))
        else:
            builds.append(Build(cpu.PARTIAL, cpu.define(element, dim, value_dim, queries), processor))
    for (dtype, dim), processor in product(QUANTIZER_SIZES, target.processors):
        builds.append(Build(quantizing.SOURCE, quantizing.define_quantizer(dtype, dim), processor))
    for (dtype, dim, rank, bits), processor in product(LATENT_SIZES, {*target.processors, *target.of_prompts}):
        records = RecordLayout.from_bits(dim, 0, bits)
        builds.append(Build(latent.SOURCE, latent.define_latent(dtype, dim, rank, records), processor))
        macros = cpu.define(cpu.ELEMENTS[dtype], dim, rank, 4, records, shared=True)
        builds.append(Build(cpu.SOURCE, macros, processor))
    of_prompts = dict.fromkeys((prompt.SOURCE, correlating.SOURCE), prompt.define)
    of_prompts[selected_prompt.SOURCE] = selected_prompt.define_selecting
    for processor, instructions in target.of_prompts.items():
        with mock.patch.object(prompt, "read_instructions", lambda found=instructions: found):
            for (source, define), sizes, dtype in product(of_prompts.items(), PROMPT_SIZES, prompt.NUMBERS):
                builds.append(Build(source, define(*sizes, dtype), processor))
    return builds


def is_clean(target: Target, build: Build) -> bool:
    """Whether the build compiles without a warning. Prints the outcome."""
    left_out = "-w", "-march=native", "-mcpu=native", "-shared", "-O3"
    flags = [flag for flag in building.FLAGS if flag not in left_out]
    told = f"{target.tell}={build.processor}", *WARNINGS, *UNWARNED.get(build.processor, ())
    with tempfile.TemporaryDirectory() as folder:  # Zig's compiler writes to no device
        asked = [*target.compiler, *flags, "-O1", *told, *build.macros, "-c", str(build.source), "-o", f"{folder}/it.o"]
        done = subprocess.run(asked, check=False, capture_output=True, text=True)
    outcome = "failed" if done.returncode else "is clean"
    print(
        f"{build.source.name} {build.processor} {' '.join(build.macros)} {outcome}\n{done.stderr}", end="", flush=True
    )
    return not done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
