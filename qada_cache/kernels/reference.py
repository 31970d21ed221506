"""Partial attention in plain torch: the definition every faster path is tested against."""

import torch
from torch import Tensor


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention over one part of the keys, and its log-sum-exp for merging with other parts.

    Args:
        query: `[batch, heads, queries, dim]`, any floating dtype.
        key: `[batch, heads, tokens, dim]`.
        value: `[batch, heads, tokens, value_dim]`.
        scaling: multiplies the scores, `1/sqrt(dim)` in most models.
        mask: bool, broadcastable to `[batch, heads, queries, tokens]`, True where a query sees a token.
        causal: query `i` sees tokens `0..i`; needs `queries == tokens` and no mask.

    Returns:
        `out` `[batch, heads, queries, value_dim]` float32, the softmax average of the values of this part, and
        `lse` `[batch, heads, queries]` float32, the log of the sum of exponentials of the scores. A query that
        sees nothing gets `out = 0`, `lse = -inf`, the neutral element of `merge_partials`.
    """
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scaling
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return softmax_average(scores, value)


def softmax_average(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of `partial_attention` from float32 scores `[batch, heads, queries, tokens]`."""
    highest = scores.amax(dim=-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)  # a fully masked row must give 0, not nan
    weights = torch.exp(scores - highest)
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.matmul(weights, value.float()) / total.clamp_min(torch.finfo(torch.float32).tiny)
    return out, (torch.log(total) + highest).squeeze(-1)


def merge_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint parts, from the `(out, lse)` of each.

    Shapes as returned by `partial_attention`; either part may be empty (`lse = -inf`), or both.
    """
    highest = torch.maximum(lse_a, lse_b)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - highest), torch.exp(lse_b - highest)
    total = weight_a + weight_b
    share = (weight_b / total.clamp_min(torch.finfo(torch.float32).tiny)).unsqueeze(-1)
    return out_a + (out_b - out_a) * share, torch.log(total) + highest
