"""Partial attention in plain torch: the definition of every faster path, and its trial before its first use here."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..criterion import soft_cap

# Of what is averaged: a few roundings of a softmax average, far below the change by a missing part.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CompileAhead = Callable[[Callable[[], object]], None]  # `triton.launching.compile_ahead`


def partial_attention(
    query: Tensor,  # `[batch, heads, queries, dim]`, any floating dtype
    key: Tensor,  # `[batch, heads, tokens, dim]`
    value: Tensor,  # likewise, of `value_dim`
    *,
    scaling: float,  # multiplies the scores, `1/sqrt(dim)` in most models
    mask: Tensor | None = None,  # bool, broadcastable to `[batch, heads, queries, tokens]`, True for a token seen
    causal: bool = False,  # query `i` sees tokens `0..i`; needs `queries == tokens` and no mask
    softcap: float | None = None,  # for `criterion.soft_cap`; None: scores as they are
) -> tuple[Tensor, Tensor]:
    """Attention over one part of the keys, and its log-sum-exp for merging with other parts.

    Returns `out` `[batch, heads, queries, value_dim]` float32, the softmax average of the values of this part, and
    `lse` `[batch, heads, queries]` float32, the log of the sum of exponentials of the scores. A query that sees nothing
    gets `out = 0`, `lse = -inf`, the neutral element of `merge_partials`.
    """
    scores = soft_cap(torch.matmul(query.float(), key.float().transpose(-1, -2)) * scaling, softcap)
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
    """Attention over the union of two disjoint parts, from the `(out, lse)` of each, with the shapes of those that
    `partial_attention` returns; either part may be empty (`lse = -inf`), or both."""
    highest = torch.maximum(lse_a, lse_b)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - highest), torch.exp(lse_b - highest)
    total = weight_a + weight_b
    share = (weight_b / total.clamp_min(torch.finfo(torch.float32).tiny)).unsqueeze(-1)
    return out_a + (out_b - out_a) * share, torch.log(total) + highest


def suspend_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Autocast switched off on devices of this type, which would lower float32 products: scores and moments."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def find_fault(
    compute: Callable[[], tuple[Tensor, ...]],
    expected: tuple[Tensor, ...],
    *,
    size: float = 1.0,
    compile_ahead: CompileAhead | None = None,
) -> str | None:
    """A kernel's fault, in words for a warning; None without one. OutOfMemoryError, if `compute` raises it.

    `compute` has it compute, and returns the results on the host; `compile_ahead`, if given, is called with it first.
    Floating values have to be within `TOLERANCE` of the `expected` ones' dtype, relative to them and to the `size` of
    what is averaged; others equal, and shapes and dtypes the same.
    """
    try:
        if compile_ahead is not None:
            compile_ahead(compute)
        found = compute()
    except torch.OutOfMemoryError:  # which says nothing of the kernel
        raise
    except Exception as error:  # whatever a compiler, a driver or an operator of another release may raise
        return f"it raised {type(error).__name__}: {(str(error).strip().splitlines() or ['no word'])[0]}"
    for one, other in zip(found, expected, strict=True):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"it gave {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
        if not other.is_floating_point():
            if not torch.equal(one, other):
                return "its decisions or counts are not those of the same computation in plain torch"
        elif not torch.allclose(one, other, rtol=TOLERANCE[other.dtype], atol=TOLERANCE[other.dtype] * size):
            worst = float((one.double() - other.double()).abs().max())
            return f"it is off by {worst:.2g} from the same computation in plain torch"
    return None


def has_gradients(*parts: Tensor | None) -> bool:
    """Whether torch records gradients of what is computed of these."""
    return torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts)
