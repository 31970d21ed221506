"""Attention of a few tokens' queries to latents on the CPU, in one call of `latent.cpp`.

All heads share one key, whose first channels are the value: keys are read once, and multiplied with all queries. Those
in records of few bits are decoded where they are used.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ...sketch.codec import Sketch
from ...sketch.coded import RecordLayout
from . import ELEMENTS, MIN_TOKENS, THREAD_TOKENS, define
from .addresses import find_address
from .building import build_library, check_memory, check_size
from .recording import Coding, describe_records

SOURCE = Path(__file__).with_name("latent.cpp")
SUMMED = 16  # channels that are summed at once, at most


class Call(ctypes.Structure):
    """`Call` of latent.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "latents", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("batch", "queries", "tokens", "row_stride", "split_tokens", "threads")),
        ("scaling", ctypes.c_double),
    )


def serves_latents(query: Tensor, latents: Tensor, rank: int, tokens: int) -> bool:
    """Whether there is a kernel for such calls, if the build succeeds; `tokens` are all tokens of the layer."""
    return (
        query.device.type == latents.device.type == "cpu"
        and query.dtype == latents.dtype
        and serves_sizes(query.dtype, query.shape[3], rank)
        and tokens >= MIN_TOKENS
        and latents.stride()[2:] == (latents.shape[3], 1)
    )


def serves_sizes(dtype: torch.dtype, dim: int, rank: int) -> bool:
    """Whether there is a kernel for keys of `dim` channels and values of `rank`, which it pads to a multiple of
    `SUMMED` with further channels of keys."""
    return dtype in ELEMENTS and rank % 8 == dim % 8 == 0 and -(-rank // SUMMED) * SUMMED <= dim


def attend_latents(
    query: Tensor, latents: Tensor, rank: int, *, scaling: float, layout: RecordLayout | None = None
) -> tuple[Tensor, Tensor] | None:
    """Attention over one part of the keys, for calls that `serves_latents` admits; None, if the kernel cannot be built.
    Weights of bfloat16 latents are rounded to bfloat16 where the processor multiplies it; all else is float32.

    Args:
        query: `[batch, 1, queries, dim]`, of all heads.
        latents: `[batch, 1, tokens, dim]`; a value is the first `rank` channels.
        scaling: of scores.
        layout: of records that the layer holds besides, so that one library serves both.

    Returns `out` float32 `[batch, 1, queries, rank]` and `lse` float32 `[batch, 1, queries]`, as `partial_attention`.
    """
    (batch, _, _, dim), tokens = query.shape, latents.shape[2]
    if (library := build_latent(query.dtype, dim, rank, layout)) is None:
        return None
    call, found = _make_call(query, rank, tokens, scaling)
    call.latents = find_address("latents", latents, query.dtype, (batch, 1, tokens, dim), packed=2)
    call.row_stride = latents.stride(0)
    library.latent_attention(ctypes.byref(call))
    return found[1], found[2]


def attend_recorded_latents(
    query: Tensor,
    records: Tensor,
    sketch: Sketch,
    weights: Tensor,
    layout: RecordLayout,
    rank: int,
    *,
    scaling: float,
    segments: int,
) -> tuple[Tensor, Tensor] | None:
    """As `attend_latents`, over a bulk's first tokens, which lie in `records` `[batch, 1, tokens, size]`; other
    arguments are as for `decode_records`."""
    tokens = records.shape[2]
    if (library := build_latent(query.dtype, query.shape[3], rank, layout)) is None:
        return None
    call, found = _make_call(query, rank, tokens, scaling)
    coding = describe_records(records, sketch, weights[None], layout, first=0, segments=segments)
    library.recorded_latent_attention(ctypes.byref(call), ctypes.byref(coding))
    return found[1], found[2]


def _make_call(query: Tensor, rank: int, tokens: int, scaling: float) -> tuple[Call, tuple[Tensor, Tensor, Tensor]]:
    """A call without keys, and the tensors whose addresses it has: queries, `out` and `lse`."""
    (batch, _, queries, dim), query = query.shape, query.contiguous()
    out = torch.empty(batch, 1, queries, rank, dtype=torch.float32, device="cpu")
    lse = torch.empty(batch, 1, queries, dtype=torch.float32, device="cpu")
    call = Call(
        query=find_address("query", query, ELEMENTS, (batch, 1, queries, dim)),
        out=find_address("out", out, torch.float32, (batch, 1, queries, rank)),
        lse=find_address("lse", lse, torch.float32, (batch, 1, queries)), batch=batch, queries=queries, tokens=tokens,
        split_tokens=THREAD_TOKENS, threads=torch.get_num_threads(), scaling=scaling,
    )  # fmt: skip
    return call, (query, out, lse)


def define_latent(dtype: torch.dtype, dim: int, rank: int, layout: RecordLayout | None) -> tuple[str, ...]:
    """The macros that `SOURCE` is built with."""
    return define(ELEMENTS[dtype], dim, rank, 1, layout, shared=True)


@functools.cache
def build_latent(dtype: torch.dtype, dim: int, rank: int, layout: RecordLayout | None = None) -> ctypes.CDLL | None:
    """The library for these sizes, and bulks of such records, built if need be; None, with one warning, if it cannot
    be."""
    warning = "the fast kernel for latent attention on CPUs could not be built, torch's slower one serves"
    if (library := build_library(SOURCE, define_latent(dtype, dim, rank, layout), warning)) is None:
        return None
    check_size(Call, library.call_size(), SOURCE)
    library.latent_attention.errcheck = check_memory
    if layout is not None:
        check_size(Coding, library.coding_size(), SOURCE)
        library.recorded_latent_attention.errcheck = check_memory
    return library
