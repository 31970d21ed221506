"""Time of a prompt's first token, and of a short turn behind a text, every cache in one run: `python -m eval.latency`.

    python -m eval.latency prompt --model smollm2 --tokens 4096 --prefill 12 --out eval/results/first_token.csv
    python -m eval.latency turns --model smollm2 --tokens 6000 --turns 1 4 16 64 112 --out eval/results/turns.csv

The text is prose, or random tokens of a model by sizes alone, read in one call. `prompt` measures time and memory to
the first token, and times the token that is decoded after it apart. QAdACache's first time includes building kernels,
as for a user with an empty cache folder; later ones find them. It is measured at the first length.

`turns`: every cache reads the text, and then the turns behind it one after the other, as in a chat: each is one call of
so many tokens, `--rounds` times. All caches see the same tokens. The least of a turn's times counts; the median has
what some of them do beside, as to move tokens into the bulk. At most a window of tokens (112 by default; 8 on a CUDA
device) is read query-adaptively, token by token; more are exact. cuDNN's attention, which plans anew for every length,
is left out.
"""

import argparse
import contextlib
import functools
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from eval.benchmark import allow_cudnn
from eval.shared.tables import make_parser, to_amount, to_count
from eval.shared.timing import Peak, add_options, load_model, report, wait
from eval.shared.workloads import PLACES, draw_tokens
from qada_cache import QAdACache, restore_attention
from qada_cache.kernels import cpu
from qada_cache.tuning.prompts import check_selects
from qada_cache.versions import pass_cache

WARM_UP = 1024  # tokens
FIRST_TIME = "QAdACache, the first time"
Methods = dict[str, Callable[[], Cache]]


def list_methods(model: PreTrainedModel, room: int) -> Methods:
    """What makes each cache; one that is preallocated has `room` for so many tokens. On a CUDA device ours with its
    bulk in every place, too."""
    placed = PLACES if model.device.type == "cuda" else {}
    return {
        "DynamicCache": lambda: DynamicCache(config=model.config),
        "StaticCache": lambda: StaticCache(config=model.config, max_cache_len=room),
        "QAdACache": lambda: QAdACache(model),
        **{f"QAdACache, {name}": functools.partial(QAdACache, model, **told) for name, told in placed.items()},
    }


def time_call(model: PreTrainedModel, call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, the device's work included, and what it returns."""
    wait(model.device)
    begin = time.perf_counter()
    found = call()
    wait(model.device)
    return time.perf_counter() - begin, found


@contextlib.contextmanager
def empty_cache_folder() -> Iterator[None]:
    """As for a user who has never run this package: what was kept before goes by another folder."""
    before = os.environ.get("QADA_HOME")
    cpu.build.cache_clear()
    cpu.build_partial.cache_clear()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QADA_HOME"] = folder
        try:
            yield
        finally:
            del os.environ["QADA_HOME"]
            if before is not None:
                os.environ["QADA_HOME"] = before


@torch.inference_mode()
def time_first_tokens(
    model: PreTrainedModel, make: Callable[[], Cache], ids: Tensor
) -> tuple[float, float, tuple[int, int]]:
    """Seconds from the prompt `[batch, tokens]` to its first token, the cache's making included, and to the next one;
    and the most bytes that took, on the device and on the host."""

    def read() -> tuple[Cache, Tensor]:
        cache = make()
        return cache, model(ids, **pass_cache(cache), logits_to_keep=1).logits[:, -1:].argmax(dim=-1)

    restore_attention(model)
    peak = Peak(model.device)
    first, (cache, token) = time_call(model, read)
    second, _ = time_call(model, lambda: model(token, **pass_cache(cache)))
    return first, second, (peak.device, peak.host)


def measure_prompts(model: PreTrainedModel, ids: Tensor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for every length."""
    rows: list[dict[str, Any]] = []
    with empty_cache_folder():
        # What the first pass of a process takes is not the first method's.
        time_first_tokens(model, lambda: DynamicCache(config=model.config), ids[:, :WARM_UP])
        for tokens in options.tokens:
            told = {"thresholds": options.prefill, "first_time": not rows}
            rows += measure_prompt(model, ids[:, :tokens], options.rounds, **told)
    return rows


def measure_prompt(
    model: PreTrainedModel, ids: Tensor, rounds: int, *, thresholds: list[float], first_time: bool
) -> list[dict[str, Any]]:
    """A row for every method, for our own also by selection at these thresholds; the least of `rounds` times, but for
    what only happens once, in an empty folder."""
    methods = list_methods(model, ids.shape[1] + 8)
    ours = methods.pop("QAdACache")
    if model.device.type != "cpu":
        methods["DynamicCache, offloading"] = lambda: DynamicCache(config=model.config, offloading=True)
    methods |= {FIRST_TIME: ours, "QAdACache": ours} if first_time else {"QAdACache": ours}
    for threshold in thresholds:
        named = f"QAdACache, prefill_threshold={threshold:g}"
        methods[named] = lambda threshold=threshold: QAdACache(model, prefill_threshold=threshold)
    seconds: dict[str, list[tuple[float, float]]] = {}
    peaks: dict[str, tuple[int, int]] = {}
    bar = tqdm(total=rounds * len(methods), unit="run")
    for turn in range(rounds):
        for name, make in methods.items():
            bar.set_postfix_str(name)
            bar.update()
            if turn and name == FIRST_TIME:
                continue
            prompt, token, peaks[name] = time_first_tokens(model, make, ids)
            seconds.setdefault(name, []).append((prompt, token))
    bar.close()
    best = {name: tuple(map(min, zip(*times, strict=True))) for name, times in seconds.items()}
    return [
        {
            "method": name,
            "tokens": ids.shape[1],
            "batch": ids.shape[0],
            "first_token_s": f"{prompt:.3f}",
            "against_dynamic": f"{best['DynamicCache'][0] / prompt:.2f}",
            "second_token_ms": f"{1e3 * token:.1f}",
            "peak_device_mib": f"{peaks[name][0] / 2**20:.1f}",
            "peak_host_mib": f"{peaks[name][1] / 2**20:.1f}",
        }
        for name, (prompt, token) in best.items()
    ]


def count_turn_tokens(options: argparse.Namespace) -> int:
    """Of all turns, one more round of which builds kernels, and a token before them."""
    return 1 + sum(options.turns) * (options.rounds + 1)


@torch.inference_mode()
def measure_turns(model: PreTrainedModel, ids: Tensor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every length, turn and method."""
    rows, many = [], options.turns * (options.rounds + 1)
    bar = tqdm(total=len(list_methods(model, 1)) * len(options.tokens) * len(many), unit="turn")
    for tokens in options.tokens:
        times: dict[tuple[str, int], list[float]] = {}
        for name, make in list_methods(model, tokens + count_turn_tokens(options)).items():
            bar.set_postfix_str(name)
            restore_attention(model)
            gc.collect()
            told, at = pass_cache(make()), tokens + 1
            model(ids[:, :tokens], **told, logits_to_keep=1)
            first = model(ids[:, tokens:at], **told).logits  # what is built at a first call is there
            assert torch.isfinite(first).all()
            for place, turn in enumerate(many):
                took, _ = time_call(model, functools.partial(model, ids[:, at : at + turn], **told))
                at += turn
                bar.update()
                if place >= len(options.turns):
                    times.setdefault((name, turn), []).append(took)
        best = {key: min(each) for key, each in times.items()}
        rows += [
            {
                "method": name,
                "tokens": tokens,
                "turn": turn,
                "turn_ms": f"{1e3 * took:.1f}",
                "median_ms": f"{1e3 * median(times[name, turn]):.1f}",
                "over_dynamic": f"{took / best['DynamicCache', turn]:.2f}",
                "over_static": f"{took / best['StaticCache', turn]:.2f}",
            }
            for (name, turn), took in best.items()
        ]
    bar.close()
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = make_parser("latency", __doc__)
    parts = parser.add_subparsers(required=True, dest="part", metavar="prompt|turns")
    part = parts.add_parser("prompt", help="time and memory from a prompt to its first token")
    add = add_options(part, "method", "first_token_s")
    add("--tokens", type=to_count, nargs="+", default=[8192], help="of the prompt (default: %(default)s)")
    add("--prefill", type=to_amount, nargs="+", default=[], help="prefill_thresholds, of one more row each")
    add("--rounds", type=to_count, default=3, help="over all methods (default: %(default)s)")
    part = parts.add_parser("turns", help="time of a short turn, or of a draft, behind a text")
    add = add_options(part, "method", "turn_ms")
    add("--tokens", type=to_count, nargs="+", default=[6000], help="of the text (default: %(default)s)")
    add("--turns", type=to_count, nargs="+", default=[1, 4, 16, 64, 112], help="tokens of each (default: %(default)s)")
    add("--rounds", type=to_count, default=3, help="times that every turn is measured (default: %(default)s)")
    options = parser.parse_args(arguments)
    turns = options.part == "turns"
    most = max(options.tokens) + (count_turn_tokens(options) if turns else 0)
    by_selection = not turns and any(options.prefill)
    model, _, tokenizer = load_model(parser, options, tokens=most, latents=not by_selection)
    try:
        ids = draw_tokens(model, tokenizer, most, seed=options.seed)[None]
    except ValueError as error:
        parser.error(f"--tokens: {error}")
    if by_selection:
        try:  # by the prompt's own moments: others are collected in the first time that is measured
            check_selects(model, ids[:, : min(options.tokens)], moments="current")
        except ValueError as error:
            parser.error(str(error))
    with allow_cudnn(not turns):
        rows = (measure_turns if turns else measure_prompts)(model, ids, options)
    report(options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
