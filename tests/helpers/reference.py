"""Float64 reference of query-adaptive attention (arXiv 2502.09647): slow, plain, straight from the equations.

One row, one head and one query at a time. It shares no code with the package, so that the two can disagree.
Layout `[batch, heads, tokens, dim]`; a row's *real* tokens are those that are not padding, and every
position below is an index into them, from 0. Query head `h` reads key-value head `h // (Hq // Hkv)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SINK_TOKENS = 16
LOCAL_TOKENS = 128
Criterion = str | Tensor  # "gaussian", "oracle", "dense", "local", or static: bool [Hq], True = long-context
Moments = tuple[Tensor, Tensor]  # mean [Hkv, d], covariance [Hkv, d, d]


def local_indices(position: int, *, sink_tokens: int = SINK_TOKENS, local_tokens: int = LOCAL_TOKENS) -> set[int]:
    """The tokens that the query at real index `position` sees locally: the set I of section 2.

    They are the first `sink_tokens` and the last `local_tokens - sink_tokens` up to and including
    `position`; everything when there are at most `local_tokens` tokens.
    """
    seen = range(position + 1)
    window = local_tokens - sink_tokens
    return {token for token in seen if token < sink_tokens or token > position - window}


def bulk_indices(position: int, *, sink_tokens: int = SINK_TOKENS, local_tokens: int = LOCAL_TOKENS) -> list[int]:
    """Tokens up to `position` outside `local_indices`, in order; T_bulk = max(0, position + 1 - T_local)."""
    local = local_indices(position, sink_tokens=sink_tokens, local_tokens=local_tokens)
    return [token for token in range(position + 1) if token not in local]


def key_moments(*, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `[d]`, population covariance `[d, d]` of `keys [T, d]`; float64, two passes; zeros for T = 0."""
    keys = keys.to(torch.float64)
    tokens, dim = keys.shape
    if tokens == 0:
        return torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dim, dtype=torch.float64)
    mean = keys.sum(dim=0) / tokens
    centered = keys - mean
    return mean, centered.T @ centered / tokens


def rows_from_padding(*, tensor: Tensor, valid: Tensor | None = None) -> list[Tensor]:
    """Each row's real tokens: `tensor [B, H, T, d]`, bool `valid [B, T]` -> B float64 `[H, T_row, d]`."""
    if valid is None:
        return [row.to(torch.float64) for row in tensor]
    return [row[:, keep].to(torch.float64) for row, keep in zip(tensor, valid, strict=True)]


def gaussian_log_bulk(*, query: Tensor, mean: Tensor, covariance: Tensor, bulk_tokens: int, scaling: float) -> float:
    """log of the estimated A_bulk, log T_bulk + mu_s + sigma_s^2 / 2 (eq. 7); -inf without a bulk.

    `query [d]`, `mean [d]`, `covariance [d, d]`: mu_s = scaling q.mean, sigma_s^2 = scaling^2 q covariance q.
    """
    if bulk_tokens == 0:
        return -math.inf
    query, mean, covariance = (tensor.to(torch.float64) for tensor in (query, mean, covariance))
    score_mean = scaling * float(query @ mean)
    score_variance = scaling**2 * float(query @ covariance @ query)
    return math.log(bulk_tokens) + score_mean + score_variance / 2


def rotary_matrix(*, dim: int, frequencies: tuple[float, ...], layout: str, position: int) -> Tensor:
    """Float64 `[dim, dim]`: turns a key of position 0 to `position`, each pair of dims by an angle of its own."""
    matrix = torch.eye(dim, dtype=torch.float64)
    for pair, frequency in enumerate(frequencies):
        one, other = (pair, pair + len(frequencies)) if layout == "half" else (2 * pair, 2 * pair + 1)
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        matrix[one, one], matrix[one, other], matrix[other, one], matrix[other, other] = cos, -sin, sin, cos
    return matrix


def averaged_moments(*, mean: Tensor, covariance: Tensor, turns: list[Tensor]) -> Moments:
    """Moments `[heads, d]`, `[heads, d, d]` of keys with these moments after every key is turned by every matrix of
    `turns`."""
    second = covariance.double() + mean.double()[:, :, None] * mean.double()[:, None, :]
    mean = sum(mean.double() @ turn.T for turn in turns) / len(turns)
    second = sum(turn @ second @ turn.T for turn in turns) / len(turns)
    return mean, second - mean[:, :, None] * mean[:, None, :]


def log_mass(*, query: Tensor, keys: Tensor, scaling: float) -> float:
    """log A = log sum_i exp(scaling q.k_i) of `query [d]` over `keys [T, d]`; -inf over no keys."""
    scores = scaling * (keys.to(torch.float64) @ query.to(torch.float64))
    return float(torch.logsumexp(scores, dim=0)) if len(scores) else -math.inf


def log_local_fraction(*, log_local: float, log_bulk: float) -> float:
    """log of A_local / (A_local + A_bulk), the left side of eq. 2 and eq. 7; 0 without a bulk (-inf)."""
    if log_bulk == math.inf:  # no moments to estimate with
        return -math.inf
    larger, smaller = max(log_local, log_bulk), min(log_local, log_bulk)
    return log_local - (larger + math.log1p(math.exp(smaller - larger)))


def is_local(*, log_local: float, log_bulk: float, threshold: float) -> bool:
    """A_local / (A_local + A_bulk) >= threshold (eq. 2, eq. 7).

    Edges: without a bulk (`log_bulk` -inf) always local; threshold 0 always local, whatever the bulk;
    threshold 1 never local once there is a bulk, also where rounding makes the fraction 1.
    """
    if log_bulk == -math.inf or threshold <= 0:
        return True
    if threshold >= 1:
        return False
    return log_local_fraction(log_local=log_local, log_bulk=log_bulk) >= math.log(threshold)


def log_masses(
    *,
    query: Tensor,
    keys: Tensor,
    position: int,
    scaling: float,
    criterion: str,
    moments: Callable[[int], Moments] | None = None,
    current: bool | None = None,
    frozen_count: int | None = None,
    stored: int | None = None,
    sink_tokens: int = SINK_TOKENS,
    local_tokens: int = LOCAL_TOKENS,
) -> list[tuple[float, float]]:
    """(log A_local, log A_bulk) of each query head, which "oracle" (eq. 2) and "gaussian" (eq. 7) compare.

    `query [Hq, d]`, `keys [Hkv, T, d]` with T > `position`. "gaussian" takes `moments`, if given: another prompt's, by
    the number of bulk tokens. It takes this prompt's if `current`, which is the default without `moments`. These are of
    the first `frozen_count` bulk tokens, if given, else of this query's own bulk. The larger of two log A_bulk counts.
    A `frozen_count` of 0 gives no estimate. Without any estimate log A_bulk is +inf, so the head is long-context. It is
    so, too, if this prompt's moments count and more than a quarter of the bulk lies behind its first `stored` tokens.
    """
    local = sorted(local_indices(position, sink_tokens=sink_tokens, local_tokens=local_tokens))
    bulk = bulk_indices(position, sink_tokens=sink_tokens, local_tokens=local_tokens)
    group, own = len(query) // len(keys), moments is None if current is None else current
    masses = []
    for head, head_keys in enumerate(keys):
        known = []
        if criterion == "gaussian":
            if moments is not None:
                known.append([moment[head] for moment in moments(len(bulk))])
            if own and not (bulk and frozen_count == 0):
                known.append(key_moments(keys=head_keys[bulk[:frozen_count]]))
        for head_query in query[head * group : (head + 1) * group]:
            log_local = log_mass(query=head_query, keys=head_keys[local], scaling=scaling)
            if criterion == "oracle":
                log_bulk = log_mass(query=head_query, keys=head_keys[bulk], scaling=scaling)
            elif criterion != "gaussian":
                raise ValueError(f"criterion {criterion!r} compares no masses")
            else:
                estimates = [
                    gaussian_log_bulk(
                        query=head_query, mean=mean, covariance=covariance, bulk_tokens=len(bulk), scaling=scaling
                    )
                    for mean, covariance in known
                ]
                log_bulk = max(estimates, default=math.inf)
                if own and stored is not None and 4 * (len(bulk) - stored) > len(bulk):
                    log_bulk = math.inf
            masses.append((log_local, log_bulk))
    return masses


def decide(
    *,
    query: Tensor,
    keys: Tensor,
    position: int,
    scaling: float,
    criterion: Criterion = "gaussian",
    threshold: float = 0.6,
    group_rule: str = "head",
    local_tokens: int = LOCAL_TOKENS,
    **options: Any,
) -> Tensor:
    """Bool `[Hq]`, True = local, for one query `[Hq, d]` at real index `position` over `keys [Hkv, T, d]`.

    "dense" is never local and "local" always; a bool tensor `[Hq]` is the static mask of long-context heads.
    `options` are `moments`, `current`, `frozen_count`, `stored` and `sink_tokens` of `log_masses`. Without a bulk every
    head is local, whatever the criterion. `group_rule` "head": each query head decides for itself; "any": the heads of
    a key-value head are long-context if one of them would be. "dense" and "local" ignore the rule.
    """
    if group_rule not in ("any", "head"):
        raise ValueError(f"group_rule must be 'any' or 'head', not {group_rule!r}")
    if position + 1 <= local_tokens:
        return torch.ones(len(query), dtype=torch.bool)
    if isinstance(criterion, str) and criterion in ("dense", "local"):
        return torch.full((len(query),), criterion == "local")
    if isinstance(criterion, Tensor):
        alone = ~criterion
    else:
        options |= {"query": query, "keys": keys, "position": position, "scaling": scaling}
        masses = log_masses(criterion=criterion, local_tokens=local_tokens, **options)
        alone = torch.tensor([is_local(log_local=a, log_bulk=b, threshold=threshold) for a, b in masses])
    group = len(query) // len(keys)
    if group_rule == "head":
        return alone
    return alone.reshape(-1, group).all(dim=1).repeat_interleave(group)


def visible_tokens(
    *,
    local: Tensor,
    position: int,
    tokens: int,
    sink_tokens: int = SINK_TOKENS,
    local_tokens: int = LOCAL_TOKENS,
) -> Tensor:
    """Bool `[Hq, tokens]`: the tokens that each head attends to, given its flag in `local` bool `[Hq]`."""
    visible = torch.zeros(len(local), tokens, dtype=torch.bool)
    seen_locally = sorted(local_indices(position, sink_tokens=sink_tokens, local_tokens=local_tokens))
    for head, head_is_local in enumerate(local.tolist()):
        if head_is_local:
            visible[head, seen_locally] = True
        else:
            visible[head, : position + 1] = True
    return visible


def attend(
    *, query: Tensor, keys: Tensor, values: Tensor, position: int, local: Tensor, scaling: float, **sizes: int
) -> Tensor:
    """Softmax attention (eq. 1) of one query in float64: `[Hq, dv]`.

    `query [Hq, d]`, `keys [Hkv, T, d]`, `values [Hkv, T, dv]`. Heads flagged in `local` bool `[Hq]` attend to
    `local_indices(position)`, the others to everything up to and including `position`. `sizes` are
    `sink_tokens` and `local_tokens`.
    """
    visible = visible_tokens(local=local, position=position, tokens=keys.shape[1], **sizes)
    group = len(query) // len(keys)
    outputs = []
    for head, head_query in enumerate(query.to(torch.float64)):
        head_keys = keys[head // group, visible[head]].to(torch.float64)
        head_values = values[head // group, visible[head]].to(torch.float64)
        outputs.append(torch.softmax(scaling * (head_keys @ head_query), dim=0) @ head_values)
    return torch.stack(outputs)


def qada_attention(
    *,
    queries: Tensor,
    query_positions: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    scaling: float,
    exact: bool = False,
    moments_of: Callable[[int], dict[str, int]] = lambda row: {},
    sink_tokens: int = SINK_TOKENS,
    local_tokens: int = LOCAL_TOKENS,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of a batch: outputs float64 `[B, Hq, N, dv]`, bool local `[B, Hq, N]` and has_bulk `[B, N]`.

    `queries [B, Hq, N, d]`; `query_positions [B, N]` each query's real index in its row, -1 for padding;
    `keys`, `values`: per row `[Hkv, T_row, d]`, every real token so far; `options` those of `decide`. Every
    query is causal. `moments_of` gives the `frozen_count` and `stored` of a row's decisions. With `exact` nothing is
    decided: full causal attention, every flag False. At padding queries: zeros and False.
    """
    batch, heads, count, _ = queries.shape
    outputs = torch.zeros(batch, heads, count, values[0].shape[-1], dtype=torch.float64)
    local_flags = torch.zeros(batch, heads, count, dtype=torch.bool)
    sizes = {"sink_tokens": sink_tokens, "local_tokens": local_tokens}
    for row in range(batch):
        told = {} if exact else moments_of(row)
        for index, position in enumerate(query_positions[row].tolist()):
            if position < 0:
                continue
            one = {"query": queries[row, :, index], "keys": keys[row], "position": position, **sizes}
            if not exact:
                local_flags[row, :, index] = decide(**one, scaling=scaling, **told, **options)
            local = local_flags[row, :, index]
            outputs[row, :, index] = attend(**one, scaling=scaling, values=values[row], local=local)
    return outputs, local_flags, query_positions >= local_tokens
