"""Which implementation takes tokens into means and covariances: Triton's kernels on a GPU, once tried there; a C++
kernel on a CPU; else torch."""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ..said_once import warn_once
from .choice import AUTO_DEVICES, MAX_DIM, explain_unsupported
from .cpu.correlating import take_in_compiled, takes_tokens
from .reference import CompileAhead, find_fault

logger = logging.getLogger(__name__)

MULTIPLE = 8  # Triton's kernels take a multiple of these channels
ROWS, HEADS, TOKENS = 1, 2, (530, 30)  # of a trial of two calls, with so many tokens each


def take_in(
    count: int, means: tuple[Tensor, Tensor], covariance: Tensor, left: Tensor, right: Tensor, kernels: str = "auto"
) -> None:
    """As `take_in_by_torch`, computed by a kernel if one can; `kernels` is one of `choice.KINDS`."""
    compute: Callable | None = None
    if kernels != "torch" and left.device.type in AUTO_DEVICES and left.dim() == 4:
        compute = _find_kernel(left.device, left.dtype, right.dtype, left.shape[3], right.shape[3])
    elif kernels != "torch" and takes_tokens(left, right):
        compute = take_in_compiled
    (compute or take_in_by_torch)(count, means, covariance, left, right)


def take_in_by_torch(count: int, means: tuple[Tensor, Tensor], covariance: Tensor, left: Tensor, right: Tensor) -> None:
    """Merge tokens' vectors `left` `[..., tokens, n]` and `right` `[..., tokens, m]`, any dtype, into the `means` of
    `count` others, float32 `[..., n]` and `[..., m]`, and into their `covariance` `[..., n, m]`, contiguous, in place.

    Chan's merge of centred blocks is stable for large means, and independent of the split, to rounding. With a `count`
    of 0, means and covariance are not read. If `left` is `right`, there may be one mean in both places.
    """
    alike, tokens = left is right, left.shape[-2]
    total = count + tokens
    new_means, centred = list[Tensor](), list[Tensor]()
    for part in (left,) if alike else (left, right):
        wide = part.float()
        mean = wide.mean(dim=-2)
        new_means.append(mean)
        # In place where `wide` is a copy: new memory takes longer than the rest.
        centred.append(wide - mean.unsqueeze(-2) if wide is part else wide.sub_(mean.unsqueeze(-2)))
    product = covariance.flatten(0, -3)
    product.baddbmm_(centred[0].mT.flatten(0, -3), centred[-1].flatten(0, -3), beta=count / total, alpha=1 / total)
    held = means[: len(new_means)]
    if not count:
        for mean, new in zip(held, new_means, strict=True):
            mean.copy_(new)
        return
    off = [(new - mean).flatten(0, -2) for mean, new in zip(held, new_means, strict=True)]
    product.baddbmm_(off[0].unsqueeze(-1), off[-1].unsqueeze(-2), alpha=count / total * (tokens / total))
    for mean, new in zip(held, new_means, strict=True):
        mean.lerp_(new, tokens / total)


@functools.cache
def _find_kernel(
    device: torch.device, left_dtype: torch.dtype, right_dtype: torch.dtype, left_dim: int, right_dim: int
) -> Callable | None:
    """Triton's `take_in` for such tensors, once tried; None if torch has to compute. The trial waits for the device."""
    dims, dtypes = (left_dim, right_dim), (left_dtype, right_dtype)
    like = [torch.empty(1, 1, 1, dim, dtype=dtype, device=device) for dim, dtype in zip(dims, dtypes, strict=True)]
    if any(dim % MULTIPLE or dim > MAX_DIM for dim in dims):
        return None
    if any(explain_unsupported(each, each, each, None) is not None for each in like):
        return None  # decoding tokens needs the same, and warns of it
    from .triton.correlating import take_in as take_in_by_triton
    from .triton.launching import compile_ahead

    if (fault := find_correlating_fault(take_in_by_triton, device, dtypes, dims, compile_ahead)) is None:
        return take_in_by_triton
    warn_once(logger, f"covariances are computed on {device} by torch's operations, not by Triton's kernels: {fault}")
    return None


def find_correlating_fault(
    kernel: Callable,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    dims: tuple[int, int],
    compile_ahead: CompileAhead | None = None,
) -> str | None:
    """The fault of `kernel`, a `take_in`, on this device, as `reference.find_fault` says it, which has `compile_ahead`.
    It is tried on random tokens: on keys alone, and on values with keys."""
    generator = torch.Generator("cpu").manual_seed(0)
    left, right = (
        (torch.randn(ROWS, HEADS, sum(TOKENS), dim, generator=generator, dtype=torch.float32, device="cpu") + 3).to(
            dtype
        )
        for dim, dtype in zip(dims, dtypes, strict=True)
    )

    def compute(take: Callable, target: torch.device) -> tuple[Tensor, ...]:
        values, keys = left.to(target), right.to(target)
        means = [torch.empty(ROWS, HEADS, dim, dtype=torch.float32, device=target) for dim in (*dims, dims[1])]
        shapes = dims, (dims[1], dims[1])
        covariances = [torch.empty(ROWS, HEADS, *shape, dtype=torch.float32, device=target) for shape in shapes]
        for moment in (*means, *covariances):
            moment.fill_(torch.nan)  # the first call, with a count of 0, must not read them
        count = 0
        for new_values, new_keys in zip(values.split(TOKENS, dim=2), keys.split(TOKENS, dim=2), strict=True):
            take(count, (means[0], means[1]), covariances[0], new_values, new_keys)
            take(count, (means[2], means[2]), covariances[1], new_keys, new_keys)
            count += new_keys.shape[2]
        return tuple(part.cpu() for part in (*means, *covariances))

    expected = compute(take_in_by_torch, torch.device("cpu"))
    return find_fault(lambda: compute(kernel, device), expected, compile_ahead=compile_ahead)
