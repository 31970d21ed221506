"""Query-adaptive attention of one layer by torch's operations: what serves any call that no kernel does."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import partial_attention
from ..kernels.query_adaptive import Masks, Part, Read, Request, Step, attend, decide, over_whole_bulk
from ..state.layer import QAdALayer
from ..storage import reading
from ..storage.geometry import Geometry
from ..storage.store import TokenStore
from .decide import audit, log_bulk, rule_of


def by_torch(
    layer: QAdALayer,
    store: TokenStore,
    query: Tensor,
    geometry: Geometry,
    *,
    scaling: float,
    audited: bool,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute a call for `decode.query_adaptive` (arguments as there), and compare it with the truth if `audited`.

    Returns:
        `[batch, heads, queries, value_dim]` in the query's dtype, bool flags `[batch, kv_heads, group, queries]`.
    """
    bulk, columns = store.bulk, slice(0, store.sinks + store.end)
    step = Step(
        query.reshape(*query.shape[:1], store.near_keys.shape[1], -1, query.shape[3]),
        store.near_keys[:, :, columns],
        store.near_values[:, :, columns],
        geometry,
        rule_of(layer, store, query, scaling),
        bulk.lengths,
        None if store.sketch is None else store.sketch.tensors,
        [] if store.sketch is None else store.sketch.lengths,
    )
    if sink_logits is not None:
        _add_sink(step, sink_logits)
    compute = partial(partial_attention, kernels=layer.options.kernels)
    every = [[True] * store.near_keys.shape[1]] * store.batch
    read = _reader(layer, store)
    whole = None
    if step.rule.kind == "oracle":  # needs every score, so everything is read whatever it decides
        whole = over_whole_bulk(step, read, every, partial=compute)
    flags = decide(step, log_bulk(layer, store, step, geometry, None if whole is None else whole[1]))
    found = attend(step, flags, read, partial=compute, whole=whole)
    _follow_up(layer, store, found.selecting)
    if audited:
        whole = whole or over_whole_bulk(step, _reader(layer, store, audit=True), every, partial=compute)
        audit(layer, step, flags, whole[1], found.read_lse)
    out = found.out.unflatten(2, flags.shape[2:]).flatten(1, 2)
    return out.to(query.dtype), flags


def _add_sink(step: Step, sink_logits: Tensor) -> None:
    """Let a learned sink be one more column of the near buffer: a local token whose value is zero."""
    scores, masks = step.scores, step.masks
    column = sink_logits.float().view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    step.scores = torch.cat([scores, column], dim=-1)
    step.near_values = functional.pad(step.near_values, (0, 0, 0, 1))
    local, staged = functional.pad(masks.local, (0, 1), value=True), functional.pad(masks.staged, (0, 1))
    step.masks = Masks(local, staged, masks.bulk_tokens, masks.decided)


def _reader(layer: QAdALayer, store: TokenStore, *, audit: bool = False) -> Read:
    """How a call reads the layer's bulk, or an audit, which decides nothing about what is kept on the device."""

    def read(whole: list[list[bool]], requests: Iterator[Request] | None) -> Iterator[Part]:
        for part in reading.read_parts(store.bulk, whole, requests, learn=not audit):
            if audit:
                layer.counters.audited_bytes += part.pulled + part.spared
            else:
                layer.counters.pulled_bytes += part.pulled
                layer.counters.spared_bytes += part.spared
            yield part

    return read


def _follow_up(layer: QAdALayer, store: TokenStore, selecting: list[list[bool]]) -> None:
    """Count what was read of the sketch, choose residents, and fetch early what the next layer may need."""
    bulk, counters = store.bulk, layer.counters
    if selecting and store.sketch is not None:
        for length, heads in zip(store.sketch.lengths, selecting, strict=True):
            counters.sketched_bytes += store.sketch.tensors.read_bytes(length) * sum(heads)
        if bulk.offloaded and layer.options.device_budget:
            counters.pulled_bytes += reading.learn(bulk, torch.tensor(selecting))
    if any(bulk.lengths) and layer.following is not None and layer.following.store is not None:
        layer.following.counters.pulled_bytes += reading.prefetch(layer.following.store.bulk)
