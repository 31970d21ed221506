"""Attention to latents by a kernel of Triton's, which is tried before it serves, or by torch's operations."""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ..said_once import warn_once
from . import partial_attention
from .choice import AUTO_DEVICES, MAX_RANK, MAX_SHARED, explain_unsupported
from .reference import find_fault

logger = logging.getLogger(__name__)
TRIED_TOKENS, TRIED_QUERIES = 700, 40


def attend_to_latents(
    query: Tensor, latents: Tensor, rank: int, *, scaling: float, kernels: str
) -> tuple[Tensor, Tensor]:
    """`partial_attention` of queries `[batch, 1, queries, dim]` to latents `[batch, 1, tokens, dim]`, whose first
    `rank` channels are the values: `out` float32 `[batch, 1, queries, rank]` and `lse`."""
    if (kernel := find_latent_attention(query, latents, rank, kernels)) is not None:
        return kernel(query, latents, rank, scaling=scaling)
    # The rotary channels of the values are computed and left out: so one tensor is keys and values.
    out, lse = partial_attention(query, latents, latents, scaling=scaling, kernels=kernels)
    return out[..., :rank], lse


def find_latent_attention(query: Tensor, latents: Tensor, rank: int, kernels: str) -> Callable[..., tuple] | None:
    """`triton.latents.attend_latents` where it computes such a call, else None; `kernels` is one of `choice.KINDS`."""
    if kernels == "torch" or (kernels == "auto" and query.device.type not in AUTO_DEVICES):
        return None
    dim = query.shape[3]
    packed = latents.stride()[2:] == (dim, 1) and latents.stride(0) % dim == 0
    if not packed or (torch.is_grad_enabled() and query.requires_grad):
        return None
    if (reason := explain_unsupported(query, latents, latents, None, most=MAX_SHARED)) is None:
        if rank > MAX_RANK or (query.dtype.itemsize > 2 and query.device.type == "cuda"):
            reason = f"the kernel has 16-bit latents of up to {MAX_RANK} channels, not {query.dtype} ones of {rank}"
        else:
            reason = _find_latent_fault(query.device, query.dtype, dim, rank)
        if reason is None:
            from .triton.latents import attend_latents

            return attend_latents
    warn_once(logger, f"latents are read on {query.device} by torch's operations, not by Triton's kernel: {reason}")
    return None


@functools.cache
def _find_latent_fault(device: torch.device, dtype: torch.dtype, dim: int, rank: int) -> str | None:
    """As `decode_trial.find_decode_fault`, of two rows of a buffer, which is nan behind their tokens."""
    from .triton.latents import attend_latents

    made, scaling = torch.Generator("cpu").manual_seed(0), dim**-0.5
    query, held = (
        torch.randn(2, 1, tokens, dim, generator=made, dtype=torch.float32, device="cpu").to(dtype)
        for tokens in (TRIED_QUERIES, TRIED_TOKENS + 9)
    )
    latents = held[:, :, :TRIED_TOKENS].clone()
    held[:, :, TRIED_TOKENS:] = torch.nan
    out, lse = partial_attention(query, latents, latents, scaling=scaling, kernels="torch")

    def compute() -> tuple[Tensor, ...]:
        found, sums = attend_latents(query.to(device), held.to(device)[:, :, :TRIED_TOKENS], rank, scaling=scaling)
        return found.to(dtype).cpu(), sums.cpu()

    return find_fault(compute, (out[..., :rank].to(dtype), lse))
