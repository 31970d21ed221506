"""Time and memory from a prompt to its first token, every cache in one run: `python -m eval.first_token`.

    python -m eval.first_token --model smollm2 --tokens 4096 --dtype float32 --prefill 12 --out eval/results

The prompt is prose, or random tokens of a model by sizes alone, read in one call. QAdACache's first time includes
building kernels, as for a user with an empty cache folder; later ones find them. It is measured at the first length.
The first token decoded after the prompt is timed apart.
"""

import contextlib
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from eval.shared.timing import Peak, load_model, make_timing_parser, report, wait
from eval.shared.workloads import draw_tokens
from qada_cache import QAdACache, restore_attention
from qada_cache.kernels import cpu
from qada_cache.versions import pass_cache

FIRST_TIME = "QAdACache, the first time"


@contextlib.contextmanager
def empty_cache_folder() -> Iterator[None]:
    """As for a user who has never run this package: what was kept before goes by another folder."""
    before = os.environ.get("QADA_HOME")
    cpu.build.cache_clear()
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
    model: PreTrainedModel, make: Callable[[], Cache], ids: torch.Tensor
) -> tuple[float, float, tuple[int, int]]:
    """Seconds from the prompt `[batch, tokens]` to its first token, the cache's making included, and to the next one;
    and the most bytes that took, on the device and on the host."""
    restore_attention(model)
    gc.collect()
    peak = Peak(model.device)
    wait(model.device)
    begin = time.perf_counter()
    cache = make()
    token = model(ids, **pass_cache(cache), logits_to_keep=1).logits[:, -1:].argmax(dim=-1)
    wait(model.device)
    first = time.perf_counter()
    model(token, **pass_cache(cache))
    wait(model.device)
    return first - begin, time.perf_counter() - first, (peak.device, peak.host)


def measure(
    model: PreTrainedModel, ids: torch.Tensor, rounds: int, *, thresholds: list[float], first_time: bool
) -> list[dict[str, Any]]:
    """A row for every method, for our own also by selection at these thresholds; the least of `rounds` times, but for
    what only happens once, in an empty folder."""
    config, room = model.config, ids.shape[1] + 8
    methods: dict[str, Callable[[], Cache]] = {
        "DynamicCache": lambda: DynamicCache(config=config),
        "StaticCache": lambda: StaticCache(config=config, max_cache_len=room),
    }
    if model.device.type != "cpu":
        methods["DynamicCache, offloading"] = lambda: DynamicCache(config=config, offloading=True)
    if first_time:
        methods[FIRST_TIME] = lambda: QAdACache(model)
    methods["QAdACache"] = lambda: QAdACache(model)
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
            prompt, token, peak = time_first_tokens(model, make, ids)
            seconds.setdefault(name, []).append((prompt, token))
            peaks[name] = peak
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


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = make_timing_parser("first_token", __doc__ or "", table="first_token-MODEL-DEVICE.csv")
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[8192], help="of the prompt (default: %(default)s)")
    add("--prefill", type=float, nargs="+", default=[], help="prefill_thresholds, of one more row each")
    add("--rounds", type=int, default=3, help="over all methods (default: %(default)s)")
    options = parser.parse_args(arguments)
    model, _, tokenizer = load_model(parser, options, tokens=max(options.tokens))
    rows: list[dict[str, Any]] = []
    try:
        whole = draw_tokens(model, tokenizer, max(options.tokens), seed=options.seed)[None]
    except ValueError as error:
        parser.error(f"--tokens: {error}")
    with empty_cache_folder():
        for tokens in options.tokens:
            told = {"thresholds": options.prefill, "first_time": not rows}
            rows += measure(model, whole[:, :tokens], options.rounds, **told)
    report(options, rows, "first_token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
