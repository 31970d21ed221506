"""How far attention may be off that was computed in the working dtype, by the errors that rounding makes of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALF_ULP = torch.finfo(torch.float32).eps / 2  # of numbers at the lower end of a binade, the largest rounding error
ROUNDING = 0.42 * HALF_ULP  # its root mean square: errors are even below half an ulp, and magnitudes in binades
EXP = 4 * HALF_ULP / math.sqrt(3)  # of a device's exp, which is good to 2 ulps
DEVIATIONS = 6.0  # of thousands of outputs, the worst is off by 4


def naive_attention(
    *, query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor, dtype: torch.dtype
) -> Tensor:
    """Attention plainly in `dtype`, as eager transformers models do it (only the softmax at least float32).

    `query [B, Hq, N, d]`, `keys [B, Hkv, T, d]`, `values [B, Hkv, T, dv]`, `mask` bool, broadcastable to
    `[B, Hq, N, T]`, True = attend -> `[B, Hq, N, dv]` in `dtype`; zeros where a query sees nothing.
    """
    group = query.shape[1] // keys.shape[1]
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = (query @ keys.transpose(-1, -2) * scaling).masked_fill(~mask, -math.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(dtype, torch.float32))
    return weights.nan_to_num(0.0).to(dtype) @ values


def _square_of_sums(a: Tensor, b: Tensor) -> Tensor:
    """The mean square of the error of `a @ b` if products are summed one by one, in whatever order.

    Half way a sum is at half of its end, and as far beside it as a walk of these steps that ends there: on average over
    the way, its square is a third of the end's and a sixth of all steps'. Every sum of `n` is rounded.
    """
    return ROUNDING**2 * a.shape[-1] * ((a @ b).square() / 3 + a.square() @ b.square() / 6)


def deviation(*, query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor) -> Tensor:
    """The root mean square error `[B, Hq, N, dv]` of attention in float32, from given inputs; as `naive_attention`.

    It grows with the square root of the dims, by which scores are off, and with that of the tokens, independently. Sums
    that a processor makes side by side are off by less.
    """
    group = query.shape[1] // keys.shape[1]
    query, keys, values = query.double(), keys.double(), values.double()
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = (query @ keys.mT * scaling).masked_fill(~mask, -math.inf)
    below = (scores.amax(dim=-1, keepdim=True) - scores).masked_fill(~mask, 0.0)
    # Of a weight relative to itself: its score, what this is below the highest, in its own units and those of exp, exp.
    off = _square_of_sums(query * scaling, keys.mT) + 2 * (ROUNDING * below).square() + EXP**2
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    out, off = weights @ values, weights.square() * off.masked_fill(~mask, 0.0)
    # A heavier token pulls the output towards its value, as far as this is from it.
    pulled = off @ values.square() - 2 * out * (off @ values) + out.square() * off.sum(dim=-1, keepdim=True)
    divided = (ROUNDING * out).square() * (2 + weights.shape[-1] / 3)  # by a sum of weights
    return (pulled.clamp_min(0.0) + _square_of_sums(weights, values) + divided).sqrt()


def error_budget(
    *, reference64: Tensor, lowp: Tensor, deviations: Tensor, scale: float = 2.0, ulps: float = 4.0
) -> float:
    """The largest absolute error to allow: `scale` times that of the naive answer `lowp`, plus a few ulps, or if more
    `DEVIATIONS` of `deviation`.

    `lowp` is the same computation as the float64 `reference64` by `naive_attention`, in the working dtype; an
    ulp is its epsilon times the largest output. In float32, where a CPU's sums of many parts are nearer than a GPU's, a
    naive answer says too little.
    """
    naive_error = float((lowp.to(torch.float64) - reference64).abs().max())
    naive = scale * naive_error + ulps * torch.finfo(lowp.dtype).eps * float(reference64.abs().max())
    summed_in = torch.finfo(torch.promote_types(lowp.dtype, torch.float32)).eps / 2
    return max(naive, DEVIATIONS * float(deviations.max()) * summed_in / HALF_ULP)
