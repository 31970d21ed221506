"""Which tokens of a sketched bulk a KV head reads, and what the others are worth."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..criterion import soft_cap
from .codec import Sketch, estimate_scores, unpack_slopes

UNRELIABLE, NOISE_SHARE = 4.0, 0.15  # nats, and a share: both have to be exceeded, see `find_unreliable`
HOPELESS = 4.0  # times `UNRELIABLE`, whatever the share
# Of the estimated attention to unread tokens, as much counts: estimates err, and the unread are those that seem light.
UNREAD_WEIGHT = 0.9
FLAT = 1e-6  # a lower variance of scores is rounding: values then do not follow them


@dataclass(eq=False)
class Selection:
    """The tokens that each query of a KV head reads, and what stands for the rest; `[group, queries]` but for
    `tokens`."""

    tokens: Tensor  # bool `[queries, tokens]`, the tokens that are read
    log_unread: Tensor  # log of the estimated sum of exponentials of the scores of all others, `-inf` without any
    tilt: Tensor  # how far the unread tokens' values lie from the mean value, in units of `scaling * slopes q`


def find_unreliable(query: Tensor, sketch: Sketch, *, scaling: float) -> Tensor:
    """The queries whose estimates are unreliable, so that they read all: bool `[batch, kv_heads, queries]`.

    If scores lie far apart few tokens stand out, and a high estimate may be nothing but its error. The error's variance
    is `scaling^2 sum q_i^2 noise_i`, on average over tokens. A query is unreliable if half of it is above `UNRELIABLE`,
    and it is above `NOISE_SHARE` of the scores' own variance, `scaling^2 sum q_i^2 variances_i`. That share says
    nothing of the few highest scores. So a query is unreliable in any case if half of it is above `HOPELESS *
    UNRELIABLE`, a deviation of 5.7 nats: errors alone then reach from a token that gets all attention to the cut below
    which none is read. NaN, as of scores whose squares exceed float32, is unreliable. The result for rows that are in
    no sketch means nothing.
    """
    square = query.float().square()
    noise, variance = (torch.matmul(square, each[..., None])[..., 0] for each in (sketch.noise, sketch.variances))
    half = 0.5 * scaling**2 * noise
    return ~((half <= UNRELIABLE) | ((noise <= NOISE_SHARE * variance) & (half <= HOPELESS * UNRELIABLE)))


def select_tokens(
    query: Tensor,  # `[group, queries, dim]`
    sketch: Sketch,  # one head's
    length: int,  # tokens of its bulk
    *,
    log_buffer: Tensor,  # `log A_buffer`: float32 `[group, queries]`, log-sum-exp of scores over the near buffer
    bulk_tokens: Tensor,  # `T_bulk`: int64 `[queries]`
    flags: Tensor,  # bool `[group, queries]`, the long-context heads
    scaling: float,  # as for `reference.partial_attention`
    token_threshold: float,  # above 0
    softcap: float | None = None,  # as for `reference.partial_attention`
) -> Selection:
    """The tokens of a KV head's bulk that are read for each query: any that one of its long-context heads asks for.

    A head asks for what gets at least `token_threshold` times as much of its attention as if the bulk got all of it,
    evenly: `exp(s_t) / (A_buffer + sum_t exp(s_t)) >= token_threshold / T_bulk`, by estimates of the scores `s_t`.

    Unread tokens are those of low scores. Values follow scores along the line of regression,
    `mean_value + Cov(v, s) (s - mean(s)) / Var(s)` with `Cov(v, s) = scaling slopes q`, and unread tokens have the mean
    score `sum exp(s) s / sum exp(s)`.
    """
    uncapped = estimate_scores(query.flatten(0, 1).float(), sketch, length, scaling=scaling)
    uncapped = uncapped.unflatten(0, query.shape[:2])  # which values follow
    scores = soft_cap(uncapped, softcap)
    log_all = torch.logaddexp(log_buffer, scores.logsumexp(dim=-1))
    score_cut = log_all + math.log(token_threshold) - torch.log(bulk_tokens.float())
    tokens = ((scores >= score_cut.unsqueeze(-1)) & flags.unsqueeze(-1)).any(dim=0)
    unread = scores.masked_fill(tokens, -torch.inf)
    variance, mean = torch.var_mean(uncapped, dim=-1, correction=0)
    lifted = (unread.softmax(dim=-1).masked_fill(tokens, 0.0) * (uncapped - mean.unsqueeze(-1))).sum(dim=-1)
    tilt = torch.where((variance > FLAT) & ~tokens.all(dim=-1), lifted / variance, 0.0)
    return Selection(tokens, unread.logsumexp(dim=-1) + math.log(UNREAD_WEIGHT), tilt)


def estimate_unread(query: Tensor, sketch: Sketch, tilt: Tensor, *, scaling: float) -> Tensor:
    """The estimated mean value of one head's unread tokens, float32 `[..., value_dim]`, for a query `[..., dim]` and
    the tilt `[...]` of its `Selection`."""
    along = torch.matmul(query.float() * sketch.slope_units, unpack_slopes(sketch.slopes).float().mT)
    return sketch.mean_value + scaling * tilt.unsqueeze(-1) * along
