"""How fast attention reads keys and values on the CPU, kernel beside kernel: `python -m eval.kernel_speed`.

    python -m eval.kernel_speed --out eval/results

One query token over random contexts that lie in memory as a cache keeps its bulk, several layers in turn, so that no
processor's cache holds them. `share` is of what a plain reduction reads in the same turn.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eval.models.geometries import GEOMETRIES
from eval.reporting.machine import machine
from eval.reporting.tables import plain, write
from eval.timing.hardware import SIZE
from qada_cache.kernels import sdpa
from qada_cache.kernels.cpu import compiled
from qada_cache.storage import pages

LAYERS = 16


def contexts(kv_heads: int, tokens: int, dim: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Random keys and values `[1, kv_heads, tokens, dim]` of every layer."""
    shape = (1, kv_heads, tokens, dim)

    def made() -> Tensor:
        return pages.empty(shape, dtype).copy_(torch.randn(shape))

    return [(made(), made()) for _ in range(LAYERS)]


def speeds(query: Tensor, layers: list[tuple[Tensor, Tensor]], turns: int) -> dict[str, float]:
    """Bytes a second by kernel, and by a plain reduction, the best of several turns."""
    plain_data = pages.empty((SIZE // 4,), torch.float32).fill_(1)
    context = sum(keys.nbytes + values.nbytes for keys, values in layers)

    def attend(kernel: Callable) -> Callable[[], int]:
        def run() -> int:
            for keys, values in layers:
                found = kernel(query, keys, values, scaling=query.shape[-1] ** -0.5)
                if found is None:
                    raise RuntimeError("the compiled kernel could not be built (its warning says why)")
            return context

        return run

    def reduce() -> int:
        plain_data.sum()
        return plain_data.nbytes

    works = {
        "read": reduce,
        "compiled": attend(compiled.compiled_partial_attention),
        "torch": attend(sdpa.sdpa_partial_attention),
    }
    best = dict.fromkeys(works, 0.0)
    for _ in range(turns):
        for name, work in works.items():
            begin = time.perf_counter()
            moved = work()
            best[name] = max(best[name], moved / (time.perf_counter() - begin))
    return best


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.kernel_speed", description=(__doc__ or "").split("\n\n", maxsplit=1)[0]
    )
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, nargs="+", default=["llama-3.2-1b", "llama-3-8b", "qwen2-7b"],
        help="sizes of heads (default: %(default)s)")  # fmt: skip
    add("--dtype", choices=("bfloat16", "float16", "float32"), nargs="+", default=["bfloat16", "float16", "float32"],
        help="(default: %(default)s)")  # fmt: skip
    add("--tokens", type=int, default=16384, help="of context (default: %(default)s)")
    add("--turns", type=int, default=5, help="over all kernels (default: %(default)s)")
    add("--out", type=Path, help="folder to write kernel_speed.csv to")
    options = parser.parse_args(arguments)
    if options.out and not options.out.is_dir():
        parser.error(f"--out: there is no folder {options.out}")
    rows: list[dict[str, Any]] = []
    for name in tqdm(options.geometry, unit="geometry"):
        _, _, _, heads, kv_heads, dim, _ = GEOMETRIES[name]
        for dtype in options.dtype:
            layers = contexts(kv_heads, options.tokens, dim, getattr(torch, dtype))
            query = torch.randn(1, kv_heads, heads // kv_heads, dim).to(layers[0][0].dtype)
            found = speeds(query, layers, options.turns)
            row = {"geometry": name, "dtype": dtype, "queries": heads // kv_heads, "dim": dim}
            row |= {f"{kernel}_gb_per_s": f"{speed / 1e9:.1f}" for kernel, speed in found.items()}
            rows.append(row | {"share": f"{found['compiled'] / found['read']:.2f}"})
            del layers
    print(f"{machine()}; {torch.get_num_threads()} threads")
    print(plain(rows))
    if options.out:
        write(options.out / "kernel_speed.csv", rows, tokens=options.tokens, threads=torch.get_num_threads(),
              machine=machine())  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
