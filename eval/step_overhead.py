"""What a decoded token costs beside reading the context, part by part: `python -m eval.step_overhead`.

    python -m eval.step_overhead --tokens 2048 8192 32768 131072 --out eval/results
    OMP_NUM_THREADS=1 python -m eval.step_overhead --model small --dtype float32 --tokens 2000 --rounds 8

Every head decides, by the default moments where the model has a tokenizer and else by the prompt's, and none reads its
bulk (`threshold=0`), so whatever QAdACache adds to a step without a context is overhead. Parts are timed on the host,
each without the parts it calls, and summed over the layers of a step. On an accelerator, whose work goes on beside,
that is the time to launch it. A whole step is compared with DynamicCache's, which has the same context and reads all of
it: `over_dynamic`, of the fastest quarters of both, as what else a machine does makes steps slower and never faster.
`in_turn` compares a step of four caches of different lengths that take turns with a step of one, likewise.
"""

import contextlib
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median_high
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache

from eval import benchmark
from eval.shared.timing import load_model, report, timing_parser, wait
from eval.shared.workloads import Work, fill
from qada_cache import QAdACache, restore_attention
from qada_cache.attention import decode
from qada_cache.attention import forward as attention
from qada_cache.kernels.cpu import compiled_decode
from qada_cache.state.counters import Counters
from qada_cache.state.forward_pass import ForwardPass
from qada_cache.state.layer import QAdALayer
from qada_cache.storage import TokenStore
from qada_cache.versions import pass_cache

CACHES = 4  # that take turns
# Column, and what is timed for it.
PARTS: dict[str, tuple[Any, str]] = {
    "take_in": (QAdALayer, "update"),
    "store": (TokenStore, "append"),
    "masks": (ForwardPass, "find_rows"),
    "estimate": (decode, "estimate_log_bulk"),
    "kernel": (compiled_decode, "fused_decode"),  # attention over sinks and window, and the decision
    "count": (Counters, "count"),
    "the_rest": (attention, "_attend"),  # checks, and everything between the parts above
}


class Stopwatch:
    """Seconds spent in functions, each without those that it calls and that are timed as well."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inner = [0.0]

    def timed(self, name: str, function: Callable) -> Callable:
        """`function`, timed."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total = time.perf_counter() - begin
                self.spent[name] += total - self._inner.pop()
                self._inner[-1] += total

        return wrapper

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Times all of `PARTS`."""
        with contextlib.ExitStack() as stack:
            for name, (owner, function) in PARTS.items():
                wrapper = self.timed(name, getattr(owner, function))
                stack.enter_context(mock.patch.object(owner, function, wrapper))
            yield


@torch.inference_mode()
def steps(work: Work, cache: Cache, watch: Stopwatch) -> list[dict[str, float]]:
    """As `benchmark.decode`: seconds of every step after the warm-up, by part and in all ("step")."""
    found, device = [], work.model.device
    for step in range(work.inputs.shape[1]):
        wait(device)
        watch.spent.clear()
        begin = time.perf_counter()
        work.model(input_ids=work.inputs[:, step : step + 1], **pass_cache(cache))
        wait(device)
        if step >= work.warm_up:
            found.append({"step": time.perf_counter() - begin, **watch.spent})
    return found


def measure(work: Work, rounds: int) -> dict[str, Any]:
    """One row: medians over all steps of rounds in which the two caches take turns."""
    without: list[float] = []
    dynamic: list[float] = []
    unwatched: list[float] = []
    in_turn: list[float] = []
    ours: list[dict[str, float]] = []
    config = work.model.config
    # Sizes alone have no tokenizer, without which there is no other prompt to go by.
    moments = {} if work.read else {"moments": "current"}
    make = functools.partial(QAdACache, work.model, threshold=0.0, **moments)
    for _ in range(rounds):
        restore_attention(work.model)
        without += benchmark.decode(work, DynamicCache(config=config))[0]
        dynamic += benchmark.decode(work, fill(DynamicCache(config=config), work))[0]
        unwatched += benchmark.decode(work, fill(make(), work))[0]
        several = [fill(make(), work) for _ in range(CACHES)]
        for index, cache in enumerate(several):
            cache.crop(-1 - index * work.tokens // 8)
        in_turn += benchmark.decode(work, *several)[0]
        restore_attention(work.model)
        watch = Stopwatch()
        with watch.watching():
            cache = fill(make(), work)
            ours += steps(work, cache, watch)
        assert cache.stats().bulk_read_bytes == 0
        assert cache.stats().decisions > 0
    restore_attention(work.model)
    whole, nothing = median_high(step["step"] for step in ours), median_high(without)
    parts = {f"{name}_us": 1e6 * median_high(step.get(name, 0.0) for step in ours) for name in PARTS}
    return {
        "tokens": work.tokens,
        "batch": work.batch,
        "no_context_ms": f"{1e3 * nothing:.2f}",
        "dynamic_ms": f"{1e3 * median_high(dynamic):.2f}",
        "over_dynamic": f"{_fast(unwatched) / _fast(dynamic):.3f}",
        "in_turn": f"{_fast(in_turn) / _fast(unwatched):.3f}",
        "step_ms": f"{1e3 * whole:.2f}",
        "ours_ms": f"{sum(parts.values()) / 1e3:.2f}",
        "share": f"{sum(parts.values()) / 1e6 / whole:.3f}",
        **{name: f"{value:.0f}" for name, value in parts.items()},
    }


def _fast(seconds: list[float]) -> float:
    """The slowest of the fastest quarter."""
    return sorted(seconds)[len(seconds) // 4]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = timing_parser("step_overhead", __doc__ or "", table="step_overhead-MODEL-DEVICE.csv")
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[2048, 8192, 32768], help="of context (default: %(default)s)")
    add("--steps", type=int, default=16, help="tokens timed a round (default: %(default)s)")
    add("--rounds", type=int, default=3, help="with and without a context in turn (default: %(default)s)")
    options = parser.parse_args(arguments)
    model, make_work = load_model(parser, options, tokens=max(options.tokens))
    rows = []
    for tokens in tqdm(options.tokens, unit="length"):
        try:
            work = make_work(model, tokens=tokens, batch=1, steps=options.steps, warm_up=2, seed=options.seed)
        except ValueError as error:
            parser.error(str(error))
        rows.append(measure(work, options.rounds))
        del work
    report(options, rows, "step_overhead", layers=model.config.get_text_config().num_hidden_layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
