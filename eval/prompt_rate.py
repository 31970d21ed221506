"""How fast a prompt's attention is on this CPU, ours and torch's in turn: `python -m eval.prompt_rate`.

    python -m eval.prompt_rate --tokens 8192 16384 --dims 64 128 --out eval/results/prompt_rate.csv

Causal attention of random queries, 4 query heads to a KV head; torch's `scaled_dot_product_attention` is given
keys and values that are repeated for every query head before the clock runs. `gflops` counts two products over half of
all pairs of tokens. `faster` is torch's median time over ours, `error` the largest deviation of some queries from
float64 over torch's.
"""

import argparse
import sys
import time
from itertools import product
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from eval.shared.tables import new_file, report
from qada_cache.kernels.cpu import prompt

GROUP, KV_HEADS = 4, 2
DTYPES = ["bfloat16", "float32"]
CHECKED = 64  # of the last queries, which are compared with float64


@torch.inference_mode()
def measure(dtype: str, dim: int, tokens: int, rounds: int) -> dict[str, Any]:
    """One row."""
    made = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, dim, generator=made).to(getattr(torch, dtype))
        for heads in (GROUP * KV_HEADS, KV_HEADS, KV_HEADS)
    )
    if not prompt.serves(query, key, value, causal=True):
        raise RuntimeError(
            "this processor has no AVX512-BF16, or there is no C++ compiler: the model's attention serves"
        )
    keys, values = (part.repeat_interleave(GROUP, dim=1) for part in (key, value))
    out = torch.empty_like(query)

    def run_ours() -> torch.Tensor:
        prompt.prompt_attention(query, key, value, scaling=dim**-0.5, causal=True, out=out)
        return out

    def run_theirs() -> torch.Tensor:
        return scaled_dot_product_attention(query, keys, values, is_causal=True)

    mask = torch.ones(CHECKED, tokens, dtype=torch.bool).tril(tokens - CHECKED)
    wide = (query[:, :, -CHECKED:].double(), keys.double(), values.double())
    true = scaled_dot_product_attention(*wide, attn_mask=mask)
    off = [
        float((way()[:, :, -CHECKED:].double() - true).abs().max()) for way in (run_ours, run_theirs)
    ]  # and warms up
    seconds: dict[Any, list[float]] = {run_ours: [], run_theirs: []}
    for _ in range(rounds):
        for way, took in seconds.items():
            begin = time.perf_counter()
            way()
            took.append(time.perf_counter() - begin)
    middle = [median(took) for took in seconds.values()]
    flops = 2 * 2 * tokens**2 / 2 * dim * GROUP * KV_HEADS
    return {
        "dtype": dtype,
        "dim": dim,
        "tokens": tokens,
        "gflops": f"{flops / middle[0] / 1e9:.0f}",
        "torch_gflops": f"{flops / middle[1] / 1e9:.0f}",
        "faster": f"{middle[1] / middle[0]:.2f}",
        "error": f"{off[0] / off[1]:.2f}",
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.prompt_rate", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[8192], help="of a prompt (default: %(default)s)")
    add("--dims", type=int, nargs="+", default=[64, 128], help="of heads (default: %(default)s)")
    add("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="(default: both)")
    add("--rounds", type=int, default=5, help="of both in turn (default: %(default)s)")
    add("--out", type=new_file, help="table to write, a CSV file")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    sizes = list(product(options.dtypes, options.dims, options.tokens))
    try:
        rows = [measure(*size, options.rounds) for size in tqdm(sizes, unit="size")]
    except RuntimeError as error:
        parser.error(str(error))
    report(rows, options.out, threads=torch.get_num_threads())
    return 0


if __name__ == "__main__":
    sys.exit(main())
