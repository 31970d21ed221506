"""Which heads need the long context for the queries of one call, and whether that was right."""

import torch
from torch import Tensor

from ..criterion import StaticHeads, gaussian_log_bulk, group_decision, long_context, pool_score_moments, score_moments
from ..key_moments.key_moments import KeyMoments
from ..key_moments.rotation import rounded
from ..key_moments.running import RunningMoments
from ..layer import QAdALayer
from ..storage.geometry import Geometry


def needs_long_context(
    layer: QAdALayer,
    moments: RunningMoments | None,
    packed: Tensor,
    scores: Tensor,
    far_lse: Tensor | None,
    geometry: Geometry,
    *,
    scaling: float,
) -> Tensor:
    """Heads that need the long context, False where there is no bulk.

    Args:
        layer: whose options decide.
        moments: running moments of its stored keys, if it keeps any.
        packed: queries `[batch, kv_heads, group * queries, dim]`.
        scores: of them over the near buffer, `[batch, kv_heads, group, queries, columns]` float32.
        far_lse: log-sum-exp of their scores over the stored bulk `[batch, kv_heads, group * queries]`, for the
            criterion that asks for it ("oracle"); else None.
        geometry: of the call.
        scaling: multiplies the scores.

    Returns:
        bool `[batch, kv_heads, group, queries]`.
    """
    options, shape = layer.options, scores.shape[:-1]
    decided = geometry.decided.unsqueeze(2)
    if options.criterion == "dense":
        return decided.expand(shape)
    if options.criterion == "local":
        return torch.zeros(shape, dtype=torch.bool, device=scores.device)
    if isinstance(options.criterion, StaticHeads):
        table = options.criterion.long_context[layer.index].to(scores.device)
        table = table.reshape(shape[1], -1, 1)  # heads given as KV heads broadcast over their group
        flags = group_decision(table.expand(shape), None, options.threshold, options.group_rule)
        return flags & decided

    log_local = log_local_mass(scores, geometry)
    if far_lse is not None:
        log_bulk = log_bulk_mass(scores, far_lse, geometry)
    else:
        log_bulk = estimated_log_bulk(layer, moments, packed, scores, geometry, scaling=scaling)
    flags = long_context(log_local, log_bulk, options.threshold)
    flags = group_decision(flags, torch.sigmoid(log_local - log_bulk), options.threshold, options.group_rule)
    return flags & decided


def log_local_mass(scores: Tensor, geometry: Geometry) -> Tensor:
    """`log A_local` `[batch, kv_heads, group, queries]`; arguments as for `needs_long_context`."""
    return scores.masked_fill(~geometry.local.unsqueeze(1), -torch.inf).logsumexp(dim=-1)


def log_bulk_mass(scores: Tensor, far_lse: Tensor, geometry: Geometry) -> Tensor:
    """The true `log A_bulk`: of what is stored (`far_lse`), and of what still lies in the near buffer."""
    log_staged = scores.masked_fill(~geometry.staged.unsqueeze(1), -torch.inf).logsumexp(dim=-1)
    return torch.logaddexp(log_staged, far_lse.view_as(log_staged))


def estimated_log_bulk(
    layer: QAdALayer,
    moments: RunningMoments | None,
    packed: Tensor,
    scores: Tensor,
    geometry: Geometry,
    *,
    scaling: float,
) -> Tensor:
    """Eq. 7's `log A_bulk` `[batch, kv_heads, group, queries]`; of two prompts' moments, the larger estimate.

    `+inf` where there are no moments yet: nothing can be said about the bulk, so read it.
    """
    other, tokens, shape = layer.options.other_moments, geometry.bulk_tokens.unsqueeze(2), scores.shape[:-1]
    log_bulk = scores.new_full(shape, torch.inf if other is None else -torch.inf)
    if moments is not None:
        mean, variance, known = current_score_moments(layer, moments, packed, scores, geometry, scaling=scaling)
        log_bulk = torch.where(known, gaussian_log_bulk(mean, variance, tokens), log_bulk)
    if other is not None:
        query = packed.float().view(*shape, -1)
        found = kept_score_moments(other, layer.index, query, geometry, scaling=scaling)
        log_bulk = torch.maximum(log_bulk, gaussian_log_bulk(*found, tokens))
    return log_bulk


def current_score_moments(
    layer: QAdALayer,
    moments: RunningMoments,
    packed: Tensor,
    scores: Tensor,
    geometry: Geometry,
    *,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance `[batch, kv_heads, group, queries]` of each query's bulk scores, and where they are known."""
    options, shape = layer.options, scores.shape[:-1]
    score_mean, score_variance = score_moments(packed.float(), moments.mean, moments.covariance, scaling=scaling)
    score_mean, score_variance = score_mean.view(shape), score_variance.view(shape)
    count = moments.known.float().view(-1, 1, 1, 1)
    if not (options.update_moments and geometry.any_staged):
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


def kept_score_moments(
    moments: KeyMoments, layer: int, query: Tensor, geometry: Geometry, *, scaling: float
) -> tuple[Tensor, Tensor]:
    """As `current_score_moments`, from another prompt's moments, for each query those of its own bulk's length.

    `query` is `[batch, kv_heads, group, queries, dim]` float32.
    """
    mean = variance = query.new_zeros(query.shape[:-1])
    shortest = 0
    lengths = sorted({rounded(length) for length in geometry.lengths})  # nearly always one
    kept = moments.layer(layer, lengths, query.device)
    for length, (key_mean, key_covariance) in zip(lengths, kept, strict=True):
        found = score_moments(query.flatten(2, 3), key_mean, key_covariance, scaling=scaling)
        longer = (geometry.bulk_tokens > shortest).unsqueeze(2)
        mean = torch.where(longer, found[0].view_as(mean), mean)
        variance = torch.where(longer, found[1].view_as(mean), variance)
        shortest = length
    return mean, variance


def audit(layer: QAdALayer, flags: Tensor, scores: Tensor, far_lse: Tensor, geometry: Geometry) -> None:
    """Book what the truth says about one call's decisions, on the device: see `CacheStats.audit`.

    `far_lse` is over the whole stored bulk, for every head; the other arguments as for `needs_long_context`.
    """
    decided = geometry.decided.unsqueeze(2)
    log_local, log_bulk = log_local_mass(scores, geometry), log_bulk_mass(scores, far_lse, geometry)
    needed = long_context(log_local, log_bulk, layer.options.threshold) & decided
    missed = torch.sigmoid(log_bulk - log_local).masked_fill(flags | ~decided, 0.0)
    tallies = (decided.expand_as(flags), needed, needed & flags, flags, missed)
    layer.counters.audit(torch.stack([tally.sum(dtype=torch.float64) for tally in tallies]))
