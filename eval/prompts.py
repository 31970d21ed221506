"""A prompt's attention, what its selection loses and how fast it is: `python -m eval.prompts`.

    python -m eval.prompts loss --tokens 3072 --thresholds 1 4.4 --out eval/results/prompt_loss-smollm2.csv
    python -m eval.prompts rate --tokens 8192 16384 --dims 64 128 --out eval/results/prompt_rate.csv

`loss`: prose, or code, is read at once, exactly and at each `prefill_threshold`, in turn. `kl` is the mean divergence
of the last 512 tokens' predictions from those of the exact reading, `kl_worst` a document's largest, `same` the share
of them with the same likeliest token. `pairs` is the share of all pairs of a query and an earlier key that are
computed. `seconds` is the least time of a reading, `exact_seconds` that of the exact one. With `--sampled` prompts are
read as GPUs read them, by torch, whose time says nothing. `--spreads` scale keys as `eval.codes spreads` does.

`rate`: causal attention of random queries on this CPU, 4 query heads to a KV head, ours and torch's in turn; torch's
`scaled_dot_product_attention` is given keys and values that are repeated for every query head before the clock runs.
`gflops` counts two products over half of all pairs of tokens. `faster` is torch's median time over ours, `error` the
largest deviation of some queries from float64 over torch's.
"""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from eval.shared.language_model import DEFAULT, HELP, check_loading, label, load
from eval.shared.sampled import read_as_gpus_do
from eval.shared.scaled_keys import scale_copy
from eval.shared.tables import make_parser, report, table_of, to_amount
from eval.shared.texts import CODE, PROSE, read_code, read_prose
from qada_cache.kernels.cpu import prompt
from qada_cache.tuning.prompts import LAST, PromptFigures, measure_prompt

Rows = list[dict[str, Any]]
GROUP, KV_HEADS = 4, 2
DTYPES = ["bfloat16", "float32"]
CHECKED = 64  # of the last queries, which are compared with float64


def measure_loss(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Rows:
    """A row for each text, length and threshold."""
    if min(options.tokens) <= LAST or options.documents < 1:
        parser.error(f"--tokens must be above {LAST}, --documents at least 1")
    if not min(options.thresholds) >= 0:
        parser.error("--thresholds must not be negative")
    with check_loading(parser):
        model, tokenizer = load(options.model, dtype=options.dtype, tokens=max(options.tokens), latents=False)
        models = {spread: scale_copy(model, spread) for spread in options.spreads}
    rows, reading = [], read_as_gpus_do if options.sampled else contextlib.nullcontext
    for (spread, model), text, tokens in itertools.product(models.items(), options.texts, options.tokens):
        told = {"model": label(options.model), "dtype": str(model.dtype).removeprefix("torch.")}
        told |= {"spread": spread} if any(models) else {}
        pieces = (read_code if text == CODE else read_prose)(tokenizer, length=tokens, following=0)
        readings = (
            measure_prompt(model, document.prompt, options.thresholds)
            for document in itertools.islice(pieces, options.documents)
        )
        with reading():
            found = [list(tqdm(each, total=1 + len(options.thresholds), unit="prompt")) for each in readings]
        if not found:
            parser.error(f"--tokens: no text has {tokens} tokens")
        exact, *every = zip(*found, strict=True)
        of = told | {"tokens": tokens, "text": text}
        rows += [of | summarize(*each, exact) for each in zip(options.thresholds, every, strict=True)]
    return rows


def summarize(threshold: float, figures: Sequence[PromptFigures], exact: Sequence[PromptFigures]) -> dict[str, Any]:
    """Documents in one row."""
    kl, top1, pairs, seconds = zip(*figures, strict=True)
    return {
        "threshold": threshold,
        "documents": len(figures),
        "kl": f"{mean(kl):.5f}",
        "kl_worst": f"{max(kl):.5f}",
        "same": f"{mean(top1):.3f}",
        "pairs": f"{mean(pairs):.3f}",
        "seconds": f"{min(seconds):.2f}",
        "exact_seconds": f"{min(one.seconds for one in exact):.2f}",
    }


def measure_rate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Rows:
    """A row for each dtype, dim and length."""
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    sizes = list(itertools.product(options.dtypes, options.dims, options.tokens))
    try:
        return [time_attention(*size, options.rounds) for size in tqdm(sizes, unit="size")]
    except RuntimeError as error:
        parser.error(str(error))


@torch.inference_mode()
def time_attention(dtype: str, dim: int, tokens: int, rounds: int) -> dict[str, Any]:
    """One row."""
    made = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, dim, generator=made).to(getattr(torch, dtype))
        for heads in (GROUP * KV_HEADS, KV_HEADS, KV_HEADS)
    )
    if not prompt.serves(query, key, value, causal=True):
        raise RuntimeError("this processor has neither AVX2 nor NEON, or there is no C++ compiler: torch serves")
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
    ways: tuple[Callable[[], torch.Tensor], ...] = (run_ours, run_theirs)
    off = [float((way()[:, :, -CHECKED:].double() - true).abs().max()) for way in ways]  # and warms up
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for way, took in zip(ways, seconds, strict=True):
            begin = time.perf_counter()
            way()
            took.append(time.perf_counter() - begin)
    ours, theirs = map(median, seconds)
    flops = 2 * 2 * tokens**2 / 2 * dim * GROUP * KV_HEADS
    return {
        "dtype": dtype,
        "dim": dim,
        "tokens": tokens,
        "gflops": f"{flops / ours / 1e9:.0f}",
        "torch_gflops": f"{flops / theirs / 1e9:.0f}",
        "faster": f"{theirs / ours:.2f}",
        "error": f"{off[0] / off[1]:.2f}",
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = make_parser("prompts", __doc__)
    parts = parser.add_subparsers(required=True, metavar="loss|rate")
    add = (loss := parts.add_parser("loss", help="what prompts read by selection lose, and their time")).add_argument
    loss.set_defaults(measure=measure_loss)
    add("--model", default=DEFAULT, help=HELP)
    add("--texts", nargs="+", default=[PROSE], choices=(PROSE, CODE), help="(default: %(default)s)")
    add("--tokens", type=int, nargs="+", default=[3072], help="of a prompt (default: %(default)s)")
    add("--documents", type=int, default=2, help="of each text (default: %(default)s)")
    add("--thresholds", type=float, nargs="+", default=[4.4], help="(default: 4.4)")
    add("--dtype", choices=("auto", "float16", *DTYPES), default="auto", help="(default: the model's own)")
    add("--sampled", action="store_true", help="as GPUs read them")
    add(
        "--spreads",
        type=to_amount,
        nargs="+",
        default=[0.0],
        help="of channels of keys, 0: none (default: %(default)s)",
    )
    add = (rate := parts.add_parser("rate", help="how fast attention is, ours and torch's")).add_argument
    rate.set_defaults(measure=measure_rate)
    add("--tokens", type=int, nargs="+", default=[8192], help="of a prompt (default: %(default)s)")
    add("--dims", type=int, nargs="+", default=[64, 128], help="of heads (default: %(default)s)")
    add("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="(default: both)")
    add("--rounds", type=int, default=5, help="of both in turn (default: %(default)s)")
    for part, columns in ((loss, ("threshold", "kl_worst")), (rate, ("dim", "gflops"))):
        part.add_argument("--out", type=table_of(*columns), help="CSV table to write")
    options = parser.parse_args(arguments)
    report(options.measure(parser, options), options.out, threads=torch.get_num_threads())
    return 0


if __name__ == "__main__":
    sys.exit(main())
