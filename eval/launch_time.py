"""What a decode step of one layer costs the host: `python -m eval.launch_time --out eval/results/launch_time.csv`.

    OMP_NUM_THREADS=1 python -m eval.launch_time

No GPU is used. Triton binds arguments, finds what it has compiled and calls a launcher, as on a GPU; the launcher is a
stand-in that does nothing, so that `host_us` leaves out what the driver does. `dynamic_us` is what DynamicCache's
layer takes for the same token, `update` and attention by `scaled_dot_product_attention` over a context of few tokens:
on a CPU that is hardly more than Python and calls of operators. A layer of QAdACache stores the token and estimates its
bulk's attention besides. `sketch` is as in `triton-resources.csv`. Both are medians of rounds in turn, of the steps'
means.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from eval.shared.compiling import Step
from eval.shared.tables import align, new_file, write
from eval.triton_resources import CAPACITY, SKETCHES
from qada_cache.kernels.triton import fused_decode
from qada_cache.machine import describe_machine

DIM, GROUP = 128, 4
CONTEXT = 16  # tokens of DynamicCache


class Launcher:
    """Launches nothing. `launched` has, of each time, the kernel's name and its arguments, constants included."""

    launched: ClassVar[list[tuple[str, tuple[Any, ...]]]] = []

    def __init__(self, source: Any, _metadata: Any) -> None:
        self._name = source.fn.__name__

    def __call__(self, *given: Any) -> None:
        """Nine of `given` come before the kernel's arguments: grid, stream, and what the launcher is told."""
        self.launched.append((self._name, given[9:]))


# What Triton asks of a device before it launches a kernel: here of compute capability 9.0.
DRIVER = SimpleNamespace(
    launcher_cls=Launcher,
    get_current_device=lambda: 0,
    get_current_stream=lambda _device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    utils=SimpleNamespace(
        get_device_properties=lambda _device: {"max_shared_mem": 227 * 1024},
        load_binary=lambda *_: (None, None, 0, 0, 1024),
    ),
)


def make_step(bits: float, rung: int) -> Callable[[], object]:
    """A layer's step, whose kernels are compiled and bound."""
    counted = {"bulk_read_bytes": torch.zeros((), dtype=torch.int64, device="cpu")}
    query, rows, layer = Step(DIM, DIM, GROUP, torch.bfloat16, CAPACITY, bits, rung, counted).make_operands()
    return lambda: fused_decode(query, rows, layer)


def make_dynamic_step() -> Callable[[], object]:
    """As `make_step`, by DynamicCache, whose context stays as it is."""
    made = torch.zeros(2, 2 * GROUP, CONTEXT, DIM, dtype=torch.bfloat16, device="cpu")
    query, token, context = made[:, :, :1], made[:, :2, :1], made[:, :2]
    cache = DynamicCache()
    cache.update(context, context, 0)

    def compute() -> None:
        cache.layers[0].keys = cache.layers[0].values = context
        keys, values = cache.update(token, token, 0)
        attended = scaled_dot_product_attention(query, keys, values, scale=0.1, enable_gqa=True)
        attended.transpose(1, 2).contiguous()

    return compute


def measure(compute: Callable[[], object], steps: int) -> float:
    """Microseconds of a step."""
    Launcher.launched.clear()
    begin = time.perf_counter()
    for _ in range(steps):
        compute()
    return 1e6 * (time.perf_counter() - begin) / steps


@torch.inference_mode()
def measure_row(sketch: str, rounds: int, steps: int) -> dict[str, Any]:
    """A row of the table."""
    ours, dynamic = make_step(*SKETCHES[sketch]), make_dynamic_step()
    measure(ours, 2)
    Launcher.launched.clear()
    ours()
    launches = len(Launcher.launched)
    found = [(measure(ours, steps), measure(dynamic, steps)) for _ in range(rounds)]
    host, beside = (median(each) for each in zip(*found, strict=True))
    return {
        "sketch": sketch,
        "launches": launches,
        "host_us": f"{host:.0f}",
        "dynamic_us": f"{beside:.0f}",
        "over_dynamic": f"{host / beside:.2f}",
    }


def main(argv: list[str] | None = None) -> int:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m eval.launch_time", description=__doc__)
    parser.add_argument("--out", type=new_file, help="write the table here, as CSV")
    parser.add_argument("--sketches", nargs="+", choices=SKETCHES, default=list(SKETCHES), help="only these")
    parser.add_argument("--rounds", type=int, default=20, help="in turn (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of a round (default: %(default)s)")
    args = parser.parse_args(argv)
    driver.set_active(DRIVER)
    rows = [measure_row(sketch, args.rounds, args.steps) for sketch in args.sketches]
    print(align(rows))
    if args.out is not None:
        write(args.out, rows, machine=describe_machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
