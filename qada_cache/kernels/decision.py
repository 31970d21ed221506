"""The decision of a decode step, from scores and moments: the query heads that need the long context.

Shapes are those of one call: scores `[batch, kv_heads, group, queries, columns]` over the near buffer, masks over its
columns `[batch or 1, 1, 1 or queries, columns]`, as heads are alike, log masses `[batch, kv_heads, group, queries]`.
"""

import torch
from torch import Tensor

from ..criterion import gaussian_log_bulk, group_decision, long_context, pool_score_moments, score_moments


def needs_long_context(
    scores: Tensor,
    log_bulk: Tensor | None,
    *,
    criterion: str | Tensor,
    local: Tensor,
    decided: Tensor,
    threshold: float,
    group_rule: str,
) -> Tensor:
    """Bool `[batch, kv_heads, group, queries]`, False where nothing is to be decided.

    Args:
        scores: over the near buffer; of columns that are not `local` they may be anything.
        log_bulk: `log A_bulk`, true or estimated, for a criterion that compares masses.
        criterion: "dense" (no head is local), "local" (every head is), the static table bool `[kv_heads, group]`, or
            any other, which compares masses.
        local: bool, as the masks above: sinks and window.
        decided: bool `[batch or 1, 1, 1 or queries]`, queries that are real and have a bulk.
        threshold: as in `criterion.long_context`.
        group_rule: as in `criterion.group_decision`.
    """
    shape, decided = scores.shape[:-1], decided.unsqueeze(2)
    if isinstance(criterion, Tensor):
        flags = group_decision(criterion.unsqueeze(-1).expand(shape), group_rule)
    elif log_bulk is None:
        flags = torch.full(shape, criterion == "dense", device=scores.device)
    else:
        flags = group_decision(long_context(log_mass(scores, local), log_bulk, threshold), group_rule)
    return flags & decided


def log_mass(scores: Tensor, mask: Tensor) -> Tensor:
    """The log-sum-exp of the scores of the columns in `mask`; for `local` it is `log A_local`."""
    return scores.masked_fill(~mask.unsqueeze(2), -torch.inf).logsumexp(dim=-1)


def current_log_bulk(
    packed: Tensor,
    scores: Tensor,
    mean: Tensor,
    covariance: Tensor,
    count: Tensor,
    *,
    staged: Tensor | None,
    bulk_tokens: Tensor,
    scaling: float,
) -> Tensor:
    """Eq. 7's `log A_bulk` by the prompt's own keys; nan where none are known.

    Args:
        packed: queries `[batch, kv_heads, group * queries, dim]` float32.
        scores: of them over the near buffer.
        mean, covariance: of the first `count` keys of the row's bulk, as in `criterion.score_moments`.
        count: int64 `[batch or 1]`.
        staged: bool, as the masks above: tokens of the bulk that are still in the near buffer, to be pooled with the
            others; None leaves them out.
        bulk_tokens: int64 `[batch or 1, 1, queries]`.
        scaling: multiplies the scores.
    """
    found = current_score_moments(packed, scores, mean, covariance, count, staged=staged, scaling=scaling)
    return gaussian_log_bulk(*found[:2], bulk_tokens.unsqueeze(2)).masked_fill(~found[2], torch.nan)


def other_log_bulk(
    packed: Tensor, scores: Tensor, mean: Tensor, covariance: Tensor, *, bulk_tokens: Tensor, scaling: float
) -> Tensor:
    """Eq. 7's `log A_bulk` by another prompt's keys; arguments as for `current_log_bulk`."""
    shape = scores.shape[:-1]
    score_mean, score_variance = score_moments(packed, mean, covariance, scaling=scaling)
    return gaussian_log_bulk(score_mean.view(shape), score_variance.view(shape), bulk_tokens.unsqueeze(2))


def larger(current: Tensor | None, other: Tensor | None) -> Tensor:
    """The larger of two estimates of `log A_bulk`, at least one of them given.

    `+inf` where neither knows anything: nothing can be said about the bulk, so read it.
    """
    if current is None or other is None:
        only = other if current is None else current
        assert only is not None
        return only.masked_fill(only.isnan(), torch.inf)
    return torch.fmax(current, other)  # fmax takes a number before a nan


def current_score_moments(
    packed: Tensor,
    scores: Tensor,
    mean: Tensor,
    covariance: Tensor,
    count: Tensor,
    *,
    staged: Tensor | None,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each query's scores over its own bulk, and bool, where they are known.

    Arguments as for `current_log_bulk`; three tensors of log masses' shape, the last broadcast to it.
    """
    shape = scores.shape[:-1]
    mean, variance = (found.view(shape) for found in score_moments(packed, mean, covariance, scaling=scaling))
    known = count.view(-1, 1, 1, 1)
    if staged is not None:
        staged = staged.unsqueeze(2)
        tokens = staged.sum(dim=-1)
        new = tokens.clamp_min(1).float()
        staged_mean = scores.masked_fill(~staged, 0.0).sum(dim=-1) / new
        deviation = (scores - staged_mean.unsqueeze(-1)).masked_fill(~staged, 0.0)
        staged_variance = deviation.square().sum(dim=-1) / new
        mean, variance = pool_score_moments(known.float(), mean, variance, tokens.float(), staged_mean, staged_variance)
        known = known + tokens
    return mean, variance, known > 0
