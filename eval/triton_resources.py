"""What Triton's kernels are compiled to: `python -m eval.triton_resources --out eval/results/triton-resources.csv`.

No GPU is used: the compiler and the assembler are those that come with Triton. A row is one kernel of one decode step;
without a group, of storing tokens: of the sketch, or behind a plus of the records alone. It has registers and stack
bytes of a thread, bytes of shared memory of a program, and the instructions of its code, each counted once, however
often it runs. `sketch` is bits a value; behind a plus, `bulk_bits` of records.
"""

import argparse
import sys
from typing import Any

import torch

from eval.shared.compiling import Compiled, Recorder, Step
from eval.shared.tables import align, new_file, write

ARCHITECTURES = (80, 90)
SIZES = ((64, 3), (64, 7), (80, 8), (96, 4), (128, 1), (128, 4), (128, 8), (256, 2))  # dim, group
SKETCHES = {"0": (0, 16), "1.5": (1.5, 16), "1.5+8": (1.5, 8), "1.5+4": (1.5, 4)}  # bits of the sketch and of the bulk
CAPACITY = 40_000


def record_launches(dim: int, group: int, bits: float, rung: int) -> list[Recorder]:
    """Of a step in bfloat16 that counts its bytes."""
    counted = {"bulk_read_bytes": torch.zeros((), dtype=torch.int64, device="cpu")}
    return Step(dim, dim, group, torch.bfloat16, CAPACITY, bits, rung, counted).record_launches()


def record_storing(dim: int, bits: float, rung: int) -> list[Recorder]:
    """Of tokens in bfloat16."""
    return Step(dim, dim, 1, torch.bfloat16, CAPACITY, bits, rung).record_storing()


def measure_resources(recorder: Recorder, dim: int, group: int | str, sketch: str, architecture: int) -> dict[str, Any]:
    """A row of the table."""
    compiled = Compiled(recorder, architecture)
    return {
        "kernel": recorder.kernel.__name__,
        "dim": dim,
        "group": group,
        "sketch": sketch,
        "architecture": f"sm_{architecture}",
        "registers": compiled.registers,
        "stack": compiled.stack,
        "shared": compiled.shared,
        "instructions": compiled.instructions,
    }


def main(argv: list[str] | None = None) -> int:
    """Compile, print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m eval.triton_resources", description=__doc__)
    parser.add_argument("--out", type=new_file, help="write the table here, as CSV")
    parser.add_argument("--dims", type=int, nargs="+", help="only heads of so many channels")
    parser.add_argument("--sketches", nargs="+", choices=SKETCHES, default=list(SKETCHES), help="only these")
    parser.add_argument("--architectures", type=int, nargs="+", default=ARCHITECTURES, help="80 is capability 8.0")
    args = parser.parse_args(argv)
    rows = [
        measure_resources(recorder, *size, sketch, architecture)
        for size in SIZES
        if args.dims is None or size[0] in args.dims
        for sketch in args.sketches
        for recorder in record_launches(*size, *SKETCHES[sketch])
        for architecture in args.architectures
    ]
    rows += [
        measure_resources(recorder, dim, "", sketch, architecture)
        for dim in sorted({dim for dim, _ in SIZES})
        if args.dims is None or dim in args.dims
        for sketch in args.sketches
        if SKETCHES[sketch][0]
        for recorder in record_storing(dim, *SKETCHES[sketch])
        for architecture in args.architectures
    ]
    print(align(rows))
    if args.out is not None:
        write(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
