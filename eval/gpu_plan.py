"""What a GPU would hold and read, by arithmetic: `python -m eval.gpu_plan --out eval/results/gpu_plan.csv`.

No GPU is used. The bytes of one KV head are those of a cache that is filled with as many random tokens; a model has
`layers * kv_heads * batch` of them. The share of the bulk's tokens that a decode step reads is the default's on a
pretrained model, from `trials_summary.csv`, at the longest length that the table has. A time is bytes over bandwidth:
it leaves out launches, gathers of single tokens, and all that is computed.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eval.shared.deciding import list_token_ways
from eval.shared.tables import align, new_file, read, write
from eval.shared.workloads import GEOMETRIES, fill, make_random_work
from qada_cache import QAdACache

MODELS = ("llama-3-8b", "qwen2-7b")
TOKENS = (32768, 131072)
BATCHES = (1, 8)
BUDGETS = (0.0, 0.25, 1.0)  # of the bulk, what an offloaded cache keeps on the device as well
VALUE_BYTES = 2
MEASURED_DIM = 64  # of the heads of the models in the table
SUMMARY = Path(__file__).parent / "results" / "trials_summary.csv"
GIB = 2**30


def count_head_bytes(*, tokens: int, dim: int) -> tuple[int, int, int]:
    """Bytes of one KV head of one row in a `QAdACache` of bfloat16: held on the device, in the bulk, a step's sketch.

    Spare room is not counted twice: the bulk is that of `tokens`, and what lies on the device is what does by default.
    """
    config = LlamaConfig(
        hidden_size=dim, intermediate_size=dim, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=dim, vocab_size=32, max_position_embeddings=tokens, dtype=torch.bfloat16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    work = make_random_work(model, tokens=tokens, batch=1, steps=1, warm_up=0, seed=0)
    cache = QAdACache(config=config, moments="current", offloading=True)
    fill(cache, work)
    store = cache.layers[0].store
    assert store is not None
    assert store.sketch is not None
    stored = store.bulk.lengths[0]
    return cache.stats().device_bytes, 2 * stored * dim * VALUE_BYTES, store.sketch.tensors.count_read_bytes(stored)


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
    _, bulk, sketch = count_head_bytes(tokens=int(row["length"]), dim=MEASURED_DIM)
    return float(row["bytes_read"]) - sketch / bulk, f"{row['model']}, prose, {row['length']} tokens"


def plan(model: str, tokens: int, batch: int, share: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each cache: GiB on the device and on the host, MiB over the bus and ms for each token decoded."""
    hidden, mlp, layers, heads, kv_heads, dim, vocabulary = GEOMETRIES[model]
    a_layer = 3 * hidden * mlp + 2 * hidden * dim * (heads + kv_heads)
    weights = VALUE_BYTES * (2 * vocabulary * hidden + layers * a_layer)
    device, bulk, sketch = (part * layers * kv_heads * batch for part in count_head_bytes(tokens=tokens, dim=dim))
    whole = 2 * tokens * dim * VALUE_BYTES * layers * kv_heads * batch
    caches: list[tuple[str, float, float, float, float]] = [
        ("DynamicCache", whole, 0, whole, 0),
        ("DynamicCache, offloading=True", 2 * whole / layers, whole, whole, whole),  # two layers are there at once
        ("QAdACache", device + bulk, 0, sketch + share * bulk, 0),
    ]
    for budget in BUDGETS:
        name = f"QAdACache, offloading=True, device_budget={budget:g}"
        bulk_read_bytes = (1 - budget) * share * bulk
        caches.append((name, device + budget * bulk, bulk, sketch + budget * share * bulk, bulk_read_bytes))
    return [
        {
            "model": model,
            "tokens": tokens,
            "batch": batch,
            "cache": name,
            "weights_gib": f"{weights / GIB:.1f}",
            "device_gib": f"{held / GIB:.2f}",
            "host_gib": f"{host / GIB:.2f}",
            "bus_mib_a_token": f"{bus / 2**20:.0f}",
            "cache_ms": f"{1e3 * (near / options.memory + bus / options.bus) / 1e9:.1f}",
            "token_ms": f"{1e3 * ((weights + near) / options.memory + bus / options.bus) / 1e9:.1f}",
        }
        for name, held, host, near, bus in caches
    ]


def main(arguments: list[str] | None = None) -> int:
    """Compute; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.gpu_plan", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(GEOMETRIES), default=MODELS, help="sizes (default: %(default)s)")
    add("--tokens", type=int, nargs="+", default=TOKENS, help="of context (default: %(default)s)")
    add("--batches", type=int, nargs="+", default=BATCHES, help="rows (default: %(default)s)")
    add(
        "--bus", type=float, default=25.0, help="GB/s between host and device, as PCIe 4.0 gives (default: %(default)s)"
    )
    add("--memory", type=float, default=2000.0, help="GB/s of the device's memory (default: %(default)s)")
    add("--out", type=new_file, help="CSV table")
    options = parser.parse_args(arguments)
    share, where = read_token_share(SUMMARY)
    rows = [
        row
        for model in options.models
        for tokens in options.tokens
        for batch in options.batches
        for row in plan(model, tokens, batch, share, options)
    ]
    if options.out:
        write(options.out, rows, bus_gb_s=options.bus, memory_gb_s=options.memory, share=share, share_of=where)
    print(align(rows))
    print(f"Keys and values read: {share:.1%} of the bulk ({where}), and the sketch.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
