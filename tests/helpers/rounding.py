"""The error that tests allow attention in the working dtype, from the errors that rounding can make in it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALF_ULP = torch.finfo(torch.float32).eps / 2  # largest relative rounding error of float32: just above a power of two
ROUNDING = 0.42 * HALF_ULP  # its root mean square, if errors are uniform below half an ulp, and numbers in a binade
EXP = 4 * HALF_ULP / math.sqrt(3)  # root mean square error of a device's exp, which is correct to 2 ulps
DEVIATIONS = 6.0  # allowed; the worst of thousands of outputs is off by 4


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
    """The mean square of the error of `a @ b` if products are summed one by one, in any order.

    Each of the `n` partial sums is rounded, in proportion to its size. A partial sum is like a random walk of these
    steps that ends at the whole sum. Its mean square over the way is a third of the whole sum's square, plus a sixth of
    the sum of the steps' squares.
    """
    return ROUNDING**2 * a.shape[-1] * ((a @ b).square() / 3 + a.square() @ b.square() / 6)


def deviation(*, query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor) -> Tensor:
    """The root mean square error `[B, Hq, N, dv]` of attention in float32; arguments as for `naive_attention`.

    It grows with the square root of the dims, through errors of scores, and independently with that of the tokens. A
    processor that adds several sums side by side makes smaller errors.
    """
    group = query.shape[1] // keys.shape[1]
    query, keys, values = query.double(), keys.double(), values.double()
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = (query @ keys.mT * scaling).masked_fill(~mask, -math.inf)
    below = (scores.amax(dim=-1, keepdim=True) - scores).masked_fill(~mask, 0.0)
    # Squared relative error of a weight: of its score; of the difference to the highest score, rounded twice; of exp.
    off = _square_of_sums(query * scaling, keys.mT) + 2 * (ROUNDING * below).square() + EXP**2
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    out, off = weights @ values, weights.square() * off.masked_fill(~mask, 0.0)
    # An error of a token's weight moves the output in proportion to the distance of the token's value from it.
    pulled = off @ values.square() - 2 * out * (off @ values) + out.square() * off.sum(dim=-1, keepdim=True)
    divided = (ROUNDING * out).square() * (2 + weights.shape[-1] / 3)  # error of the division by the sum of weights
    return (pulled.clamp_min(0.0) + _square_of_sums(weights, values) + divided).sqrt()


def error_budget(
    *, reference64: Tensor, lowp: Tensor, deviations: Tensor, scale: float = 2.0, ulps: float = 4.0
) -> float:
    """The largest absolute error to allow: `scale` times the error of the naive answer `lowp`, plus a few `ulps`, or if
    that is more, `DEVIATIONS` times the largest of `deviations`.

    `lowp` is `naive_attention` in the working dtype, of which `reference64` is the float64 result. An ulp is that
    dtype's epsilon times the largest output. In float32 `lowp` alone would allow too little: a CPU adds many partial
    sums side by side, with smaller errors than a GPU.
    """
    naive_error = float((lowp.to(torch.float64) - reference64).abs().max())
    naive = scale * naive_error + ulps * torch.finfo(lowp.dtype).eps * float(reference64.abs().max())
    summed_in = torch.finfo(torch.promote_types(lowp.dtype, torch.float32)).eps / 2
    return max(naive, DEVIATIONS * float(deviations.max()) * summed_in / HALF_ULP)
