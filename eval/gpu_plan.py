"""What GPUs would hold and take, by arithmetic: `python -m eval.gpu_plan --out eval/results/gpu_plan.csv`.

No GPU is used. A token takes the largest of three times, as if the two others were hidden behind it: `bytes_ms`, what
is read over bandwidth; `issue_ms`, instructions over what a GPU issues; `host_ms`, what the host takes for a step.

- The bytes of one KV head are those of a cache that is filled with as many random tokens; a model has `layers *
  kv_heads * batch` of them. The share of the bulk's tokens that a step reads is the default's on a pretrained model,
  from `trials_summary.csv`, at the longest length that the table has. DynamicCache copies its tokens to append one, so
  it reads them twice and writes them once.
- Instructions are those of our kernels, at most (`eval/shared/gpus.py`); those of the model's products, and of other
  caches' attention, are not known.
- The host's time follows from `launch_time.csv` and `benchmark-llama-3-8b-cuda.csv`. Steps of ours are replays of a
  graph.

`--assumptions` has the table of what is assumed instead.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.shared.deciding import list_token_ways
from eval.shared.gpus import GPUS, MOST_TOKENS, SCORES, WARPS, Host, count_instructions, read_host
from eval.shared.tables import align, new_file, read, write
from eval.shared.workloads import GEOMETRIES, fill, make_random_work
from qada_cache import QAdACache
from qada_cache.sketch import count_segments

MODELS = ("llama-3-8b", "qwen2-7b")
TOKENS = (32768, 131072)
BATCHES = (1, 8)
BUDGETS = (0.0, 0.25, 1.0)  # of the bulk, what an offloaded cache keeps on the device
SKETCHES = {16: "1.5", 8: "1.5+8", 4: "1.5+4"}  # of other tables, by `bulk_bits`
VALUE_BYTES = 2
MEASURED_DIM = 64  # of the heads of the models in the table
SUMMARY = Path(__file__).parent / "results" / "trials_summary.csv"
GIB = 2**30


class HeadBytes(NamedTuple):
    """Of one KV head of one row."""

    device: int  # by default
    bulk: int  # elsewhere
    sketch: int  # that a step reads


class Cache(NamedTuple):
    """What one setting holds and moves for a step of a whole model, in bytes, and milliseconds of the host."""

    name: str
    device: float
    host: float
    near: float  # moved in the device's memory
    bus: float
    host_ms: float
    sketch: str = ""  # whose kernels compute


@functools.cache
def count_head_bytes(*, tokens: int, dim: int, bulk_bits: int = 16) -> HeadBytes:
    """Those of a `QAdACache` of bfloat16.

    Spare room is not counted twice: the bulk is that of `tokens`, and what lies on the device is what does by default.
    """
    config = LlamaConfig(
        hidden_size=dim, intermediate_size=dim, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=dim, vocab_size=32, max_position_embeddings=tokens, dtype=torch.bfloat16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    work = make_random_work(model, tokens=tokens, batch=1, steps=1, warm_up=0, seed=0)
    cache = QAdACache(config=config, moments="current", offloading=True, bulk_bits=bulk_bits)
    fill(cache, work)
    store = cache.layers[0].store
    assert store is not None
    assert store.sketch is not None
    bulk, stored = store.bulk, store.bulk.stored[0]
    token = sum(part.shape[3] * part.element_size() for part in bulk.tensors)
    sketch = store.sketch.tensors.count_read_bytes(bulk.lengths[0])
    return HeadBytes(cache.stats().device_bytes, stored * token, sketch)


def read_token_share(summary: Path) -> tuple[float, str]:
    """Of the bulk's bytes, what a step reads of keys and values by default; and where that was measured.

    Raises:
        ValueError: the table does not have the default.
    """
    default = list_token_ways(few=True)[0]
    rows = [
        row
        for row in read(summary)
        if row["task"] == "prose" and (row["criterion"], row["read"]) == ("qada", default.read)
        if (row["rule"], float(row["threshold"])) == (default.rule, default.threshold)
    ]
    if not rows:
        raise ValueError(f"{summary} has no row of prose for the default, {default.read}")
    row = max(rows, key=lambda row: int(row["length"]))
    head = count_head_bytes(tokens=int(row["length"]), dim=MEASURED_DIM)
    return float(row["bytes_read"]) - head.sketch / head.bulk, f"{row['model']}, prose, {row['length']} tokens"


def list_caches(model: str, tokens: int, batch: int, share: float, host: Host) -> list[Cache]:
    """Every setting, and transformers' caches."""
    _, _, layers, _, kv_heads, dim, _ = GEOMETRIES[model]
    heads = layers * kv_heads * batch
    whole, dynamic = 2 * tokens * dim * VALUE_BYTES * heads, layers * host.dynamic
    caches = [
        Cache("DynamicCache", whole, 0, 3 * whole, 0, dynamic),
        Cache("DynamicCache, offloading=True", 2 * whole / layers, whole, whole, whole, dynamic),  # two layers at once
        Cache("StaticCache", whole, 0, whole, 0, dynamic),
        Cache("StaticCache, one CUDA graph", whole, 0, whole, 0, 0.0),
    ]
    for bits, of in SKETCHES.items():
        device, bulk, sketch = (heads * part for part in count_head_bytes(tokens=tokens, dim=dim, bulk_bits=bits))
        replayed = layers * host.replayed[of]
        name = f"QAdACache, bulk_bits={bits}"
        caches.append(Cache(f"{name}, offloading=False", device + bulk, 0, sketch + share * bulk, 0, replayed, of))
        for budget in BUDGETS:
            near, far = sketch + budget * share * bulk, (1 - budget) * share * bulk
            held = device + budget * bulk, (1 - budget) * bulk
            caches.append(Cache(f"{name}, device_budget={budget:g}", *held, near, far, replayed, of))
    return caches


def plan(model: str, tokens: int, batch: int, share: float, host: Host) -> list[dict[str, Any]]:
    """A row for each GPU and cache: GiB on the device and on the host, MiB over the bus and ms for a decoded token."""
    hidden, mlp, layers, heads, kv_heads, dim, vocabulary = GEOMETRIES[model]
    a_layer = 3 * hidden * mlp + 2 * hidden * dim * (heads + kv_heads)
    weights = VALUE_BYTES * (2 * vocabulary * hidden + layers * a_layer)
    caches, rows = list_caches(model, tokens, batch, share, host), []
    sizes: dict[str, Any] = {"dim": dim, "group": heads // kv_heads, "tokens": tokens}
    sizes["segments"] = count_segments(tokens)
    for gpu, assumed in GPUS.items():
        for cache in caches:
            moved = 1e3 * ((weights + cache.near) / assumed.memory_gb_s + cache.bus / assumed.bus_gb_s) / 1e9
            issue = 0.0
            if cache.sketch:
                a_head = count_instructions(**sizes, sketch=cache.sketch, architecture=assumed.architecture)
                issue = layers * kv_heads * batch * a_head / (assumed.schedulers * assumed.ghz * 1e6)
            times = {"bytes": moved, "issue": issue, "host": cache.host_ms}
            rows.append({
                "gpu": gpu,
                "model": model,
                "tokens": tokens,
                "batch": batch,
                "cache": cache.name,
                "weights_gib": f"{weights / GIB:.1f}",
                "device_gib": f"{cache.device / GIB:.2f}",
                "host_gib": f"{cache.host / GIB:.2f}",
                "fits": weights + cache.device < assumed.memory_gib * GIB,
                "bus_mib_a_token": f"{cache.bus / 2**20:.0f}",
                "bytes_ms": f"{moved:.1f}",
                "issue_ms": f"{issue:.1f}" if cache.sketch else "",
                "host_ms": f"{cache.host_ms:.1f}",
                "token_ms": f"{max(times.values()):.1f}",
                "bound": max(times, key=lambda name: times[name]),
            })  # fmt: skip
    return rows


def list_assumptions(share: float, where: str, host: Host) -> list[dict[str, Any]]:
    """A row for each number."""
    rows = [
        {"of": gpu, "assumed": name, "value": value}
        for gpu, assumed in GPUS.items()
        for name, value in assumed._asdict().items()
    ]
    rows.append({"of": "tokens", "assumed": f"share of the bulk that is read ({where})", "value": f"{share:.4f}"})
    rows.append({"of": "kernels", "assumed": "warps of a program", "value": WARPS})
    rows.append({"of": "kernels", "assumed": "tokens that a program takes at once, at most", "value": MOST_TOKENS})
    rows.append({"of": "kernels", "assumed": "tokens times query heads, at most", "value": SCORES})
    rows.append({"of": "host", "assumed": "ms a layer, DynamicCache", "value": f"{host.dynamic:.3f}"})
    for name in SKETCHES.values():
        rows.append({"of": "host", "assumed": f"ms a layer, replayed, {name}", "value": f"{host.replayed[name]:.3f}"})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Compute; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.gpu_plan", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(GEOMETRIES), default=MODELS, help="sizes (default: %(default)s)")
    add("--tokens", type=int, nargs="+", default=TOKENS, help="of context (default: %(default)s)")
    add("--batches", type=int, nargs="+", default=BATCHES, help="rows (default: %(default)s)")
    add("--assumptions", action="store_true", help="the table of what is assumed, instead")
    add("--out", type=new_file, help="CSV table")
    options = parser.parse_args(arguments)
    (share, where), host = read_token_share(SUMMARY), read_host()
    rows = (
        list_assumptions(share, where, host)
        if options.assumptions
        else [
            row
            for model in options.models
            for tokens in options.tokens
            for batch in options.batches
            for row in plan(model, tokens, batch, share, host)
        ]
    )
    if options.out:
        write(options.out, rows)
    print(align(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
