"""Partial attention through the fused kernel torch ships for CPUs: one pass over the keys, no score matrix."""

import torch
from torch import Tensor


def supports(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `partial_attention` of this module computes this call (shapes as there)."""
    return (
        query.device.type == "cpu"
        and mask is None
        and query.shape[-1] == value.shape[-1]
        and query.dtype == value.dtype
        and query.dtype in (torch.float32, torch.float16, torch.bfloat16)
    )


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference.partial_attention`, for the calls that `supports` admits.

    The kernel behind `scaled_dot_product_attention` already computes the log-sum-exp; only the operator below
    hands it out. It rounds `out` to the input dtype, as SDPA does.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=None, scale=scaling
    )
    return out.float(), lse
