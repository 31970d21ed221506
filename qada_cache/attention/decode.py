"""Attention of one layer over its cached tokens: query-adaptive for short calls, whole context for long ones."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import merge_partials, partial_attention, softmax_average
from ..state.layer import QAdALayer
from ..storage.geometry import Geometry
from ..storage.padding import real_tokens
from ..storage.reading import prefetch, stream
from ..storage.store import TokenStore
from .decide import audit, needs_long_context
from .far import long_context, whole_bulk
from .one_token import chosen_kernel, one_token


def query_adaptive(
    layer: QAdALayer,
    store: TokenStore,
    query: Tensor,
    *,
    scaling: float,
    valid: Tensor | None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Each query head reads its sinks and window, and the bulk only if the criterion says it must.

    The call's own tokens have been appended to `store` already; every query has its own local set and is causal.

    Args:
        layer: whose options decide and whose counters count.
        store: its tokens.
        query: `[batch, heads, queries, dim]`, `queries` at most the window.
        scaling: multiplies the scores.
        valid: bool `[batch, queries]` on the host, False for padding; None without padding.
        sink_logits: learned, `[heads]`: one more score a head, of no token; None: the model has none.

    Returns:
        `[batch, heads, queries, value_dim]` in the query's dtype. Padding queries get finite, unused values.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = store.near_keys.shape[1]
    group = heads // kv_heads
    geometry = layer.shared.forward_pass.geometry(
        lengths=store.lengths, flushed=store.flushed, end=store.end, queries=queries, valid=valid, device=query.device
    )
    audited = layer.is_audited()
    if queries == 1 and not audited and sink_logits is None:
        kernel = chosen_kernel(layer, store, query)
        if kernel is not None:
            out, flags = one_token(layer, store, query, geometry, kernel, scaling=scaling)
            layer.counters.count(flags.unsqueeze(-1), geometry, kv_heads * store.bulk.token_bytes)
            return out
    columns = slice(0, store.sinks + store.end)
    near_keys, near_values = store.near_keys[:, :, columns], store.near_values[:, :, columns]
    # All query heads of a group share their KV head's keys: packed together, each key is read once.
    packed = query.reshape(batch, kv_heads, group * queries, dim)
    scores = torch.matmul(packed.float(), near_keys.float().transpose(-1, -2)) * scaling
    scores = scores.unflatten(2, (group, queries))
    if sink_logits is not None:
        scores, near_values, geometry = _with_sink_column(scores, near_values, geometry, sink_logits)

    far = None
    if layer.options.criterion == "oracle":  # needs every score, so everything is read whatever it decides
        far = whole_bulk(layer, store, packed, None, scaling=scaling)
    far_lse = None if far is None else far[1]
    flags = needs_long_context(layer, store.moments, packed, scores, far_lse, geometry, scaling=scaling)
    layer.counters.count(flags, geometry, kv_heads * store.bulk.token_bytes)

    visible = geometry.local.unsqueeze(1) | (geometry.staged.unsqueeze(1) & flags.unsqueeze(-1))
    out, lse = softmax_average(scores.masked_fill(~visible, -torch.inf).flatten(2, 3), near_values)
    read_lse = lse
    if any(store.bulk.lengths):
        found = far or long_context(layer, store, packed, flags, lse, geometry, scaling=scaling)
        local = ~flags.flatten(2)
        read_lse = torch.logaddexp(lse, found[-1].masked_fill(local, -torch.inf))
        if layer.following is not None and layer.following.store is not None:
            layer.following.counters.pulled_bytes += prefetch(layer.following.store.bulk)
        out, lse = merge_partials(out, lse, found[0], found[1].masked_fill(local, -torch.inf))
    if audited:
        _, true_lse = far or whole_bulk(layer, store, packed, None, scaling=scaling, audit=True)
        audit(layer, flags, scores, true_lse, read_lse, geometry)
    return out.unflatten(2, (group, queries)).flatten(1, 2).to(query.dtype)


def _with_sink_column(
    scores: Tensor, values: Tensor, geometry: Geometry, sink_logits: Tensor
) -> tuple[Tensor, Tensor, Geometry]:
    """Near scores, values and geometry with one more column: a learned sink is a local token whose value is zero."""
    column = sink_logits.float().view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    local, staged = functional.pad(geometry.local, (0, 1), value=True), functional.pad(geometry.staged, (0, 1))
    wider = replace(geometry, local=local, staged=staged)
    return torch.cat([scores, column], dim=-1), functional.pad(values, (0, 0, 0, 1)), wider


def whole_context(
    layer: QAdALayer,
    store: TokenStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    valid: Tensor | None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Exact causal attention of many new tokens over everything cached and themselves.

    The bulk is streamed block by block, so device memory does not grow with it. The new tokens are not yet in
    `store`.

    Args:
        layer: whose counters count.
        store: the tokens before these.
        query: `[batch, heads, tokens, dim]`.
        key, value: the new tokens' own, `[batch, kv_heads, tokens, dim]`.
        scaling: multiplies the scores.
        valid: bool `[batch, tokens]` on the host, False for padding; None without padding.
        sink_logits: as for `query_adaptive`.

    Returns:
        `[batch, heads, tokens, value_dim]` in the query's dtype; zeros for padding.
    """
    result = query.new_zeros(*query.shape[:-1], value.shape[-1])
    alike = valid is None and len(set(zip(store.lengths, store.flushed, strict=True))) == 1
    batch = query.shape[0]
    how: dict[str, Any] = {"scaling": scaling, "kernels": layer.options.kernels}
    for rows in [slice(0, batch)] if alike else [slice(row, row + 1) for row in range(batch)]:
        real = slice(None) if valid is None else real_tokens(valid[rows.start], query.device)
        new_query, new_key, new_value = query[rows][:, :, real], key[rows][:, :, real], value[rows][:, :, real]
        kv_heads, tokens = new_key.shape[1:3]
        group = query.shape[1] // kv_heads
        if not tokens:  # this row is padding from end to end of the call
            continue
        packed = new_query.reshape(-1, kv_heads, group * tokens, new_query.shape[-1])
        out, lse = partial_attention(
            new_query,
            new_key.repeat_interleave(group, dim=1),
            new_value.repeat_interleave(group, dim=1),
            causal=True,
            **how,
        )
        if sink_logits is not None:
            out, lse = merge_partials(out, lse, torch.zeros_like(out), sink_logits.float()[:, None].expand_as(lse))
        out, lse = out.reshape(*packed.shape[:3], -1), lse.reshape(packed.shape[:3])
        for keys, values in store.near(rows):
            out, lse = merge_partials(out, lse, *partial_attention(packed, keys, values, **how))
        for part in stream(store.bulk, rows):
            at = slice(part.rows.start - rows.start, part.rows.stop - rows.start), part.heads
            far = partial_attention(packed[at], part.keys, part.values, **how)
            out[at], lse[at] = merge_partials(out[at], lse[at], *far)
            layer.counters.streamed_bytes += part.pulled
            layer.counters.spared_bytes += part.spared
        result[rows, :, real] = out.reshape(*new_query.shape[:3], -1).to(query.dtype)
    return result
