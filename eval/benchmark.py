"""Decoding speed at the byte limit, every method on the same work in one run: `python -m eval.benchmark`.

    python -m eval.benchmark --geometry llama-3.2-1b --tokens 32768 --out eval/results

Caches are filled with the same random keys and values, without prefill, then decode token by token; QAdACache with a
forced share f of its KV heads flagged (fresh ones are drawn for every run, the same number in each layer as nearly as
can be). The limit at f is the time without a context, plus f times what a preallocated dense cache (StaticCache) takes
on top of that. Before anything is timed, QAdACache at f = 1 must give what DynamicCache gives.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from eval.geometries import GEOMETRIES, make_model
from eval.machine import machine
from eval.tables import plain, write
from qada_cache import QAdACache, StaticHeads, restore_attention

FRACTIONS = (0.0, 0.05, 0.1, 0.15, 0.34, 1.0)


@dataclass(frozen=True)
class Work:
    """What every method does.

    Args:
        model: in eval mode.
        tokens: of context, per row.
        batch: rows.
        steps: tokens decoded and timed.
        warm_up: tokens decoded before that.
        seed: of keys, values and flagged heads.
    """

    model: PreTrainedModel
    tokens: int
    batch: int
    steps: int
    warm_up: int
    seed: int

    def context(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[batch, kv_heads, tokens, dim]` of one layer, the same for every method."""
        config = self.model.config
        generator = torch.Generator(self.model.device).manual_seed(self.seed * 1000 + layer)
        shape = (self.batch, config.num_key_value_heads, self.tokens, config.head_dim)
        return tuple(  # type: ignore[return-value]
            torch.randn(shape, generator=generator, device=self.model.device, dtype=torch.float32).to(self.model.dtype)
            for _ in range(2)
        )


def fill(cache: Cache, work: Work) -> Cache:
    """Give a cache the context, as a prefill would have."""
    for index in range(work.model.config.num_hidden_layers):
        keys, values = work.context(index)
        if isinstance(cache, QAdACache):
            layer = cache.layers[index]
            layer.lazy_initialization(keys, values)
            layer.store.absorb(keys, values, None)
            layer.seen = work.tokens
        else:
            cache.update(keys, values, index)
    return cache


def flagged(work: Work, fraction: float) -> StaticHeads:
    """`fraction` of all KV heads, spread over the layers."""
    layers, kv_heads = work.model.config.num_hidden_layers, work.model.config.num_key_value_heads
    count = round(fraction * layers * kv_heads)
    generator = torch.Generator().manual_seed(work.seed)
    table = torch.zeros(layers, kv_heads, dtype=torch.bool)
    order = torch.stack([torch.randperm(kv_heads, generator=generator) for _ in range(layers)])
    for index in range(count):
        layer = index % layers
        table[layer, order[layer, index // layers]] = True
    return StaticHeads(table)


def methods(work: Work) -> dict[str, Callable[[], Cache]]:
    """Caches by name, each filled when it is called for."""
    model, config = work.model, work.model.config
    room = work.tokens + work.warm_up + work.steps + 8
    made: dict[str, Callable[[], Cache]] = {
        "no context": lambda: DynamicCache(config=config),
        "DynamicCache": lambda: fill(DynamicCache(config=config), work),
        "StaticCache": lambda: fill(StaticCache(config=config, max_cache_len=room), work),
    }
    if model.device.type != "cpu":
        made["DynamicCache, offloading"] = lambda: fill(DynamicCache(config=config, offloading=True), work)
    made["sinks + window"] = lambda: fill(QAdACache(model, criterion="local"), work)
    for fraction in FRACTIONS:
        made[f"QAdACache f={fraction:g}"] = lambda fraction=fraction: fill(
            QAdACache(model, criterion=flagged(work, fraction)), work
        )
    if model.device.type != "cpu":
        for fraction in FRACTIONS:
            made[f"QAdACache resident f={fraction:g}"] = lambda fraction=fraction: fill(
                QAdACache(model, criterion=flagged(work, fraction), offloading=False), work
            )
    return made


def wait(model: PreTrainedModel) -> None:
    """For what the device still has to do."""
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)


@torch.inference_mode()
def decode(work: Work, cache: Cache) -> tuple[list[float], Tensor]:
    """Seconds of every timed step, and the last step's logits `[batch, vocabulary]`."""
    ids = torch.arange(work.batch, device=work.model.device)[:, None] % work.model.config.vocab_size
    seconds = []
    for step in range(work.warm_up + work.steps):
        wait(work.model)
        begin = time.perf_counter()
        logits = work.model(input_ids=ids + step, past_key_values=cache).logits[:, -1]
        wait(work.model)
        if step >= work.warm_up:
            seconds.append(time.perf_counter() - begin)
    return seconds, logits


def check(work: Work) -> None:
    """QAdACache at f = 1 against DynamicCache, on the very context that is timed.

    Two exact caches differ by rounding, and how much that makes of a model's logits is told by StaticCache, another
    exact cache: ours may be off by three times as much, and by no more than a tenth of what sinks and window are off.

    Raises:
        RuntimeError: it is off by more.
    """
    model, short = work.model, Work(work.model, work.tokens, work.batch, 1, 0, work.seed)
    made = {
        "dense": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=work.tokens + 8),
        "ours": lambda: QAdACache(model, criterion=flagged(work, 1.0)),
        "window": lambda: QAdACache(model, criterion="local"),
    }
    logits = {name: decode(short, fill(make(), short))[1].float() for name, make in made.items()}
    off = {name: float((found - logits["dense"]).norm() / logits["dense"].norm()) for name, found in logits.items()}
    allowed = min(max(3 * off["static"], 1e-5), 0.1 * off["window"])
    if not off["ours"] <= allowed:
        raise RuntimeError(
            f"QAdACache at f = 1 is off by {off['ours']:.2g} of DynamicCache's logits, {allowed:.2g} is allowed"
        )
    shown = ", ".join(f"{name} {error:.2g}" for name, error in off.items() if name != "dense")
    print(f"off DynamicCache's logits: {shown}")


def bandwidth(device: torch.device, size: int = 1 << 29) -> float:
    """Bytes a second that a plain reduction reads, the best of several."""
    data = torch.ones(size // 4, device=device)
    best = 0.0
    for _ in range(6):
        begin = time.perf_counter()
        data.sum().item()
        best = max(best, size / (time.perf_counter() - begin))
    return best


def held(cache: Cache) -> tuple[int, int]:
    """Bytes of keys and values on the device and on the host."""
    if isinstance(cache, QAdACache):
        stats = cache.stats()
        return stats.device_bytes, stats.host_bytes
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    by_host = [tensor.nbytes for tensor in tensors if tensor.device.type == "cpu"]
    total = sum(tensor.nbytes for tensor in tensors)
    return (total, 0) if str(tensors[0].device) == "cpu" else (total - sum(by_host), sum(by_host))


def measure(work: Work, rounds: int) -> list[dict[str, Any]]:
    """A row for every method: rounds go over all of them in turn, so that none has the quiet machine to itself."""
    seconds: dict[str, list[float]] = {}
    bytes_held: dict[str, tuple[int, int]] = {}
    with tqdm(total=rounds * len(methods(work)), unit="run") as bar:
        for _ in range(rounds):
            for name, make in methods(work).items():
                bar.set_postfix_str(name)
                restore_attention(work.model)
                cache = make()
                seconds.setdefault(name, []).extend(decode(work, cache)[0])
                bytes_held[name] = held(cache)
                del cache
                gc.collect()
                bar.update()
    median = {name: sorted(times)[len(times) // 2] for name, times in seconds.items()}
    rows = []
    for name, times in seconds.items():
        row: dict[str, Any] = {
            "method": name,
            "tokens": work.tokens,
            "batch": work.batch,
            "p50_ms": f"{1e3 * median[name]:.2f}",
            "p95_ms": f"{1e3 * sorted(times)[int(0.95 * (len(times) - 1))]:.2f}",
            "against_dynamic": f"{median['DynamicCache'] / median[name]:.2f}",
            "against_static": f"{median['StaticCache'] / median[name]:.2f}",
            "over_limit": "",
            "device_mib": f"{bytes_held[name][0] / 2**20:.1f}",
            "host_mib": f"{bytes_held[name][1] / 2**20:.1f}",
        }
        if name.startswith("QAdACache f="):
            share = float(name.split("=")[1])
            limit = median["no context"] + share * (median["StaticCache"] - median["no context"])
            row["over_limit"] = f"{median[name] / limit:.2f}"
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.benchmark", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="llama-3.2-1b", help="sizes of the model (default: %(default)s)")
    add("--tokens", type=int, nargs="+", default=[32768], help="of context (default: %(default)s)")
    add("--batch", type=int, default=1, help="rows (default: %(default)s)")
    add("--steps", type=int, default=8, help="tokens timed a round (default: %(default)s)")
    add("--rounds", type=int, default=3, help="over all methods (default: %(default)s)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="(default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--out", type=Path, help="folder to write benchmark-GEOMETRY-DEVICE.csv to")
    options = parser.parse_args(arguments)
    if options.out and not options.out.is_dir():
        parser.error(f"--out: there is no folder {options.out}")
    device = torch.device(options.device)
    model = make_model(
        options.geometry, dtype=getattr(torch, options.dtype), device=device, positions=max(options.tokens) + 1024
    )
    speed = bandwidth(device)
    print(f"{machine()}; {torch.get_num_threads()} threads; reads {speed / 1e9:.1f} GB/s")
    rows = []
    for tokens in options.tokens:
        work = Work(model, tokens, options.batch, options.steps, 2, options.seed)
        check(work)
        rows += measure(work, options.rounds)
    print(plain(rows))
    if options.out:
        write(
            options.out / f"benchmark-{options.geometry}-{device.type}.csv",
            rows,
            geometry=options.geometry,
            dtype=options.dtype,
            seed=options.seed,
            read_gb_per_s=f"{speed / 1e9:.1f}",
            threads=torch.get_num_threads(),
            machine=machine(),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
