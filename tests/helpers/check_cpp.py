"""The C++ kernels compiled for several sizes and instruction sets, all warnings being errors."""

import platform
import subprocess
import sys
from itertools import product
from pathlib import Path
from unittest import mock

import torch

from qada_cache.kernels import cpu
from qada_cache.kernels.cpu import building, latent, prompt, quantizing, recording, selected_prompt
from qada_cache.sketch.coded import RecordLayout

# Element, dimensions, queries, and bits of a bulk.
SIZES = (
    *(("BFLOAT16", 64, 64, 4, 16), ("FLOAT32", 128, 128, 1, 16), ("FLOAT16", 80, 64, 7, 16)),
    *(("BFLOAT16", 64, 64, 4, 8), ("FLOAT32", 80, 128, 2, 4)),
)
PROCESSORS = {"x86_64": ("x86-64", "x86-64-v3", "x86-64-v4"), "aarch64": ("armv8-a",)}
NEWEST = {"x86_64": ("cooperlake",)}  # which multiply bfloat16
WARNINGS = ("-Wall", "-Wextra", "-Werror")
# Nothing else is linked, so that it is all the same how wide vectors are passed; GCC's own headers for AVX-512 leave
# values uninitialised.
UNINITIALIZED = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")
UNWARNED = {"x86-64": ("-Wno-psabi",), "x86-64-v4": UNINITIALIZED, "cooperlake": UNINITIALIZED}
LATENT_SIZES = ((torch.bfloat16, 576, 512, 8), (torch.float16, 48, 32, 16), (torch.float32, 40, 32, 4))
PROMPT_SIZES = ((64, 64), (128, 128), (80, 48))
# Sets of instructions that kernels for prompts are written for, and the first processors that had them.
PROMPT_PROCESSORS = {
    "x86-64-v3": prompt.NEEDED,
    "x86-64-v4": prompt.NEEDED | {"avx512f", "avx512bw"},
    "cooperlake": prompt.NEEDED | set(prompt.BETTER),
}


def main() -> int:
    """The number of builds that a warning stopped."""
    machine, failed = platform.machine(), 0
    for (element, dim, value_dim, queries, bits), processor in product(SIZES, PROCESSORS.get(machine, ())):
        records = RecordLayout.from_bits(dim, value_dim, bits)
        failed += not is_clean(cpu.SOURCE, cpu.define(element, dim, value_dim, queries, records), processor)
        if records is not None:
            failed += not is_clean(recording.SOURCE, cpu.define("FLOAT32", dim, value_dim, 1, records), processor)
    for dim, processor in product((64, 80), PROCESSORS.get(machine, ())):
        failed += not is_clean(quantizing.SOURCE, quantizing.define_quantizer(dim), processor)
    for (dtype, dim, rank, bits), processor in product(
        LATENT_SIZES, (*PROCESSORS.get(machine, ()), *NEWEST.get(machine, ()))
    ):
        macros = latent.define_latent(dtype, dim, rank, RecordLayout.from_bits(dim, 0, bits))
        failed += not is_clean(latent.SOURCE, macros, processor)
    of_prompts = (prompt.SOURCE, prompt.define), (selected_prompt.SOURCE, selected_prompt.define_selecting)
    for processor, instructions in PROMPT_PROCESSORS.items() if machine == "x86_64" else ():
        with mock.patch.object(prompt, "read_instructions", lambda found=instructions: found):
            for (source, define), sizes, dtype in product(of_prompts, PROMPT_SIZES, prompt.NUMBERS):
                failed += not is_clean(source, define(*sizes, dtype), processor)
    return failed


def is_clean(source: Path, sizes: tuple[str, ...], processor: str) -> bool:
    """Whether `source` compiles without a warning."""
    flags = [flag for flag in building.FLAGS if flag not in ("-w", "-march=native", "-shared", "-O3")]
    command = [building.find_compiler(), *flags, "-O1", f"-march={processor}", *WARNINGS, *UNWARNED.get(processor, ())]
    done = subprocess.run([*command, *sizes, "-c", str(source), "-o", "/dev/null"], check=False)
    print(source.name, processor, *sizes, "failed" if done.returncode else "is clean", flush=True)
    return not done.returncode


if __name__ == "__main__":
    sys.exit(main() > 0)
