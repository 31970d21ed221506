"""Statistics of a QAdACache: sparsity and bytes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from .models.sharding import HeadShard
from .state import Options
from .state.layer import QAdALayer
from .storage.bulk import Bulk

_READ = (
    *("bulk_read_bytes", "sketch_read_bytes", "dense_bulk_bytes", "streamed_bytes"),
    *("prompt_pairs", "prompt_read_pairs"),
)


@dataclass(frozen=True)
class AuditStats:
    """Results of `QAdACache(audit_every=...)`: the decisions on query heads against their true attention.

    Attributes:
        decisions: audited decisions of query heads.
        needed: truly long-context ones: more than 1 - threshold of the attention is on the bulk.
        recall: share of the needed ones that were called long-context; nan if none was needed.
        excess: share of those called long-context that were not needed; nan if none was called so.
        missed: mean share of attention on unread tokens, over all decisions.
        read_bytes: bulk bytes read for the audit, not part of `CacheStats.bulk_read_bytes`.
    """

    decisions: int
    needed: int
    recall: float
    excess: float
    missed: float
    read_bytes: int


@dataclass(frozen=True, eq=False)
class CacheStats:
    """A snapshot made by `QAdACache.stats()`. A layer takes one decision for each query token of each row that has a
    bulk by then; exact calls decide nothing.

    Attributes:
        layers: indices of the layers that decide (full attention), the row order of the tables below.
        local_share: float32 `[layers, query_heads]`, share of decisions that called the query head local; nan if none,
            and for heads that a layer has fewer of than another.
        kv_local_share: float32 `[layers, kv_heads]`, share with no long-context head in the KV head's group: its bulk
            was not needed for that token. Latents in several processes that split the query heads are a KV head in
            each, whose bytes count, too.
        steps: query-adaptive forward passes.
        decisions: decisions taken per layer.
        tokens: logical length of the cache, padding included.
        device_bytes: bytes on the compute device: sinks, window, pending tokens, sketch, key moments (shared by a
            model's caches), layers of other kinds, and bulks that are not offloaded, or lie there within a budget.
        host_bytes: bytes of the offloaded bulk, preallocated room included; also of a CPU model, under
            `offloading=True`. Pinned memory counts as it is allocated: each layer's keys, and its values, in whole
            pages, or rounded up to a power of two where torch pins them.
        shared_bytes: part of the bulk's bytes: tokens in memory shared with copies of the cache, or in a mapped file.
            Every cache counts them, and they take memory once.
        device_layers: how many layers have their own bulk on the device: of an offloaded one, as many as are within
            `device_budget`.
        bulk_read_bytes: bulk bytes read by query-adaptive calls, and of latents that a model's own indexer picked.
        sketch_read_bytes: bytes of the key sketch read by query-adaptive calls.
        dense_bulk_bytes: stored bulk bytes of the same calls if every head had read all of its own. Pending tokens,
            which long-context heads read, too, are counted nowhere.
        streamed_bytes: bulk bytes read for exact calls on a filled cache (long second turns, chunked prefill).
        prompt_pairs: pairs of a query and a token up to its own, over query heads and layers, of first prompts (or
            their first chunks) that were read by selection, under `prefill_threshold`.
        prompt_read_pairs: those of them that were computed.
        audit: results of audits, None if there were none.
    """

    layers: tuple[int, ...]
    local_share: Tensor
    kv_local_share: Tensor
    steps: int
    decisions: int
    tokens: int
    device_bytes: int
    host_bytes: int
    shared_bytes: int
    device_layers: int
    bulk_read_bytes: int
    sketch_read_bytes: int
    dense_bulk_bytes: int
    streamed_bytes: int
    prompt_pairs: int
    prompt_read_pairs: int
    audit: AuditStats | None

    @property
    def sparsity(self) -> float:
        """Share of query-head decisions that said local, over all layers; nan before the first decision."""
        return _average(self.local_share)

    @property
    def kv_sparsity(self) -> float:
        """Share of decisions without need for a KV head's bulk; memory traffic follows KV heads."""
        return _average(self.kv_local_share)

    @property
    def read_share(self) -> float:
        """Bytes read, the sketch included, over `dense_bulk_bytes`; nan if these are 0 (without a stored bulk)."""
        read = self.bulk_read_bytes + self.sketch_read_bytes
        return read / self.dense_bulk_bytes if self.dense_bulk_bytes else math.nan

    @property
    def prompt_read_share(self) -> float:
        """`prompt_read_pairs` over `prompt_pairs`; nan if no prompt was read by selection."""
        return self.prompt_read_pairs / self.prompt_pairs if self.prompt_pairs else math.nan

    def __str__(self) -> str:
        decided = f"{self.steps or 'no'} adaptive steps"
        if self.decisions:
            decided += f": query heads local {self.sparsity:.1%}, KV heads local {self.kv_sparsity:.1%}"
        if self.dense_bulk_bytes:
            decided += f", {self.read_share:.1%} of the bulk's bytes read"
        read = (self.bulk_read_bytes + self.sketch_read_bytes) / 2**20
        streamed = f", by exact calls {self.streamed_bytes / 2**20:.1f} MiB" if self.streamed_bytes else ""
        prompts = f", {self.prompt_read_share:.1%} of the pairs of prompts computed" if self.prompt_pairs else ""
        return (
            f"{self.tokens} tokens, {decided}; device {self.device_bytes / 2**20:.1f} MiB, host "
            f"{self.host_bytes / 2**20:.1f} MiB, read {read:.1f} MiB{streamed}{prompts}"
        )


def _average(shares: Tensor) -> float:
    """The mean of the shares that are not nan."""
    return shares[~shares.isnan()].mean().item()


def is_on_device(layer: QAdALayer, bulk: Bulk) -> bool:
    """Whether the bytes of a layer's bulk count as `device_bytes`."""
    return bulk.placed or not layer.options.offloading


def count_layer_bytes(layer: Any) -> tuple[int, int]:
    """Bytes that one layer of a cache holds on its device, and on the host."""
    holders, on_host = [layer], 0
    counted: list[Any] = []
    if isinstance(layer, QAdALayer):
        counted += [part for asker in layer.askers for part in (asker.counters, asker.kept_moments)]
        if (store := layer.store) is not None:
            holders += [store, store.moments]
            counted += [store.bulk.sketch, store.bulk if (on_device := is_on_device(layer, store.bulk)) else None]
            counted += store.bulk.beside
            counted += {id(each): each for segments in store.bulk.reopened for each in segments}.values()
            on_host = 0 if on_device else store.bulk.nbytes
    values = [value for holder in holders if holder is not None for value in vars(holder).values()]
    values += [state for value in values if isinstance(value, dict) for state in value.values()]  # of linear layers
    counted += [value for value in values if isinstance(value, Tensor)]
    return sum(each.nbytes for each in counted if each is not None), on_host


def count_bytes(cache: DynamicCache) -> tuple[int, int]:
    """Bytes that all layers of a cache hold on their devices, and on the host, with snapshots of them."""
    on_device, on_host = zip((0, 0), *map(count_layer_bytes, cache.layers), strict=True)
    snapshots = cache._shared.snapshots if hasattr(cache, "_shared") else None
    return sum(on_device), sum(on_host) + (0 if snapshots is None else snapshots.nbytes)


def count_moments(layers: Iterable[QAdALayer]) -> int:
    """Bytes on the device of other prompts' moments, which these layers share with those of other caches."""
    moments = {layer.options.other_moments for layer in layers}
    return sum(each.device_bytes for each in moments if each is not None)


def collect(cache: DynamicCache, shard: HeadShard) -> CacheStats:
    """Read the counters of all layers (waits for the device once per layer). All processes of the shard call this
    together, and get the shares of all heads, and sums of bytes and audits."""
    ours = [layer for layer in cache.layers if isinstance(layer, QAdALayer)]
    askers = sorted((asker for layer in ours for asker in layer.askers), key=attrgetter("index"))
    counted = [asker.counters.record for asker in askers]  # before bytes: reading `record` sums up counters

    def share(name: str) -> Tensor:
        shares = [each[name].flatten().cpu().float() / each["decisions"] for each in counted if each[name] is not None]
        if not shares:
            return shard.gather_queries(torch.full((len(askers), 1), math.nan, dtype=torch.float32, device="cpu"), 1)
        most = max(map(len, shares))
        return shard.gather_queries(torch.stack([pad(row, (0, most - len(row)), value=math.nan) for row in shares]), 1)

    on_device, on_host = count_bytes(cache)
    bulks = [(layer, layer.store.bulk) for layer in ours if layer.store is not None]
    sums = {
        "device_bytes": on_device + count_moments(ours),
        "host_bytes": on_host,
        "shared_bytes": sum(bulk.shared_bytes + bulk.lent_bytes for _, bulk in bulks),
        **{name: sum(int(each[name]) for each in counted) for name in _READ},
    }
    summed = (
        shard.gather_queries(torch.tensor([list(sums.values())], dtype=torch.int64, device="cpu"), 0)
        .sum(dim=0)
        .tolist()
    )
    return CacheStats(
        layers=tuple(asker.index for asker in askers),
        local_share=share("local_heads"),
        kv_local_share=share("local_groups"),
        steps=max((each["steps"] for each in counted), default=0),
        decisions=max((each["decisions"] for each in counted), default=0),
        tokens=cache.get_seq_length() if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) else 0,
        device_layers=sum(bulk.capacity > 0 and is_on_device(layer, bulk) for layer, bulk in bulks),
        **dict(zip(sums, summed, strict=True)),
        audit=_audit(counted, shard),
    )


def _audit(counted: list[dict[str, Any]], shard: HeadShard) -> AuditStats | None:
    sums = [each["audited"].cpu() for each in counted if each["audited"] is not None]
    if not sums:
        return None
    read_bytes = torch.tensor([sum(each["audited_bytes"] for each in counted)], dtype=torch.int64, device="cpu")
    whole = torch.cat([torch.stack(sums).sum(dim=0), read_bytes])
    decisions, needed, found, called, unread, read = shard.gather_queries(whole[None], 0).sum(dim=0).tolist()
    recall = found / needed if needed else math.nan
    excess = 1 - found / called if called else math.nan
    missed = unread / decisions if decisions else math.nan
    return AuditStats(int(decisions), int(needed), recall, excess, missed, read_bytes=int(read))


def describe_stats(cache: DynamicCache, options: Options, model_type: str) -> str:
    """The `repr` of a cache: one line."""
    criterion = options.criterion if isinstance(options.criterion, str) else "static heads"
    other = [] if options.other_moments is None else [f"of {options.other_moments.prompt}"]
    moments = " and ".join(["current"] * options.current_moments + other) or "none"
    tuned = " (tuned)" if options.tuned else ""
    tokens = f"token threshold {options.token_threshold:g}{tuned}, " if options.selects_tokens else ""
    tokens += f"{options.bulk_bits} bits, " if options.codes_tokens else ""
    own = [layer for layer in cache.layers if isinstance(layer, QAdALayer)]
    served = [layer.askers for layer in own]
    ours, layers = sum(map(len, served)), max([len(cache.layers), *(1 + each[-1].index for each in served)])
    on_device, on_host = count_bytes(cache)
    on_device += count_moments(own)  # as `CacheStats` counts them
    counted = f"{cache.get_seq_length()} tokens, " if ours else ""  # layers without attention count none
    return (
        f"QAdACache({model_type}, {ours} of {layers} layers, criterion {criterion}, "
        f"moments {moments}, threshold {options.threshold}, {tokens}{options.sink_tokens} sinks + {options.window} "
        f"window, offloading {'on' if options.offloading else 'off'}; {counted}"
        f"device {on_device / 2**20:.1f} MiB, host {on_host / 2**20:.1f} MiB)"
    )
