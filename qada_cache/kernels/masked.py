"""Attention under a mask of queries and tokens, as a model's trained selection gives one: on CPUs by torch's fused
operator."""

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional

from ..said_once import warn_once
from . import Operator, find_operator, partial_attention, reference
from .reference import find_fault

logger = logging.getLogger(__name__)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float, softcap: float | None, kernels: str
) -> tuple[Tensor, Tensor]:
    """`partial_attention` under a mask bool `[queries, tokens]`, True for a token seen."""
    if query.device.type == "cpu" and softcap is None and key.shape[3] >= value.shape[3]:
        padded = functional.pad(value, (0, key.shape[3] - value.shape[3]))  # the operator needs `value_dim == dim`
        operator = find_operator(query, key, padded)
        if operator is not None and _takes_masks(operator, query.dtype, key.shape[3]):
            out, lse = _attend_masked(operator, query, key, padded, mask, scaling)
            return out[..., : value.shape[3]].float(), lse
    whole = mask[None, None]
    return partial_attention(query, key, value, scaling=scaling, mask=whole, softcap=softcap, kernels=kernels)


def _attend_masked(
    operator: Operator, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention by `operator` under `mask`: `out` in the query's dtype, `lse` float32. A query that sees no token gets
    0 and -inf."""
    bias = query.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    attend = getattr(torch.ops.aten, operator.name)
    out, lse = attend(query, key, value, *operator.given, False, attn_mask=bias, scale=scaling)
    blind = ~mask.any(dim=-1)
    return out.masked_fill(blind[:, None], 0.0), lse.masked_fill(blind, -torch.inf)


@functools.cache
def _takes_masks(operator: Operator, dtype: torch.dtype, dim: int) -> bool:
    """Whether one of torch's operators agrees with plain torch under a mask; a warning says so once if not."""
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = (70, 300, 300)  # queries, keys and values
    states = [torch.randn(1, 2, count, dim, generator=generator, dtype=torch.float32, device="cpu") for count in sizes]
    mask = torch.rand(70, 300, generator=generator, dtype=torch.float32, device="cpu") > 0.5
    mask[3], mask[4, 1:] = False, False
    query, key, value = (part.to(dtype) for part in states)
    out, lse = reference.partial_attention(query, key, value, scaling=2 / dim, mask=mask)
    wrong = find_fault(lambda: _attend_masked(operator, query, key, value, mask, 2 / dim), (out.to(dtype), lse))
    if wrong is not None:
        warn_once(
            logger, f"torch's {operator.name} is not used under masks for {dtype} and head dimension {dim}: {wrong}"
        )
    return wrong is None
