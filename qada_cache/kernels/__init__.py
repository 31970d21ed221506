"""Attention over parts of the keys: a reference, faster paths with the same signature, and the choice."""

import torch
from torch import Tensor

from . import cpu, reference, sdpa
from .reference import merge_partials, softmax_average

__all__ = ["merge_partials", "partial_attention", "softmax_average"]

# The path without a fused kernel takes a block of queries at a time, and of keys as many as it can hold in float32:
# scores, which it has up to four times over, keys and values. Few queries so take few launches, whatever the context.
QUERY_BLOCK, KEY_BLOCK = 512, 256  # at most; at least
HELD = 1 << 26  # numbers, 256 MiB


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    causal: bool = False,
    softcap: float | None = None,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`reference.partial_attention` in bounded memory: by our kernel or torch's where they serve, else block by block.

    Args and returns as `reference.partial_attention`, without a mask; `kernels` as `choice.KINDS`. `tokens` may be 0.
    """
    plain = softcap is None
    if plain and kernels != "torch" and not causal and cpu.supports(query, key, value):
        found = cpu.compiled_partial_attention(query, key, value, scaling=scaling)
        if found is not None:
            return found
    if plain and sdpa.supports(query, key, value):
        return sdpa.sdpa_partial_attention(query, key, value, scaling=scaling, causal=causal)
    out = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float32)
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
    at_once, block = _blocks(query, key, value, causal)
    for first in range(0, query.shape[-2], at_once):
        queries = slice(first, min(first + at_once, query.shape[-2]))
        seen = queries.stop if causal else key.shape[-2]
        for start in range(0, seen, block):
            keys = slice(start, min(start + block, seen))
            part = reference.partial_attention(
                query[..., queries, :],
                key[..., keys, :],
                value[..., keys, :],
                scaling=scaling,
                causal=causal and start == first,
                softcap=softcap,
            )
            out[..., queries, :], lse[..., queries] = merge_partials(out[..., queries, :], lse[..., queries], *part)
    return out, lse


def _blocks(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[int, int]:
    """How many queries and how many keys to take at once."""
    queries = max(1, min(QUERY_BLOCK, query.shape[-2]))
    if causal:  # a query's own token lies in a block on the diagonal
        return queries, queries
    numbers = query.shape[:-2].numel() * (4 * queries + key.shape[-1] + value.shape[-1])
    return queries, max(KEY_BLOCK, HELD // numbers)
