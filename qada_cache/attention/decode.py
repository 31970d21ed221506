"""Attention of one layer over its cached tokens: query-adaptive for short calls, exact for long ones."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..criterion import StaticHeads, gaussian_log_bulk, logit
from ..kernels import choice, merge_partials, partial_attention
from ..kernels.decode_call import DecodeCall, Rule
from ..key_moments import KeyMoments
from ..state.layer import QAdALayer
from ..storage import TokenStore
from ..storage.geometry import Geometry
from ..storage.padding import real_tokens
from ..storage.reading import stream, update_residency
from .by_torch import attend_by_torch


class CallOptions(NamedTuple):
    """What a model says of one call beside its queries, keys and values."""

    scaling: float  # as for `reference.partial_attention`
    softcap: float | None = None  # likewise
    valid: Tensor | None = None  # bool `[batch, tokens]` on the host, False for padding; None without padding
    sink_logits: Tensor | None = None  # learned, `[heads]`: one more score a head, of no token; None: there are none
    # Which of the call's tokens each of them sees, bool `[batch or 1, tokens, tokens]` on their device; None: causal.
    visible: Tensor | None = None


def attend_adaptively(layer: QAdALayer, store: TokenStore, query: Tensor, options: CallOptions) -> Tensor:
    """Query-adaptive attention: each head reads its sinks and window, a long-context head its bulk as well.

    The call's own tokens have been appended to `store` already; every query has its own local set and is causal.
    `query` is `[batch, heads, queries, dim]`, at most a window of queries, and the result `[batch, heads, queries,
    value_dim]` in its dtype. Padding queries get finite, unused values.
    """
    queries, device = query.shape[2], query.device
    geometry = layer.shared.forward_pass.geometry(
        lengths=store.lengths, flushed=store.flushed, end=store.end, queries=queries, valid=options.valid, device=device
    )
    rule = get_rule(layer, store, query, options.scaling, options.softcap)
    log_bulk = estimate_log_bulk(layer, store, query, geometry, rule)
    fusable = queries == 1 and not layer.is_audited() and options.sink_logits is None and options.softcap is None
    kernel = find_kernel(layer, store, query) if fusable else None
    if kernel is None:
        out, flags = attend_by_torch(layer, store, query, geometry, rule, log_bulk, options.sink_logits)
    else:
        out, flags = decode_one_token(layer, store, query, geometry, rule, log_bulk, kernel)
    layer.counters.count(flags, geometry, store.local_keys.shape[1] * store.bulk.token_bytes)
    return out


def get_rule(layer: QAdALayer, store: TokenStore, query: Tensor, scaling: float, softcap: float | None) -> Rule:
    """How the layer decides, made once for as long as it is asked for the same."""
    options = layer.options
    key = weakref.ref(options), scaling, softcap, query.shape[1], query.device
    if layer.binding.rule is None or layer.binding.rule[0] != key:
        criterion, kv_heads = options.criterion, store.local_keys.shape[1]
        # Criteria that compare no masses need a finite threshold.
        cut = logit(options.threshold) if criterion in ("gaussian", "oracle") else 0.0
        rule = Rule(scaling, cut, options.group_rule, options.token_threshold, softcap)
        long_context = torch.full((kv_heads, query.shape[1] // kv_heads), criterion != "local", device="cpu")
        if isinstance(criterion, StaticHeads):
            own = layer.shared.model.shard.own(criterion.long_context[layer.index])
            long_context &= own.reshape(kv_heads, -1).cpu()  # one entry for a group broadcasts
        constant = torch.where(long_context, torch.inf, -torch.inf)[None, :, :, None].float()
        layer.binding.rule = key, rule, constant.to(query.device, non_blocking=True)
    return layer.binding.rule[1]


def estimate_log_bulk(
    layer: QAdALayer, store: TokenStore, query: Tensor, geometry: Geometry, rule: Rule
) -> Tensor | None:
    """The `log A_bulk` that heads decide by, float32 `[batch or 1, kv_heads, group, queries or 1]`; None for "oracle",
    which knows it.

    By "gaussian" eq. 7's, the larger one of two estimates, and `+inf` where nothing is known of the bulk, so that it is
    read. In the eyes of a criterion that compares no masses it is `+inf` for long-context heads, `-inf` for local ones.
    """
    options, found = layer.options, None
    if options.criterion == "oracle":
        return None
    if options.criterion == "gaussian" and geometry.decisions:
        grouped = query.float().unflatten(1, (store.local_keys.shape[1], -1))
        if options.other_moments is not None:
            found = estimate_by_others(options.other_moments, layer, grouped, geometry, rule)
        if (own := store.moments) is not None:
            given = grouped, own.mean, own.covariance, geometry.own_log_tokens
            estimate = gaussian_log_bulk(*given, scaling=rule.scaling, softcap=rule.softcap)
            if 0 in own.count and not store.update_moments:  # frozen before there was anything to know
                unknown = torch.tensor(own.count, device="cpu").to(estimate.device, non_blocking=True) == 0
                estimate = estimate.masked_fill(unknown.view(-1, 1, 1, 1), torch.nan)
            found = estimate if found is None else torch.fmax(found, estimate)  # which takes a number before a nan
    assert layer.binding.rule is not None
    return layer.binding.rule[2] if found is None else found


def estimate_by_others(
    moments: KeyMoments, layer: QAdALayer, grouped: Tensor, geometry: Geometry, rule: Rule
) -> Tensor:
    """Eq. 7's `log A_bulk` of queries `[batch, kv_heads, group, queries, dim]` float32 by another prompt's moments: of
    each query those for its bulk's length."""
    device, shard, log_tokens = grouped.device, layer.shared.model.shard, geometry.log_tokens
    told: dict[str, Any] = {"scaling": rule.scaling, "softcap": rule.softcap}
    if grouped.shape[3] == 1:
        pair = layer.kept_moments.get(moments, layer.index, geometry.row_lengths, device, shard)
        return gaussian_log_bulk(grouped, *pair, log_tokens, **told)
    lengths = geometry.distinct_moment_lengths
    means, covariances = layer.kept_moments.get(moments, layer.index, lengths, device, shard)
    found = grouped.new_full(grouped.shape[:-1], -torch.inf)
    for length, mean, covariance in zip((0, *lengths), means.split(1), covariances.split(1), strict=False):
        estimate = gaussian_log_bulk(grouped, mean, covariance, log_tokens, **told)
        found = torch.where(geometry.bulk_tokens.unsqueeze(2) > length, estimate, found)
    return found


def find_kernel(layer: QAdALayer, store: TokenStore, query: Tensor) -> Callable | None:
    """What `choice.decode_kernel` says of a query `[batch, heads, 1, dim]`, asked again when anything is different."""
    bulk, sketch, options = store.bulk, store.sketch, layer.options
    layout = sketch.layout if sketch is not None and sketch.in_use else None
    key = weakref.ref(options), layout, bulk.capacity, query.shape, query.dtype, query.device
    if layer.binding.kernel is None or layer.binding.kernel[0] != key:
        kernel = choice.decode_kernel(query, bulk.keys, bulk.values, options.criterion, options.kernels, layout=layout)
        layer.binding.kernel = key, kernel
    return layer.binding.kernel[1]


def decode_one_token(
    layer: QAdALayer,
    store: TokenStore,
    query: Tensor,
    geometry: Geometry,
    rule: Rule,
    log_bulk: Tensor | None,
    kernel: Callable,
) -> tuple[Tensor, Tensor]:
    """A call with one query a row by `kernel`, a `fused_decode`; arguments and results as of `attend_by_torch`. Nothing
    here waits for the device: small tensors of host numbers are copied to it without blocking."""
    bulk, sketch, counters = store.bulk, store.sketch, layer.counters
    assert log_bulk is not None  # no kernel computes "oracle"
    tensors = query, store.local_keys, store.local_values, *bulk.in_place()
    call = DecodeCall(*tensors, geometry.rows, log_bulk.squeeze(3), rule, binding=layer.binding)
    call.bulk_read_bytes = counters.on(query.device, "bulk_read_bytes")
    if sketch is not None and sketch.in_use:
        call.sketch, call.sketch_read_bytes = sketch.tensors, counters.on(query.device, "sketch_read_bytes")
    elsewhere = bulk.offloaded and layer.options.device_budget
    if elsewhere:
        call.resident_pointers = bulk.residents.resident_pointers(bulk.lengths)
        call.resident_hit_bytes = counters.on(query.device, "resident_hit_bytes")
    out, flags = kernel(call)
    if elsewhere and (moved := update_residency(bulk, flags.any(dim=-1))):
        counters.bulk_read_bytes += moved
    return out, flags.unsqueeze(-1)


def attend_exactly(
    layer: QAdALayer, store: TokenStore, query: Tensor, key: Tensor, value: Tensor, options: CallOptions
) -> Tensor:
    """Exact attention of new tokens over everything cached and, causally or by a mask, over themselves.

    The bulk is streamed block by block, so device memory does not grow with it. The new tokens are not yet in `store`:
    `query` `[batch, heads, tokens, dim]`, `key` and `value` `[batch, kv_heads, tokens, dim]` and `value_dim`. The
    result is `[batch, heads, tokens, value_dim]` in the query's dtype, zeros for padding.
    """
    scaling, softcap, valid, sink_logits, visible = options
    result = query.new_zeros(*query.shape[:-1], value.shape[-1])
    alike = valid is None and len(set(zip(store.lengths, store.flushed, strict=True))) == 1
    batch = query.shape[0]
    kwargs: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "kernels": layer.options.kernels}
    for rows in [slice(0, batch)] if alike else [slice(row, row + 1) for row in range(batch)]:
        real = slice(None) if valid is None else real_tokens(valid, rows.start, query.device)
        new_query, new_key, new_value = (part[rows][:, :, real] for part in (query, key, value))
        kv_heads, tokens = new_key.shape[1:3]
        group = query.shape[1] // kv_heads
        if not tokens:  # this row is padding from end to end of the call
            continue
        grouped_queries = new_query.reshape(-1, kv_heads, group * tokens, new_query.shape[-1])
        own = (part.repeat_interleave(group, dim=1) for part in (new_key, new_value))
        mask = None if visible is None else visible.expand(batch, -1, -1)[rows, None, real][..., real]
        out, lse = partial_attention(new_query, *own, mask=mask, causal=mask is None, **kwargs)
        if sink_logits is not None:
            out, lse = merge_partials(out, lse, torch.zeros_like(out), sink_logits.float()[:, None].expand_as(lse))
        out, lse = out.reshape(*grouped_queries.shape[:3], -1), lse.reshape(grouped_queries.shape[:3])
        for keys, values in store.local_views(rows):
            out, lse = merge_partials(out, lse, *partial_attention(grouped_queries, keys, values, **kwargs))
        for part in stream(store.bulk, rows):
            at = slice(part.rows.start - rows.start, part.rows.stop - rows.start), part.heads
            far = partial_attention(grouped_queries[at], part.keys, part.values, **kwargs)
            out[at], lse[at] = merge_partials(out[at], lse[at], *far)
            layer.counters.streamed_bytes += part.bulk_read_bytes
        result[rows, :, real] = out.reshape(*new_query.shape[:3], -1).to(query.dtype)
    return result
