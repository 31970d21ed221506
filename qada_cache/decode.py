"""Attention of one layer over its cached tokens: query-adaptive for short calls, whole context for long ones."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .criterion import StaticHeads, gaussian_log_bulk, group_decision, long_context, pool_score_moments, score_moments
from .geometry import Geometry
from .kernels import choice, merge_partials, partial_attention, softmax_average
from .layer import QAdALayer
from .moments import KeyMoments, RunningMoments
from .one_token import one_token
from .store import TokenStore


def query_adaptive(
    layer: QAdALayer, store: TokenStore, query: Tensor, *, scaling: float, valid: Tensor | None
) -> Tensor:
    """Each query head reads its sinks and window, and the bulk only if the criterion says it must.

    The call's own tokens have been appended to `store` already; every query has its own local set and is causal.

    Args:
        layer: whose policy decides and whose counters count.
        store: its tokens.
        query: `[batch, heads, queries, dim]`, `queries` at most the window.
        scaling: multiplies the scores.
        valid: bool `[batch, queries]` on the host, False for padding; None without padding.

    Returns:
        `[batch, heads, queries, value_dim]` in the query's dtype. Padding queries get finite, unused values.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = store.near_keys.shape[1]
    group = heads // kv_heads
    columns = slice(0, store.sinks + store.end)
    near_keys, near_values = store.near_keys[:, :, columns], store.near_values[:, :, columns]
    geometry = layer.policy.geometry(
        lengths=store.lengths, flushed=store.flushed, end=store.end, queries=queries, valid=valid, device=query.device
    )
    if queries == 1:
        kernel = choice.fused_decode(query, near_values.shape[-1], store.bulk.keys, layer.policy.criterion)
        if kernel is not None:
            out, flags = one_token(layer, store, query, geometry, kernel, scaling=scaling)
            _count(layer, flags.unsqueeze(-1), geometry)
            return out
    # All query heads of a group share their KV head's keys: packed together, each key is read once.
    packed = query.reshape(batch, kv_heads, group * queries, dim)
    scores = torch.matmul(packed.float(), near_keys.float().transpose(-1, -2)) * scaling
    scores = scores.unflatten(2, (group, queries))

    far = None
    if layer.policy.criterion == "oracle":  # needs every score, so everything is read whatever it decides
        far = _bulk_partial(layer, store, packed, torch.ones(batch, kv_heads, dtype=torch.bool), scaling=scaling)
    flags = _needs_long_context(layer, store.moments, packed, scores, far, geometry, scaling=scaling)
    _count(layer, flags, geometry)

    visible = geometry.local.unsqueeze(1) | (geometry.staged.unsqueeze(1) & flags.unsqueeze(-1))
    out, lse = softmax_average(scores.masked_fill(~visible, -torch.inf).flatten(2, 3), near_values)
    if any(store.bulk.lengths):
        if far is None:
            far = _bulk_partial(layer, store, packed, flags.flatten(2).any(dim=-1), scaling=scaling)
        far_out, far_lse = far
        out, lse = merge_partials(out, lse, far_out, far_lse.masked_fill(~flags.flatten(2), -torch.inf))
    return out.unflatten(2, (group, queries)).flatten(1, 2).to(query.dtype)


def _needs_long_context(
    layer: QAdALayer,
    moments: RunningMoments | None,
    packed: Tensor,
    scores: Tensor,
    far: tuple[Tensor, Tensor] | None,
    geometry: Geometry,
    *,
    scaling: float,
) -> Tensor:
    """Bool `[batch, kv_heads, group, queries]`: heads that need the long context, False where there is no bulk.

    `packed` is `[batch, kv_heads, group * queries, dim]`, `scores` `[batch, kv_heads, group, queries, columns]`
    float32 over the near buffer, `far` the bulk's partial attention if the criterion asked for it.
    """
    policy, shape = layer.policy, scores.shape[:-1]
    decided = geometry.decided.unsqueeze(2)
    if policy.criterion == "dense":
        return decided.expand(shape)
    if policy.criterion == "local":
        return torch.zeros(shape, dtype=torch.bool, device=scores.device)
    if isinstance(policy.criterion, StaticHeads):
        table = policy.criterion.long_context[layer.index].to(scores.device)
        table = table.reshape(shape[1], -1, 1)  # heads given as KV heads broadcast over their group
        flags = group_decision(table.expand(shape), None, policy.threshold, policy.group_rule)
        return flags & decided

    log_local = scores.masked_fill(~geometry.local.unsqueeze(1), -torch.inf).logsumexp(dim=-1)
    if far is not None:
        log_staged = scores.masked_fill(~geometry.staged.unsqueeze(1), -torch.inf).logsumexp(dim=-1)
        log_bulk = torch.logaddexp(log_staged, far[1].view(shape))
    else:
        mean, variance, known = _bulk_score_moments(layer, moments, packed, scores, geometry, scaling=scaling)
        log_bulk = gaussian_log_bulk(mean, variance, geometry.bulk_tokens.unsqueeze(2))
        # Without any moments nothing can be said about the bulk: read it.
        log_bulk = log_bulk.masked_fill(~known, torch.inf)
    flags = long_context(log_local, log_bulk, policy.threshold)
    flags = group_decision(flags, torch.sigmoid(log_local - log_bulk), policy.threshold, policy.group_rule)
    return flags & decided


def _bulk_score_moments(
    layer: QAdALayer,
    moments: RunningMoments | None,
    packed: Tensor,
    scores: Tensor,
    geometry: Geometry,
    *,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance `[batch, kv_heads, group, queries]` of each query's bulk scores, and where they are known."""
    policy, shape = layer.policy, scores.shape[:-1]
    if moments is None:
        assert isinstance(policy.moments, KeyMoments)
        mean, covariance = policy.moments.layer(layer.index, packed.device)
        score_mean, score_variance = score_moments(packed.float(), mean, covariance, scaling=scaling)
        known = torch.ones((), dtype=torch.bool, device=packed.device)
        return score_mean.view(shape), score_variance.view(shape), known

    score_mean, score_variance = score_moments(packed.float(), moments.mean, moments.covariance, scaling=scaling)
    score_mean, score_variance = score_mean.view(shape), score_variance.view(shape)
    count = torch.tensor(moments.count, dtype=torch.float32).to(packed.device).view(-1, 1, 1, 1)
    if not (policy.update_moments and geometry.any_staged):
        return score_mean, score_variance, count > 0
    staged = geometry.staged.unsqueeze(1)
    tokens = staged.sum(dim=-1).float()
    staged_scores = scores.masked_fill(~staged, 0.0)
    staged_mean = staged_scores.sum(dim=-1) / tokens.clamp_min(1)
    deviation = (scores - staged_mean.unsqueeze(-1)).masked_fill(~staged, 0.0)
    staged_variance = deviation.square().sum(dim=-1) / tokens.clamp_min(1)
    score_mean, score_variance = pool_score_moments(
        count, score_mean, score_variance, tokens, staged_mean, staged_variance
    )
    return score_mean, score_variance, count + tokens > 0


def _count(layer: QAdALayer, flags: Tensor, geometry: Geometry) -> None:
    """Book one call's decisions on the device, without waiting for it."""
    layer.steps += 1
    if not geometry.decisions:
        return
    local = ~flags & geometry.decided.unsqueeze(2)
    heads, groups = local.sum(dim=(0, 3)), local.all(dim=2).sum(dim=(0, 2))
    layer.local_heads = heads if layer.local_heads is None else layer.local_heads + heads
    layer.local_groups = groups if layer.local_groups is None else layer.local_groups + groups
    layer.decisions += geometry.decisions


def _runs(wanted: list[bool]) -> Iterator[slice]:
    """Maximal runs of neighbouring True entries."""
    start = None
    for index, flag in enumerate([*wanted, False]):
        if flag and start is None:
            start = index
        elif not flag and start is not None:
            yield slice(start, index)
            start = None


def _bulk_partial(
    layer: QAdALayer, store: TokenStore, packed: Tensor, wanted: Tensor, *, scaling: float
) -> tuple[Tensor, Tensor]:
    """Partial attention over the stored bulk, for the wanted KV heads only.

    Every stored token precedes every query's window, so no mask is needed.

    Args:
        layer: whose counters count.
        store: holds the bulk.
        packed: `[batch, kv_heads, queries, dim]`.
        wanted: bool `[batch, kv_heads]`; reading it on the host is the one synchronisation of a step.
        scaling: multiplies the scores.

    Returns:
        `(out, lse)` as `partial_attention`, neutral where not wanted.
    """
    out = packed.new_zeros(*packed.shape[:-1], store.near_values.shape[-1], dtype=torch.float32)
    lse = packed.new_full(packed.shape[:-1], -torch.inf, dtype=torch.float32)
    for row, flags in enumerate(wanted.tolist()):
        length = store.bulk.lengths[row]
        if not length:
            continue
        rows = slice(row, row + 1)
        for heads in _runs(flags):
            keys, values = store.bulk.read(rows, heads, 0, length)
            out[rows, heads], lse[rows, heads] = partial_attention(packed[rows, heads], keys, values, scaling=scaling)
            layer.pulled_bytes += keys.nbytes + values.nbytes
    return out, lse


def whole_context(
    layer: QAdALayer,
    store: TokenStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    valid: Tensor | None,
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

    Returns:
        `[batch, heads, tokens, value_dim]` in the query's dtype; zeros for padding.
    """
    result = query.new_zeros(*query.shape[:-1], value.shape[-1])
    alike = valid is None and len(set(zip(store.lengths, store.flushed, strict=True))) == 1
    batch = query.shape[0]
    for rows in [slice(0, batch)] if alike else [slice(row, row + 1) for row in range(batch)]:
        real = slice(None) if valid is None else valid[rows.start].nonzero().squeeze(-1).to(query.device)
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
            scaling=scaling,
            causal=True,
        )
        out, lse = out.reshape(*packed.shape[:3], -1), lse.reshape(packed.shape[:3])
        for keys, values in store.near(rows):
            out, lse = merge_partials(out, lse, *partial_attention(packed, keys, values, scaling=scaling))
        for keys, values in store.bulk.stream(rows):
            out, lse = merge_partials(out, lse, *partial_attention(packed, keys, values, scaling=scaling))
            layer.streamed_bytes += keys.nbytes + values.nbytes
        result[rows, :, real] = out.reshape(*new_query.shape[:3], -1).to(query.dtype)
    return result
