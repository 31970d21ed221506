"""Attention of one layer over its cached tokens: query-adaptive for short calls, whole context for long ones."""

from typing import Any

import torch
from torch import Tensor

from ..kernels import merge_partials, partial_attention
from ..state.layer import QAdALayer
from ..storage.padding import real_tokens
from ..storage.reading import stream
from ..storage.store import TokenStore
from .by_torch import by_torch
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
    queries, device = query.shape[2], query.device
    geometry = layer.shared.forward_pass.geometry(
        lengths=store.lengths, flushed=store.flushed, end=store.end, queries=queries, valid=valid, device=device
    )
    audited = layer.is_audited()
    fusable = queries == 1 and not audited and sink_logits is None
    kernel = chosen_kernel(layer, store, query) if fusable else None
    if kernel is None:
        told: dict[str, Any] = {"scaling": scaling, "audited": audited, "sink_logits": sink_logits}
        out, flags = by_torch(layer, store, query, geometry, **told)
    else:
        out, flags = one_token(layer, store, query, geometry, kernel, scaling=scaling)
    layer.counters.count(flags, geometry, store.near_keys.shape[1] * store.bulk.token_bytes)
    return out


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
