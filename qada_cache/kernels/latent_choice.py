"""Attention to latents by Triton's kernel, once tried on the device, or by torch's operations."""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ..said_once import warn_once
from ..sketch import LAST_TOKENS, SEGMENT_TOKENS, Layout, count_segments
from ..sketch.codec import Sketch
from ..sketch.coded import RecordLayout, code_tokens, decode_keys, find_query_weights, fit_records
from . import partial_attention
from .choice import AUTO_DEVICES, MAX_RANK, MAX_SHARED, explain_unsupported
from .decode_reference import predict_keys
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
    # One tensor is keys and values, so the average over its rotary channels is computed too, and cut off.
    out, lse = partial_attention(query, latents, latents, scaling=scaling, kernels=kernels)
    return out[..., :rank], lse


def find_latent_attention(query: Tensor, latents: Tensor, rank: int, kernels: str) -> Callable[..., tuple] | None:
    """`triton.latents.attend_latents` if it computes such a call, else None; `kernels` is one of `choice.KINDS`."""
    dim = query.shape[3]
    packed = latents.stride()[2:] == (dim, 1) and latents.stride(0) % dim == 0
    if not packed or not _is_served(query, latents, rank, kernels, _find_latent_fault):
        return None
    from .triton.latents import attend_latents

    return attend_latents


def find_recorded_attention(
    query: Tensor, like: Tensor, rank: int, kernels: str, layout: Layout, records: RecordLayout
) -> Callable[..., tuple] | None:
    """`triton.latents.attend_recorded_latents` if it computes such a call, else None. The latents have the shape and
    dtype of `like`. They lie in `records`, with a sketch of this `layout`."""
    find_kernel_fault = functools.partial(_find_record_fault, layout=layout, records=records)
    if not _is_served(query, like, rank, kernels, find_kernel_fault):
        return None
    from .triton.latents import attend_recorded_latents

    return attend_recorded_latents


def _is_served(query: Tensor, latents: Tensor, rank: int, kernels: str, find_kernel_fault: Callable) -> bool:
    """Whether Triton's kernel computes such calls; if it cannot, or is wrong, a warning says so."""
    if kernels == "torch" or (kernels == "auto" and query.device.type not in AUTO_DEVICES):
        return False
    if torch.is_grad_enabled() and query.requires_grad:
        return False
    if (reason := explain_unsupported(query, latents, latents, None, most=MAX_SHARED)) is None:
        if rank > MAX_RANK or (query.dtype.itemsize > 2 and query.device.type == "cuda"):
            reason = f"the kernel has 16-bit latents of up to {MAX_RANK} channels, not {query.dtype} ones of {rank}"
        else:
            reason = find_kernel_fault(query.device, query.dtype, query.shape[3], rank)
        if reason is None:
            return True
    warn_once(logger, f"latents are read on {query.device} by torch's operations, not by Triton's kernel: {reason}")
    return False


@functools.cache
def _find_latent_fault(device: torch.device, dtype: torch.dtype, dim: int, rank: int) -> str | None:
    """The fault of `attend_latents` on this device, as `reference.find_fault` says it. It is tried on two rows of a
    buffer, which is nan behind their tokens."""
    from .triton.latents import attend_latents

    generator, scaling = torch.Generator("cpu").manual_seed(0), dim**-0.5
    query, buffer = (
        torch.randn(2, 1, tokens, dim, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for tokens in (TRIED_QUERIES, TRIED_TOKENS + 9)
    )
    latents = buffer[:, :, :TRIED_TOKENS].clone()
    buffer[:, :, TRIED_TOKENS:] = torch.nan
    out, lse = partial_attention(query, latents, latents, scaling=scaling, kernels="torch")

    def compute() -> tuple[Tensor, ...]:
        kernel_out, kernel_lse = attend_latents(
            query.to(device), buffer.to(device)[:, :, :TRIED_TOKENS], rank, scaling=scaling
        )
        return kernel_out.to(dtype).cpu(), kernel_lse.cpu()

    return find_fault(compute, (out[..., :rank].to(dtype), lse))


@functools.cache
def _find_record_fault(
    device: torch.device, dtype: torch.dtype, dim: int, rank: int, *, layout: Layout, records: RecordLayout
) -> str | None:
    """The fault of `attend_recorded_latents`, as `_find_latent_fault`. It is tried on two segments in records, behind
    which all bytes are 255."""
    from .triton.latents import attend_recorded_latents

    generator, scaling, tokens = torch.Generator("cpu").manual_seed(0), dim**-0.5, SEGMENT_TOKENS + LAST_TOKENS
    query, keys = (
        torch.randn(2, 1, count, dim, generator=generator, dtype=torch.float32, device="cpu")
        for count in (TRIED_QUERIES, tokens)
    )
    query, energies = query.to(dtype), torch.linspace(0.1, 2, dim, dtype=torch.float32, device="cpu")[None]
    sketch = Sketch.of(keys, keys[..., :0], energies, layout)
    predicted, weights = predict_keys(sketch, slice(2), tokens), find_query_weights(energies, dim, keys.device)
    coded = code_tokens(keys, keys[..., :0], predicted, weights, records)
    latents = decode_keys(coded, predicted, weights, records).to(dtype)
    fitted = fit_records(coded, records.find_stride(device))
    buffer = torch.nn.functional.pad(fitted, (0, 0, 0, 9), value=255).to(device)
    out, lse = partial_attention(query, latents, latents, scaling=scaling, kernels="torch")

    def compute() -> tuple[Tensor, ...]:
        arguments = sketch.map(lambda part: part.to(device)), weights.to(device), records, rank
        segments = count_segments(tokens)
        kernel_out, kernel_lse = attend_recorded_latents(
            query.to(device), buffer[:, :, :tokens], *arguments, scaling=scaling, segments=segments
        )
        return kernel_out.to(dtype).cpu(), kernel_lse.cpu()

    return find_fault(compute, (out[..., :rank].to(dtype), lse))
