"""Kernels built before the first step that needs them."""

import torch

from ..sketch import Layout
from . import choice, partial_attention
from .cpu import compiled


def build(
    device: torch.device,
    dtype: torch.dtype,
    *,
    kv_heads: int,
    group: int,
    dim: int,
    value_dim: int,
    criterion: object,
    audited: bool,
    kernels: str,
    sketch_bits: float | None,
    pinned: bool,
) -> None:
    """Build the kernels that a decode step of one token with a long bulk calls, by the very checks of such a step.

    On a GPU "auto" compiles Triton's by trying them.

    Args:
        device: of queries.
        dtype: of queries, keys and values.
        kv_heads, group: KV heads, and query heads of each.
        dim, value_dim: of a head's keys and values.
        criterion: as `Options.criterion`.
        kernels: as `choice.KINDS`.
        audited: whether some steps are audited: those read the bulk by `partial_attention`.
        sketch_bits: of the sketch that tokens are selected by; None: all are read.
        pinned: whether the bulk lies in pinned host memory.

    Raises:
        RuntimeError: as `choice.decode_kernel`.
    """
    query = torch.zeros(1, kv_heads * group, 1, dim, dtype=dtype, device=device)
    keys, values = (
        torch.zeros(1, kv_heads, compiled.MIN_TOKENS, size, dtype=dtype, device="cpu" if pinned else device)
        for size in (dim, value_dim)
    )
    if pinned:
        keys, values = keys.pin_memory(), values.pin_memory()
    layout = Layout.if_any(dim, sketch_bits)
    fused = choice.decode_kernel(query, keys, values, criterion, kernels, layout=layout)
    if fused is None or audited:
        packed = query.view(1, kv_heads, group, dim)
        partial_attention(packed, keys.to(device), values.to(device), scaling=1.0, kernels=kernels)
