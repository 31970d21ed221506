"""The CPU's kernels built before the first step that needs them."""

import torch

from . import choice, partial_attention
from .cpu import compiled


def build(
    dtype: torch.dtype,
    *,
    kv_heads: int,
    group: int,
    dim: int,
    value_dim: int,
    criterion: object,
    audited: bool,
    kernels: str,
) -> None:
    """Build the kernels that a decode step of one token with a long bulk calls, by the very checks of such a step.

    Args:
        dtype: of queries, keys and values.
        kv_heads, group: KV heads, and query heads of each.
        dim, value_dim: of a head's keys and values.
        criterion: as `Options.criterion`.
        kernels: as `choice.KINDS`.
        audited: whether some steps are audited: those read the bulk by `partial_attention`.

    Raises:
        RuntimeError: as `choice.decode_kernel`.
    """
    query = torch.zeros(1, kv_heads * group, 1, dim, dtype=dtype)
    keys, values = (torch.zeros(1, kv_heads, compiled.MIN_TOKENS, size, dtype=dtype) for size in (dim, value_dim))
    fused = choice.decode_kernel(query, keys, values, criterion, kernels)
    if fused is None or audited:
        partial_attention(query.view(1, kv_heads, group, dim), keys, values, scaling=1.0, kernels=kernels)
