"""What Triton's kernels are compiled to: `python -m eval.triton_resources --out eval/results/triton-resources.csv`.

No GPU is used: the compiler and the assembler are those that come with Triton. A row is one kernel of one decode step;
without a group, of storing tokens: of the sketch, or behind a plus of the records alone. Heads of 576 channels are
those of latents, with as many query heads as the group; `latent_kernel` and `recorded_latent_kernel` read
all exactly. `share_kernel`, `sample_kernel` and `read_kernel` are those of a prompt that is read by selection; their
group is of queries that read together. A row has registers and stack bytes of a thread, bytes of shared memory of a
program, the instructions of its code, each counted once, however often it runs, and those of a turn of each innermost
loop, in the code's order. `tokens` are those that a turn takes, with so many `warps`. The last loop of `share_kernel`
meets every pair, the one before it one of 16 to 64. The first loop of `read_kernel` is exact attention, the last reads
tokens that were chosen. `sketch` is bits a value; behind a plus, `bulk_bits` of records.
"""

import itertools
import sys
from typing import Any

import torch

from eval.shared.compiling import SKETCHES, Compiled, Recorder, Step, record_latents, record_prompt
from eval.shared.tables import align, make_parser, table_of, write
from qada_cache.kernels.triton.latents import WIDE_QUERIES

ARCHITECTURES = (80, 89, 90)
SIZES = ((64, 3), (64, 7), (80, 8), (96, 4), (128, 1), (128, 4), (128, 8), (256, 2))  # dim, group
CAPACITY = 40_000
PROMPTS = ((64, 64), (64, 128), (128, 64), (128, 128), (256, 64))  # dim, queries that read together
PROMPT_GROUP = 4
LATENT, RANK, LATENT_HEADS = 576, 512, (16, 32, 128)
DIMS = sorted({LATENT, *(dim for dim, _ in (*SIZES, *PROMPTS))})


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
        "instructions": len(compiled.instructions),
        "loops": " ".join(map(str, compiled.count_loops())),
        "tokens": recorder.arguments.get("BLOCK_N", ""),
        "warps": recorder.arguments.get("num_warps", 4),
    }


def main(argv: list[str] | None = None) -> int:
    """Compile, print and write the table."""
    parser = make_parser("triton_resources", __doc__)
    add = parser.add_argument
    add("--dims", type=int, nargs="+", choices=DIMS, help="only heads of so many channels")
    add("--sketches", nargs="+", choices=SKETCHES, default=list(SKETCHES), help="only these")
    add(
        "--architectures",
        type=int,
        nargs="+",
        choices=ARCHITECTURES,
        default=ARCHITECTURES,
        help="80 is capability 8.0",
    )
    add("--out", type=table_of("kernel", "registers"), help="CSV table to write")
    args = parser.parse_args(argv)
    sizes = [size for size in SIZES if args.dims is None or size[0] in args.dims]

    def measure(dim: int, group: int | str, sketch: str, recorders: list[Recorder]) -> list[dict[str, Any]]:
        pairs = itertools.product(recorders, args.architectures)
        return [measure_resources(recorder, dim, group, sketch, architecture) for recorder, architecture in pairs]

    rows = []
    for (dim, group), sketch in itertools.product(sizes, args.sketches):
        counted = {"bulk_read_bytes": torch.zeros((), dtype=torch.int64, device="cpu")}
        step = Step(dim, dim, group, torch.bfloat16, CAPACITY, *SKETCHES[sketch], counted)
        rows += measure(dim, group, sketch, step.record_launches())
    for dim, sketch in itertools.product(sorted({dim for dim, _ in sizes}), args.sketches):
        if SKETCHES[sketch][0]:
            stored = Step(dim, dim, 1, torch.bfloat16, CAPACITY, *SKETCHES[sketch])
            rows += measure(dim, "", sketch, stored.record_storing())
    if args.dims is None or LATENT in args.dims:
        for sketch in args.sketches:
            counted = {"bulk_read_bytes": torch.zeros((), dtype=torch.int64, device="cpu")}
            step = Step(
                LATENT, RANK, LATENT_HEADS[0], torch.bfloat16, CAPACITY, *SKETCHES[sketch], counted, shared=True
            )
            rows += measure(LATENT, LATENT_HEADS[0], sketch, step.record_launches())
        coded = [sketch for sketch in args.sketches if SKETCHES[sketch][1] < 16]
        for heads, sketch in itertools.product(LATENT_HEADS, ("", *coded)):
            told = {"most": WIDE_QUERIES, "rung": SKETCHES[sketch][1] if sketch else 16}
            found = record_latents(LATENT, RANK, heads, torch.bfloat16, **told)
            rows += measure(LATENT, heads, sketch, found[:1] if sketch else found)  # parts are merged alike
    for (dim, block), architecture in itertools.product(PROMPTS, args.architectures):
        if args.dims is None or dim in args.dims:
            found = record_prompt(dim, PROMPT_GROUP, divmod(architecture, 10), block)
            rows += [measure_resources(recorder, dim, block, "", architecture) for recorder in found]
    print(align(rows))
    if args.out is not None:
        write(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
