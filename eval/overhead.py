"""What a decoded token costs beside reading the context: `python -m eval.overhead`.

    python -m eval.overhead step --tokens 2048 8192 32768 --out eval/results/step_overhead-llama-3.2-1b-cpu.csv
    OMP_NUM_THREADS=1 python -m eval.overhead launch --out eval/results/launch_time.csv

`step`: every head decides, by the default moments where the model has a tokenizer and else by the prompt's, and none
reads its bulk (`threshold=0`), so whatever QAdACache adds to a step without a context is overhead: `step_ms -
no_context_ms`. Where it goes is told by Python's profiler, by the folders and files of the package, each without the
others that it calls, summed over the layers of a step. The profiler itself takes its time, so that these parts, their
sum `ours_ms` and its `share` of a profiled step are upper bounds. On an accelerator, whose work goes on beside, a part
is the time to launch it. A whole step is compared with DynamicCache's, which has the same context and reads all of it:
`over_dynamic`, of the fastest quarters of both, as what else a machine does makes steps slower and never faster.
`in_turn` compares a step of four caches of different lengths that take turns with a step of one, likewise.

`launch`: what a step by Triton's kernels costs the host, without a GPU (`eval/shared/launch_time.py`).
"""

import argparse
import cProfile
import functools
import importlib.util
import sys
import time
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache

import qada_cache
from eval.shared import tables, timing
from eval.shared.workloads import Work, fill
from qada_cache import QAdACache, restore_attention
from qada_cache.versions import pass_cache

CACHES = 4  # that take turns
HOUSE = Path(qada_cache.__file__).parent
PARTS = ("attention", "cache", "criterion", "key_moments", "kernels", "state", "storage", "watched")  # of the package
REST = "the_rest"  # of it


@torch.inference_mode()
def profile(work: Work, cache: Cache) -> list[dict[str, float]]:
    """As `timing.decode`: seconds of every step after the warm-up, under Python's profiler, in each of `PARTS`, in
    `REST` and in all ("step"). C functions count for the Python function that calls them, as kernels do."""
    found, device = [], work.model.device
    for step in range(work.inputs.shape[1]):
        profiler = cProfile.Profile(builtins=False)
        timing.wait(device)
        begin = time.perf_counter()
        profiler.runcall(work.model, input_ids=work.inputs[:, step : step + 1], **pass_cache(cache))
        timing.wait(device)
        seconds = time.perf_counter() - begin
        spent = dict.fromkeys((*PARTS, REST), 0.0)
        for entry in profiler.getstats():
            if not isinstance(entry.code, str) and (path := Path(entry.code.co_filename)).is_relative_to(HOUSE):
                part = Path(path.relative_to(HOUSE).parts[0]).stem
                spent[part if part in PARTS else REST] += entry.inlinetime
        if step >= work.warm_up:
            found.append({"step": seconds, **spent})
    return found


def measure(work: Work, rounds: int) -> dict[str, Any]:
    """One row: medians over all steps of rounds in which the two caches take turns."""
    without: list[float] = []
    dynamic: list[float] = []
    plain: list[float] = []
    in_turn: list[float] = []
    ours: list[dict[str, float]] = []
    config = work.model.config
    # Sizes alone have no tokenizer, without which there is no other prompt to go by.
    moments = {} if work.read else {"moments": "current"}
    make = functools.partial(QAdACache, work.model, threshold=0.0, **moments)
    for _ in range(rounds):
        restore_attention(work.model)
        without += timing.decode(work, DynamicCache(config=config))[0]
        dynamic += timing.decode(work, fill(DynamicCache(config=config), work))[0]
        plain += timing.decode(work, fill(make(), work))[0]
        several = [fill(make(), work) for _ in range(CACHES)]
        for index, cache in enumerate(several):
            cache.crop(-1 - index * work.tokens // 8)
        in_turn += timing.decode(work, *several)[0]
        restore_attention(work.model)
        cache = fill(make(), work)
        ours += profile(work, cache)
        assert cache.stats().bulk_read_bytes == 0
        assert cache.stats().decisions > 0
    restore_attention(work.model)
    step = median_high(each["step"] for each in ours)
    parts = {f"{name}_us": 1e6 * median_high(each[name] for each in ours) for name in (*PARTS, REST)}
    return {
        "tokens": work.tokens,
        "batch": work.batch,
        "no_context_ms": f"{1e3 * median_high(without):.2f}",
        "dynamic_ms": f"{1e3 * median_high(dynamic):.2f}",
        "over_dynamic": f"{_find_fast(plain) / _find_fast(dynamic):.3f}",
        "in_turn": f"{_find_fast(in_turn) / _find_fast(plain):.3f}",
        "step_ms": f"{1e3 * median_high(plain):.2f}",
        "ours_ms": f"{sum(parts.values()) / 1e3:.2f}",
        "share": f"{sum(parts.values()) / 1e6 / step:.3f}",
        **{name: f"{value:.0f}" for name, value in parts.items()},
    }


def _find_fast(seconds: list[float]) -> float:
    """The slowest of the fastest quarter."""
    return sorted(seconds)[len(seconds) // 4]


def measure_step(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """A row for each length."""
    model, make_work, _ = timing.load_model(parser, options, tokens=max(options.tokens), latents=False)
    rows = []
    for tokens in tqdm(options.tokens, unit="length"):
        try:
            work = make_work(model, tokens=tokens, batch=1, steps=options.steps, warm_up=2, seed=options.seed)
        except ValueError as error:
            parser.error(str(error))
        rows.append(measure(work, options.rounds))
        del work
    timing.report(options, rows, layers=model.config.get_text_config().num_hidden_layers)


def measure_launch(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """A row for each sketch."""
    if importlib.util.find_spec("triton") is None:
        parser.error("triton is not installed: pip install triton")
    from eval.shared import launch_time

    if not 1 <= options.steps <= launch_time.MOST_STEPS:
        parser.error(f"--steps must be 1 to {launch_time.MOST_STEPS}: more would move tokens to the bulk")
    tables.report(launch_time.measure_rows(options.steps), options.out)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = tables.make_parser("overhead", __doc__)
    parts = parser.add_subparsers(required=True, metavar="step|launch")
    part = parts.add_parser("step", help="part by part of the package")
    add = timing.add_options(part, "no_context_ms", "step_ms")
    part.set_defaults(measure=measure_step)
    add(
        "--tokens",
        type=tables.to_count,
        nargs="+",
        default=[2048, 8192, 32768],
        help="of context (default: %(default)s)",
    )
    add("--steps", type=tables.to_count, default=16, help="tokens timed a round (default: %(default)s)")
    add("--rounds", type=tables.to_count, default=3, help="with and without a context (default: %(default)s)")
    add = (part := parts.add_parser("launch", help="by Triton's kernels, on the host alone")).add_argument
    part.set_defaults(measure=measure_launch)
    add("--steps", type=int, default=100, help="of each kind, in turn (default: %(default)s)")
    add("--out", type=tables.table_of("sketch", "host_us", "graph_us"), help="CSV table to write")
    options = parser.parse_args(arguments)
    options.measure(parser, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
