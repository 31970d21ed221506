"""Where a decoded token's time goes on a GPU, beside an ideal dense cache: `python -m eval.gpu_step`.

    python -m eval.gpu_step --tokens 32768 131072 32768x8 --out eval/results/gpu_step-llama-3-8b-cuda.csv

A model by its sizes, random weights and contexts, every head of ours reads 5% of its tokens; one token is decoded again
and again. "ideal dense" is what a well-made engine does: keys and values preallocated, torch's own attention, the whole
step in one CUDA graph. `ms` is the median of a step's wall time, and `mean_ms` the mean, of ours with a flush and what
follows from it. `kernels_ms` is the sum of a step's kernels, so what is left is time in which the device waits for the
host. `local_us`, `estimate_us`, `selected_us` are our kernels' times a layer, `attention_us` is torch's of the dense
cache; `bytes_us` is what a layer's bytes take at the rate of a copy on the device, and over the bus if they come from
the host. All times are measured before the first profile: torch's profiler makes every later launch of a graph slower,
by a millisecond on an H200.
"""

import collections
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, Cache, DynamicCache

from eval.benchmark import allow_cudnn, shape
from eval.shared import tables
from eval.shared.graphed import GraphedStaticCache
from eval.shared.timing import SIZE, add_options, decode_token, load_model, measure_best, report, wait
from eval.shared.workloads import PLACES, TOKEN_SHARE, Work, fill, find_token_threshold, flag_heads, make_random_work
from qada_cache import QAdACache, restore_attention
from qada_cache.decode_graph.capturing import CudaGraph

DENSE = ("no context", "ideal dense")
PEERS = (*DENSE, "StaticCache, CUDA graph", "DynamicCache")
KERNELS = {"local_us": "local_kernel", "estimate_us": "estimate_kernel", "selected_us": "selected_kernel"}
WARM_UP, STEPS, PROFILED = 10, 20, 3
OUR_STEPS = 140  # a flush is among them
FEW = 16  # tokens, in place of a context
IDEAL = "ideal_dense"
_held: dict[int, tuple[Tensor, Tensor]] = {}  # of the ideal dense cache, by layer


def attend_densely(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """The attention function of the ideal dense cache: the token's key and value take the last place."""
    keys, values = _held[module.layer_idx]  # type: ignore[index]  # as models number their attention
    keys[:, :, -1:] = key
    values[:, :, -1:] = value
    out = functional.scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def hold_densely(work: Work, tokens: int) -> Callable[[], Any]:
    """A step over `tokens` preallocated tokens, as a graph to replay."""
    model = work.model
    for index, states in enumerate(work.states):
        keys, values = (functional.pad(each[:, :, :tokens], (0, 0, 0, 1)).contiguous() for each in states)
        _held[index] = keys, values
    ids, places = work.inputs[:, :1].clone(), torch.full((work.batch, 1), tokens, device=model.device)

    def step() -> Tensor:
        return model(input_ids=ids, position_ids=places, use_cache=False).logits

    for _ in range(3):
        step()
    wait(model.device)
    graph = CudaGraph(model.device)
    with graph.capture():
        step()
    return graph.replay


def list_steps(work: Work, theta: float, asked: list[str]) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Caches by name, a step of each, and the cache, if it is one of transformers'."""
    model, room = work.model, work.tokens + WARM_UP + STEPS + 8
    for name in [name for name in (*PEERS, *PLACES) if name in asked]:
        restore_attention(model)
        own = model.config._attn_implementation
        cache: Cache | None = None
        if name in PLACES:
            cache = QAdACache(model, criterion=flag_heads(work, 1.0), token_threshold=theta, **PLACES[name])
        elif name == "DynamicCache":
            cache = DynamicCache(config=model.config)
        elif name not in DENSE:
            cache = GraphedStaticCache(config=model.config, max_cache_len=room)
        if cache is not None:
            step: Callable[[], Any] = functools.partial(decode_token, model, fill(cache, work), work.inputs[:, :1])
        else:
            model.config._attn_implementation = IDEAL
            step = hold_densely(work, work.tokens if name == "ideal dense" else FEW)
        with allow_cudnn(name != "DynamicCache"):  # for each of its lengths cuDNN plans anew, longer than a step takes
            yield name, step, cache
        model.config._attn_implementation = own
        _held.clear()
        del cache, step
        gc.collect()
        torch.cuda.empty_cache()


def time_steps(step: Callable[[], Any], device: torch.device, steps: int) -> list[float]:
    """Milliseconds of `steps` steps, after some that are not timed."""
    found = []
    for index in range(WARM_UP + steps):
        wait(device)
        begin = time.perf_counter()
        step()
        wait(device)
        if index >= WARM_UP:
            found.append(1e3 * (time.perf_counter() - begin))
    return found


def profile(step: Callable[[], Any]) -> tuple[float, collections.Counter[str]]:
    """Milliseconds of all kernels of a step, and microseconds by name."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    spent: collections.Counter[str] = collections.Counter()
    with record(activities=[ProfilerActivity.CUDA]) as events:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    for event in events.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.self_device_time_total / PROFILED
    return sum(spent.values()) / 1e3, spent


def measure_times(work: Work, asked: list[str], theta: float) -> Iterator[dict[str, Any]]:
    """A row of wall times for each cache; `theta` is what `find_token_threshold` says."""
    for name, step, cache in list_steps(work, theta, asked):
        took = time_steps(step, work.model.device, OUR_STEPS if isinstance(cache, QAdACache) else STEPS)
        row: dict[str, Any] = {"cache": name, "tokens": work.tokens, "batch": work.batch}
        row |= {"ms": f"{statistics.median(took):.2f}", "least_ms": f"{min(took):.2f}"}
        yield row | {"mean_ms": f"{statistics.mean(took):.2f}"}


def measure_kernels(
    work: Work, asked: list[str], theta: float, speeds: dict[str, float]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Each cache's name, and what its row says of a step's kernels."""
    layers = len(work.states)
    dense_bytes = sum(keys.nbytes + values.nbytes for keys, values in work.states)
    for name, step, cache in list_steps(work, theta, asked):
        for _ in range(WARM_UP):
            step()
        wait(work.model.device)
        before = cache.stats() if isinstance(cache, QAdACache) else None
        kernels_ms, spent = profile(step)
        row = {"kernels_ms": f"{kernels_ms:.2f}"}
        for column, kernel in KERNELS.items():
            row[column] = f"{spent[kernel] / layers:.1f}" if spent[kernel] else ""
        flash = sum(us for kernel, us in spent.items() if any(part in kernel for part in ("flash", "fmha", "sdpa")))
        row["attention_us"] = f"{flash / layers:.1f}" if flash else ""
        row["bytes_us"] = f"{1e6 * dense_bytes / layers / speeds['copy']:.1f}" if name == "ideal dense" else ""
        if before is not None:
            after = cache.stats()
            bulk = (after.bulk_read_bytes - before.bulk_read_bytes) / PROFILED / layers
            sketch = (after.sketch_read_bytes - before.sketch_read_bytes) / PROFILED / layers
            at = speeds["bus"] if name.startswith("host") else speeds["copy"]
            row["bytes_us"] = f"{1e6 * (bulk / at + sketch / speeds['copy']):.1f}"
        yield name, row


def make_work(model: Any, tokens: int, batch: int, seed: int) -> tuple[Work, Work]:
    """Random contexts: of one row, and that row `batch` times."""
    work = make_random_work(model, tokens=tokens, batch=1, steps=1, warm_up=0, seed=seed)
    states = [(keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1)) for keys, values in work.states]
    return work, Work(model, states, work.inputs.expand(batch, -1), 0, read=False, seed=seed)


def measure_copies(device: torch.device) -> dict[str, float]:
    """Bytes a second of a copy on the device, both ways counted, and over the bus."""
    data = torch.empty(SIZE, dtype=torch.uint8, device=device)
    to, host = torch.empty_like(data), torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
    copied = measure_best(lambda: to.copy_(data), device, 2 * SIZE)
    return {"copy": copied, "bus": measure_best(lambda: data.copy_(host, non_blocking=True), device, SIZE)}


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    """Measure and write the table; returns the exit status."""
    parser = tables.make_parser("gpu_step", __doc__)
    add = add_options(parser, "cache", "ms", "kernels_ms")
    add("--tokens", type=shape, nargs="+", default=[(32768, 1)], metavar="TOKENS[xROWS]",
        help="of context, a row; 8192x8 is a batch of 8 (default: 32768)")  # fmt: skip
    add("--caches", nargs="+", choices=(*PEERS, *PLACES), default=[*PEERS, *PLACES], help="only these (default: all)")
    options = parser.parse_args(arguments)
    if torch.device(options.device).type != "cuda":
        parser.error("this asks a CUDA device where its time goes, and there is none: see eval.benchmark")
    AttentionInterface.register(IDEAL, attend_densely)
    model, _, _ = load_model(parser, options, tokens=max(options.tokens)[0])
    speeds = measure_copies(model.device)
    told = {f"{name}_gb_per_s": f"{speed / 1e9:.0f}" for name, speed in speeds.items()}
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    thetas: dict[tuple[int, int], float] = {}
    for tokens, batch in options.tokens:
        one, work = make_work(model, tokens, batch, options.seed)
        asks = set(options.caches) & set(PLACES)
        thetas[tokens, batch] = find_token_threshold(one, TOKEN_SHARE) if asks else 0.0
        for row in measure_times(work, options.caches, thetas[tokens, batch]):
            print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows[row["cache"], tokens, batch] = row
        del one, work
        gc.collect()
    for tokens, batch in options.tokens:
        _, work = make_work(model, tokens, batch, options.seed)
        for name, found in measure_kernels(work, options.caches, thetas[tokens, batch], speeds):
            print(name, tokens, batch, " ".join(f"{key} {value}" for key, value in found.items() if value), flush=True)
            rows[name, tokens, batch] |= found
        del work
        gc.collect()
    report(options, list(rows.values()), **told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
