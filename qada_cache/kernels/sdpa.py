"""Partial attention through the fused kernel torch ships for CPUs: one pass over the keys, no score matrix."""

import math

import torch
from torch import Tensor

from .reference import merge_partials

SPLIT_TOKENS = 2048  # keys of fewer tokens are not worth splitting among threads
SPLIT_QUERIES = 64  # more queries than these make enough work for all threads by themselves


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

    It gives a thread whole heads. When a decode step reads few of them, some threads would wait, so the keys are
    split as well, into parts that are merged by their log-sum-exps.
    """
    splits = 1 if causal else _splits(query, key)
    if splits == 1:
        return _attend(query, key, value, scaling=scaling, causal=causal)
    tokens = key.shape[2] // splits * splits  # fewer than `splits` are left over
    parts = (tensor[0, :, :tokens].unflatten(1, (splits, -1)) for tensor in (key, value))
    out, lse = _attend(query[0].unsqueeze(1).expand(-1, splits, -1, -1), *parts, scaling=scaling)
    weights = lse.softmax(dim=1)
    out, lse = (out * weights.unsqueeze(-1)).sum(dim=1)[None], lse.logsumexp(dim=1)[None]
    if tokens < key.shape[2]:
        rest = _attend(query, key[:, :, tokens:], value[:, :, tokens:], scaling=scaling)
        out, lse = merge_partials(out, lse, *rest)
    return out, lse


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=None, scale=scaling
    )
    return out.float(), lse


def _splits(query: Tensor, key: Tensor) -> int:
    """Into how many parts to split the keys of one row, so that every thread gets the same number of them."""
    if query.shape[0] != 1 or query.shape[2] > SPLIT_QUERIES or key.shape[2] < SPLIT_TOKENS:
        return 1
    threads = torch.get_num_threads()
    return threads // math.gcd(threads, query.shape[1])
