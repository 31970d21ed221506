"""Memory and time of one long prompt, layer by layer and token by token: `qada profile`."""

import csv
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, isnan
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from .cache import QAdACache
from .models import find_inputs_device
from .process_memory import PeakMemory
from .stats import count_bytes, count_layer_bytes
from .versions import pass_cache


@dataclass
class Profile:
    """Measurements of one cache on the prompt."""

    name: str  # of the cache
    prefill_seconds: float
    tokens: list[tuple[float, int, int]]  # each decoded token's seconds, and bytes on device and host after it
    read_share: float  # of the bulk's bytes that decoding read, see `CacheStats.read_share`; 1 for DynamicCache
    # The most memory the accelerator had allocated, model included; on a CPU what the process took above what it had
    # before; None where nobody tells.
    peak_bytes: int | None
    layers: list[tuple[int, int, float]]  # device bytes, host bytes, `kv_local_share`

    def summarize(self) -> dict[str, str]:
        """As a row of a table."""
        seconds = sorted(seconds for seconds, _, _ in self.tokens)
        _, on_device, on_host = self.tokens[-1]
        return {
            "cache": self.name,
            "prefill s": f"{self.prefill_seconds:.2f}",
            "ms/token p50": f"{1e3 * median(seconds):.1f}",
            "ms/token p95": f"{1e3 * seconds[ceil(0.95 * len(seconds)) - 1]:.1f}",
            "bulk read": "-" if isnan(self.read_share) else f"{self.read_share:.1%}",
            "device MiB": f"{on_device / 2**20:.1f}",
            "host MiB": f"{on_host / 2**20:.1f}",
            "peak MiB": "" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:.1f}",
        }


@torch.inference_mode()
def profile(model: PreTrainedModel, ids: Tensor, *, new_tokens: int, chunk: int, **options: Any) -> list[Profile]:
    """Read `ids` `[1, tokens]`, `chunk` tokens a pass, and decode `new_tokens` greedily: once with DynamicCache, then
    with QAdACache under these options. The model is in eval mode."""
    with tqdm(total=2 * (ids.shape[1] + new_tokens), unit="token") as bar:
        # The first is gone before the second is built: no two caches need room at once.
        stock = _run(model, ids, DynamicCache(config=model.config), new_tokens, chunk, bar)
        return [stock, _run(model, ids, QAdACache(model, **options), new_tokens, chunk, bar)]


def _run(model: PreTrainedModel, ids: Tensor, cache: DynamicCache, new_tokens: int, chunk: int, bar: tqdm) -> Profile:
    device, name = find_inputs_device(model), type(cache).__name__
    bar.set_postfix_str(name)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def read(parts: Iterable[Tensor]) -> tuple[float, Tensor]:
        """How many seconds that took, and the next token `[1, 1]`."""
        begin = time.perf_counter()
        for part in parts:
            token = model(input_ids=part, **pass_cache(cache), logits_to_keep=1).logits[:, -1:].argmax(-1)
            bar.update(part.shape[1])
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - begin, token

    with PeakMemory() as memory:
        prefill_seconds, token = read(ids.to(device).split(chunk, dim=1))
        tokens = []
        for _ in range(new_tokens):
            seconds, token = read([token])
            tokens.append((seconds, *count_bytes(cache)))
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory.nbytes
    read_share, local = 1.0, {}
    if isinstance(cache, QAdACache):
        stats = cache.stats()
        chosen = stats.decisions or stats.dense_bulk_bytes  # else all calls are exact
        read_share = stats.read_share if chosen else 1.0
        local = dict(zip(stats.layers, stats.kv_local_share.nanmean(dim=1).tolist(), strict=True))
    layers = [(*count_layer_bytes(layer), local.get(index, 0.0)) for index, layer in enumerate(cache.layers)]
    return Profile(name, prefill_seconds, tokens, read_share, peak_bytes, layers)


def make_layer_table(profiles: list[Profile]) -> list[dict[str, str]]:
    """A row for every layer, the caches side by side."""
    rows = [{"layer": str(index)} for index in range(len(profiles[0].layers))]
    for profile in profiles:
        for row, (on_device, on_host, local) in zip(rows, profile.layers, strict=True):
            row[f"{profile.name} device MiB"] = f"{on_device / 2**20:.2f}"
            row[f"{profile.name} host MiB"] = f"{on_host / 2**20:.2f}"
            row[f"{profile.name} KV heads local"] = "-" if isnan(local) else f"{local:.0%}"
    return rows


def write_tokens(profiles: list[Profile], path: Path) -> None:
    """A CSV row for every token and cache."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("cache", "token", "seconds", "device_bytes", "host_bytes"))
        for profile in profiles:
            for token, (seconds, on_device, on_host) in enumerate(profile.tokens):
                writer.writerow((profile.name, token, f"{seconds:.6f}", on_device, on_host))


def plot(profiles: list[Profile], path: Path) -> None:
    """Device bytes and time of every token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    memory, speed = figure.subplots(1, 2)
    for profile in profiles:
        memory.plot([on_device / 2**20 for _, on_device, _ in profile.tokens], label=profile.name)
        speed.plot([1e3 * seconds for seconds, _, _ in profile.tokens], label=profile.name)
    memory.set(xlabel="token", ylabel="keys and values on the device, MiB", ylim=(0, None))
    speed.set(xlabel="token", ylabel="ms", ylim=(0, None))
    memory.legend()
    figure.savefig(path)
