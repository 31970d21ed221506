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
        try:
            return cls(tensors["static_heads"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold a table of heads: {error}") from error


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


def gaussian_log_bulk(
    query: Tensor,
    mean: Tensor,
    covariance: Tensor,
    log_tokens: Tensor,
    *,
    kv_heads: int,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """The paper's estimate of `log A_bulk`, `log T_bulk + mu_s + sigma_s^2 / 2` (eq. 7), of each query.

    Without a cap the last two terms are `scaling q . (mu_K + scaling / 2 Sigma_K q)`: two batched products.

    Args:
        query: `[batch, heads, queries, dim]` float32; the result is `[batch, kv_heads, group, queries]`, contiguous.
        mean, covariance: float32 `[rows * kv_heads, 1, dim]` and `[rows * kv_heads, dim, dim]`, of `batch` rows or 1.
        scaling, softcap: as for `score_moments`.
        log_tokens: `log T_bulk` float32 `[batch or 1, 1, 1, queries]`, `-inf` without a bulk.
    """
    batch, heads, queries, dim = query.shape
    shape = batch, kv_heads, heads // kv_heads, queries
    if softcap is not None:
        given = mean.view(-1, kv_heads, dim), covariance.view(-1, kv_heads, dim, dim)
        grouped = query.reshape(batch, kv_heads, -1, dim)
        moments = score_moments(grouped, *given, scaling=scaling, softcap=softcap)
        score_mean, score_variance = (moment.view(shape) for moment in moments)
        return log_tokens + score_mean + 0.5 * score_variance
    moment_rows = mean.shape[0]  # `len` of a tensor is Python
    if alike := moment_rows < batch * kv_heads:  # the queries of all rows are multiplied at once: no moments are copied
        query = query.transpose(0, 1)
    grouped = query.reshape(moment_rows, -1, dim)
    # Not by `baddbmm`, which has its first argument copied for each query, and takes longer than both.
    along = torch.add(mean, torch.bmm(grouped, covariance), alpha=0.5 * scaling)
    scores = torch.bmm(along.view(-1, 1, dim), grouped.reshape(-1, dim, 1))
    scores = scores.view(*shape[1:3], batch, queries).permute(2, 0, 1, 3).contiguous() if alike else scores.view(shape)
    return torch.add(log_tokens, scores, alpha=scaling)


def log_mass(scores: Tensor, mask: Tensor) -> Tensor:
    """The log of the sum of exponentials of those scores `[batch, kv_heads, group, queries, columns]` that are in
    `mask`, bool `[batch or 1, 1, queries, columns]`."""
    return scores.masked_fill(~mask.unsqueeze(2), -torch.inf).logsumexp(dim=-1)


def logit(threshold: float) -> float:
    """`log(threshold / (1 - threshold))`: a local head's least `log A_local - log A_bulk`; infinite at both ends."""
    if 0.0 < threshold < 1.0:
        return math.log(threshold) - math.log1p(-threshold)
    return math.inf if threshold else -math.inf


def find_long_context(log_local: Tensor, log_bulk: Tensor, logit_threshold: float) -> Tensor:
    """True where a head needs the long context: `A_local / (A_local + A_bulk) < threshold` (eq. 2, eq. 7). The
    `logit_threshold` is its `logit`, exact at both ends: at 0 every head is local, at 1 none with a bulk is. An
    estimate that is no number says nothing, as infinity does. Kernels have a copy of this line each, in
    `kernels/cpu/decide.h` and `kernels/triton/kernels.py`."""
    return log_local - log_bulk.nan_to_num(torch.inf, posinf=torch.inf, neginf=-torch.inf) < logit_threshold


def decide_for_groups(flags: Tensor, rule: str) -> Tensor:
    """One decision for each KV head, from the `flags` of its query heads, bool `[batch, kv_heads, group, queries]`, and
    in that shape. Rule "any": a group is long-context if any of its heads is, as its keys are read anyway. Rule "head",
    the paper's: each query head decides for itself."""
    return flags if rule == "head" else flags.any(dim=2, keepdim=True).expand_as(flags)
