"""Which attention heads need the long context for one query: pure functions of scores and moments.

Notation of the paper: `A_local` and `A_bulk` are the sums of `exp(score)` over the local set (sinks and window)
and over every other token. All functions work on logarithms, so no score can overflow.
"""

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from .files import tensor_file

CRITERIA = ("gaussian", "oracle", "dense", "local")
GROUP_RULES = ("any", "head")
OwnMoments = tuple[Tensor, Tensor, Tensor]  # mean and covariance of a bulk's first keys; how many, int64 `[batch or 1]`


@dataclass(frozen=True, eq=False)
class StaticHeads:
    """The heads that attend to the long context, the same for every token (the paper's static criteria).

    Args:
        long_context: bool `[layers, heads]`, True for a long-context head; `heads` counts query heads, or KV heads with
            one entry for their whole group.

    Raises:
        TypeError: it is no bool tensor of two dimensions.
    """

    long_context: Tensor

    def __post_init__(self) -> None:
        table = self.long_context
        if not isinstance(table, Tensor) or table.dtype != torch.bool or table.dim() != 2:
            got = f"{table.dtype} {list(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
            raise TypeError(f"StaticHeads(long_context) takes a bool tensor [layers, heads], got {got}")

    @classmethod
    def from_oracle(cls, local_share: Tensor, alpha: float) -> "StaticHeads":
        """The paper's static criteria: the share `alpha` of heads with the most local decisions of the oracle is local.

        Args:
            local_share: `[layers, heads]`, `stats().local_share` of a `QAdACache(model, criterion="oracle")` after
                generating: on prompts of the task itself ("static oracle") or of others ("static RULER"). nan, without
                a decision, counts as less than any share.
            alpha: in [0, 1].

        Raises:
            ValueError: another shape, or `alpha` outside its range.
        """
        if local_share.dim() != 2 or not 0.0 <= alpha <= 1.0:
            raise ValueError(
                "from_oracle takes shares [layers, heads] and alpha in [0, 1], got "
                f"{list(local_share.shape)} and {alpha}"
            )
        shares = local_share.float().nan_to_num(nan=-1.0).flatten()
        table = torch.ones(shares.numel(), dtype=torch.bool, device=shares.device)
        table[shares.argsort(descending=True, stable=True)[: round(alpha * shares.numel())]] = False
        return cls(table.view(local_share.shape))

    def save(self, path: str | os.PathLike) -> None:
        """Write to one safetensors file."""
        tensor_file.write(path, "qada-heads", {"static_heads": self.long_context}, {})

    @classmethod
    def load(cls, path: str | os.PathLike) -> "StaticHeads":
        """The inverse of `save`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is truncated, altered, not a heads file, or of another format.
        """
        tensors, _ = tensor_file.read(path, "qada-heads")
        return cls(tensors["static_heads"])


def soft_cap(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores that come near `softcap` and never above it, as Gemma 2 has them: `softcap * tanh(scores / softcap)`."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def score_moments(
    query: Tensor, mean: Tensor, covariance: Tensor, *, scaling: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the scores of keys with the given moments (below eq. 7), `[batch, kv_heads, queries]`.

    `mu_s = scaling * q . mu_K` and `sigma_s^2 = scaling^2 * q Sigma_K q^T`.

    Args:
        query: `[batch, kv_heads, queries, dim]` float32, the query heads of a group side by side along `queries`.
        mean, covariance: float32 `[batch or 1, kv_heads, dim]` and `[batch or 1, kv_heads, dim, dim]`.
        scaling: the attention's own score multiplier.
        softcap: of scores `softcap * tanh(s / softcap)` instead, by the tangent of that at the mean. The variance is at
            most what makes `exp(softcap)` the mean exponential, as no score is above it.
    """
    score_mean = torch.matmul(query, mean.unsqueeze(-1)).squeeze(-1) * scaling
    score_variance = (torch.matmul(query, covariance) * query).sum(dim=-1) * scaling**2
    score_variance = score_variance.clamp_min(0.0)  # rounding may leave a tiny negative
    if softcap is None:
        return score_mean, score_variance
    capped = torch.tanh(score_mean / softcap)
    mean = softcap * capped
    return mean, torch.minimum(score_variance * (1 - capped.square()).square(), 2 * (softcap - mean))


def pool_score_moments(
    count_a: Tensor, mean_a: Tensor, variance_a: Tensor, count_b: Tensor, mean_b: Tensor, variance_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and population variance of two disjoint sets of scores pooled (Chan et al., 1983). Scores are linear in the
    key, so this equals pooling keys. All tensors broadcast; a count may be 0."""
    total = (count_a + count_b).clamp_min(1)
    delta = mean_b - mean_a
    mean = mean_a + delta * (count_b / total)
    variance = (count_a * variance_a + count_b * variance_b + delta.square() * (count_a * count_b / total)) / total
    return mean, variance


def gaussian_log_bulk(score_mean: Tensor, score_variance: Tensor, bulk_tokens: Tensor) -> Tensor:
    """The paper's estimate of `log A_bulk`: `log T_bulk + mu_s + sigma_s^2 / 2` (eq. 7); `-inf` without a bulk."""
    return torch.log(bulk_tokens.float()) + score_mean + 0.5 * score_variance


def current_score_moments(
    query: Tensor, scores: Tensor, own: OwnMoments, *, pending: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each query's scores over its own bulk by the prompt's keys, and bool, where they are known.

    All are `[batch, kv_heads, group, queries]`, the last broadcast to it. Arguments that are not below are as for
    `score_moments`.

    Args:
        scores: of the queries over the local buffer, `[batch, kv_heads, group, queries, columns]`, capped already.
        own: of the rows' bulks; the mean and covariance as for `score_moments`.
        pending: bool `[batch or 1, 1, 1 or queries, columns]`, tokens of the bulk that still lie in the local buffer,
            to be pooled with the others; None leaves them out.
    """
    mean, covariance, count = own
    shape, known = scores.shape[:-1], count.view(-1, 1, 1, 1)
    moments = score_moments(query, mean, covariance, scaling=scaling, softcap=softcap)
    mean, variance = (found.view(shape) for found in moments)
    if pending is not None:
        pending = pending.unsqueeze(2)
        tokens = pending.sum(dim=-1)
        new = tokens.clamp_min(1).float()
        pending_mean = scores.masked_fill(~pending, 0.0).sum(dim=-1) / new
        deviation = (scores - pending_mean.unsqueeze(-1)).masked_fill(~pending, 0.0)
        pending_variance = deviation.square().sum(dim=-1) / new
        mean, variance = pool_score_moments(
            known.float(), mean, variance, tokens.float(), pending_mean, pending_variance
        )
        known = known + tokens
    return mean, variance, known > 0


def log_mass(scores: Tensor, mask: Tensor) -> Tensor:
    """The log of the sum of exponentials of the scores in `mask` (shapes as for `current_score_moments`)."""
    return scores.masked_fill(~mask.unsqueeze(2), -torch.inf).logsumexp(dim=-1)


def logit(threshold: float) -> float:
    """`log(threshold / (1 - threshold))`: a local head's least `log A_local - log A_bulk`; infinite at both ends."""
    if 0.0 < threshold < 1.0:
        return math.log(threshold) - math.log1p(-threshold)
    return math.inf if threshold else -math.inf


def long_context(log_local: Tensor, log_bulk: Tensor, logit_threshold: float) -> Tensor:
    """True where a head needs the long context: `A_local / (A_local + A_bulk) < threshold` (eq. 2, eq. 7). The
    `logit_threshold` is its `logit`, exact at both ends: at 0 every head is local, at 1 none with a bulk is. Kernels
    have a copy of this line each, in `kernels/cpu/decide.h` and `kernels/triton/kernels.py`."""
    return log_local - log_bulk < logit_threshold


def group_decision(flags: Tensor, rule: str) -> Tensor:
    """One decision of those of the query heads of each KV head, bool `[batch, kv_heads, group, queries]` as `flags`. By
    "any" a group is long-context if any head of it is, as its keys are read anyway; by "head", the paper's rule, each
    query head is for itself."""
    return flags if rule == "head" else flags.any(dim=2, keepdim=True).expand_as(flags)
