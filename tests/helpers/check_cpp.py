"""The C++ kernels compiled for several sizes and instruction sets, all warnings being errors."""

import platform
import subprocess
import sys
from itertools import product

from qada_cache.kernels import cpu

SIZES = (("BFLOAT16", 64, 64, 4), ("FLOAT32", 128, 128, 1), ("FLOAT16", 80, 64, 7))  # element, dims, queries
PROCESSORS = {"x86_64": ("x86-64", "x86-64-v3", "x86-64-v4"), "aarch64": ("armv8-a",)}
WARNINGS = ("-Wall", "-Wextra", "-Werror")
# Nothing else is linked, so that it is all the same how wide vectors are passed; GCC's own headers for AVX-512 leave
# values uninitialised.
UNWARNED = {"x86-64": ("-Wno-psabi",), "x86-64-v4": ("-Wno-uninitialized", "-Wno-maybe-uninitialized")}


def main() -> int:
    """The number of builds that a warning stopped."""
    flags = [flag for flag in cpu.FLAGS if flag not in ("-w", "-march=native", "-shared", "-O3")]
    failed = 0
    for (element, dim, value_dim, queries), processor in product(SIZES, PROCESSORS.get(platform.machine(), ())):
        sizes = cpu.define(element, dim, value_dim, queries)
        command = [cpu._compiler(), *flags, "-O1", f"-march={processor}", *WARNINGS, *UNWARNED.get(processor, ())]
        done = subprocess.run([*command, *sizes, "-c", str(cpu.SOURCE), "-o", "/dev/null"], check=False)
        failed += done.returncode != 0
        print(processor, *sizes, "failed" if done.returncode else "is clean", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
