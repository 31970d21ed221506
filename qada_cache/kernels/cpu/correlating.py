"""Tokens taken into means and covariances on the CPU, in one call of `correlate.cpp`."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from . import prompt
from .addresses import find_address
from .building import build_library, check_memory, check_size

MIN_TOKENS = 1024  # fewer are not worth a build
MAX_DIM = 256  # products of more channels take torch no longer
SOURCE = Path(__file__).with_name("correlate.cpp")


class Correlating(ctypes.Structure):
    """`Correlating` of correlate.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("left", "right", "left_mean", "right_mean", "covariance")),
        *((name, ctypes.c_int64 * 3) for name in ("left_strides", "right_strides")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "tokens", "count", "threads")),
    )


def takes_tokens(left: Tensor, right: Tensor) -> bool:
    """Whether `take_in_compiled` takes such tokens, its build included: those of long prompts."""
    return (
        left.device.type == right.device.type == "cpu"
        and left.dim() == 4
        and left.shape[2] >= MIN_TOKENS
        and left.stride(3) == right.stride(3) == 1
        and left.dtype == right.dtype
        and takes_channels(left.shape[3], right.shape[3], left.dtype)
        and build_correlating(left.shape[3], right.shape[3], left.dtype) is not None
    )


def takes_channels(dim: int, other_dim: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for so many channels, on processors with its instructions."""
    return max(dim, other_dim) <= MAX_DIM and prompt.serves_sizes(dim, other_dim, dtype)


def take_in_compiled(count: int, means: tuple[Tensor, Tensor], covariance: Tensor, left: Tensor, right: Tensor) -> None:
    """`correlating.take_in_by_torch`, but for the order of sums, of `left` `[rows, heads, tokens, n]` and `right` (`m`)
    that `takes_tokens` admits. MemoryError, if there is none for means of all heads."""
    (*each, tokens, dim), other_dim = left.shape, right.shape[3]
    call = Correlating(
        find_address("left", left, prompt.NUMBERS, left.shape, packed=1),
        find_address("right", right, left.dtype, (*each, tokens, other_dim), packed=1),
        find_address("left_mean", means[0], torch.float32, (*each, dim)),
        find_address("right_mean", means[1], torch.float32, (*each, other_dim)),
        find_address("covariance", covariance, torch.float32, (*each, dim, other_dim)),
        *((ctypes.c_int64 * 3)(*part.stride()[:3]) for part in (left, right)),
        *(*each, tokens, count, torch.get_num_threads()),
    )
    kernel = build_correlating(dim, other_dim, left.dtype)
    assert kernel is not None
    kernel.take_in(ctypes.byref(call))


def build_correlating(dim: int, other_dim: int, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The library for such channels, built if need be; None on another processor, and, with one warning, if it cannot
    be built."""
    return _build_once(prompt.define(dim, other_dim, dtype)) if prompt.has_instructions() else None


@functools.cache
def _build_once(macros: tuple[str, ...]) -> ctypes.CDLL | None:
    warning = "covariances are computed by torch, as the kernel could not be built"
    if (library := build_library(SOURCE, macros, warning)) is None:
        return None
    library.take_in.errcheck = check_memory
    check_size(Correlating, library.call_size(), SOURCE)
    return library
