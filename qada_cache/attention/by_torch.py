"""A query-adaptive call by torch's operations, where no kernel serves: reads, audits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from ..criterion import log_mass, logit, long_context
from ..kernels import partial_attention
from ..kernels.decode_call import Rule
from ..kernels.query_adaptive import Part, Request, Step, attend, attend_bulk, decide
from ..state.layer import QAdALayer
from ..storage import TokenStore, reading
from ..storage.geometry import Geometry


def true_log_bulk(step: Step, bulk_lse: Tensor) -> Tensor:
    """Of what is stored (`bulk_lse`), and of what still lies in the local buffer."""
    log_pending = log_mass(step.scores, step.masks.pending)
    return torch.logaddexp(log_pending, bulk_lse.view_as(log_pending))


def audit(layer: QAdALayer, step: Step, flags: Tensor, bulk_lse: Tensor, read_lse: Tensor) -> None:
    """Count how one call's decisions compare with the truth, on the device: see `CacheStats.audit`. `bulk_lse` is over
    the whole stored bulk, `read_lse` over all that a head read, `[batch, kv_heads, group * queries]` both."""
    decided = step.masks.decided.unsqueeze(2)
    log_local, log_true_bulk = log_mass(step.scores, step.masks.local), true_log_bulk(step, bulk_lse)
    needed = long_context(log_local, log_true_bulk, logit(layer.options.threshold)) & decided
    all_lse = torch.logaddexp(log_local, log_true_bulk)
    missed = -torch.expm1((read_lse.view_as(all_lse) - all_lse).clamp_max(0.0)).masked_fill(~decided, 0.0)
    tallies: tuple[Tensor, ...] = (decided.expand_as(flags), needed, needed & flags, flags, missed)
    if not _has_float64(decided.device):
        tallies = tuple(tally.cpu() for tally in tallies)
    layer.counters.add("audited", torch.stack([tally.sum(dtype=torch.float64) for tally in tallies]))


@cache
def _has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64, as Apple's do not, nor some of Intel's."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).sum()
    except (TypeError, RuntimeError):
        return False
    return True


def attend_by_torch(
    layer: QAdALayer,
    store: TokenStore,
    query: Tensor,
    geometry: Geometry,
    rule: Rule,
    log_bulk: Tensor | None,
    sink_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute a call for `decode.attend_adaptively`, and audit it if it is the layer's turn: the output, as there, and
    bool flags `[batch, kv_heads, group, queries]`. `log_bulk` is as of `decode.estimate_log_bulk`."""
    columns = slice(0, store.sinks + store.end)
    grouped_queries = query.reshape(query.shape[0], store.local_keys.shape[1], -1, query.shape[3])
    near = store.local_keys[:, :, columns], store.local_values[:, :, columns]
    sketch = None if store.sketch is None else store.sketch.tensors
    attend_part = partial(partial_attention, kernels=layer.options.kernels, softcap=rule.softcap)
    step = Step(grouped_queries, *near, geometry, rule, store.bulk.lengths, sketch, attend_part)
    if sink_logits is not None:
        _add_sink(step, sink_logits)
    every = [[True] * store.local_keys.shape[1]] * store.batch
    read, whole = partial(_read, layer, store, False), None
    if log_bulk is None:  # the oracle's: it needs every score, so everything is read whatever it decides
        whole = attend_bulk(step, read, every)
        log_bulk = true_log_bulk(step, whole[1])
    flags = decide(step, log_bulk)
    out, read_lse, selecting = attend(step, flags, read, whole)
    _count_and_prefetch(layer, store, selecting)
    if layer.is_audited():
        whole = whole or attend_bulk(step, partial(_read, layer, store, True), every)
        audit(layer, step, flags, whole[1], read_lse)
    return out.unflatten(2, flags.shape[2:]).flatten(1, 2).to(query.dtype), flags


def _add_sink(step: Step, sink_logits: Tensor) -> None:
    """Let a learned sink be one more column of the local buffer: a local token whose value is zero."""
    scores, masks = step.scores, step.masks
    column = sink_logits.float().view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    step.scores = torch.cat([scores, column], dim=-1)
    step.local_values = functional.pad(step.local_values, (0, 0, 0, 1))
    local, pending = functional.pad(masks.local, (0, 1), value=True), functional.pad(masks.pending, (0, 1))
    step.masks = replace(masks, local=local, pending=pending)


def _read(
    layer: QAdALayer, store: TokenStore, audit: bool, whole: list[list[bool]], requests: Iterator[Request] | None
) -> Iterator[Part]:
    """How a call reads the layer's bulk, or an audit, which decides nothing about what is kept on the device."""
    for part in reading.read_parts(store.bulk, whole, requests, update_residency=not audit):
        if audit:
            layer.counters.audited_bytes += part.bulk_read_bytes + part.resident_hit_bytes
        else:
            layer.counters.bulk_read_bytes += part.bulk_read_bytes
            layer.counters.resident_hit_bytes += part.resident_hit_bytes
        yield part


def _count_and_prefetch(layer: QAdALayer, store: TokenStore, selecting: list[list[bool]]) -> None:
    """Count the sketch's bytes, update residents, and prefetch heads of the next layer."""
    bulk, counters = store.bulk, layer.counters
    if selecting and store.sketch is not None:
        for length, heads in zip(bulk.lengths, selecting, strict=True):
            counters.sketch_read_bytes += store.sketch.tensors.read_bytes(length) * sum(heads)
        if bulk.offloaded and layer.options.device_budget:
            counters.bulk_read_bytes += reading.update_residency(bulk, torch.tensor(selecting, device="cpu"))
    if any(bulk.lengths) and layer.next_layer is not None and layer.next_layer.store is not None:
        layer.next_layer.counters.bulk_read_bytes += reading.prefetch(layer.next_layer.store.bulk)
