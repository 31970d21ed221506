"""Partial attention of a few queries on the CPU by `attention.cpp`, built for each shape when it is first met.

Building takes a second and a C++ compiler; the library is kept in the user's cache folder. Without a compiler, or if it
fails, torch's own kernel serves, at a fraction of the memory's speed.
"""

import ctypes
import functools
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.utils import logging

from . import structs
from .build import load

logger = logging.get_logger(__name__)

MIN_TOKENS = 1024  # fewer keys are not worth a build
MAX_QUERIES = 16  # a power of two; more are compute enough for torch's kernel, which multiplies matrices
SPLIT_TOKENS = 512  # a thread's part of a head's keys is at least this long
ELEMENTS = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32"}
SOURCE = Path(__file__).with_name("attention.cpp")


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `compiled_partial_attention` computes this call, but for the build (shapes as there)."""
    return (
        query.device.type == key.device.type == value.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.dtype in ELEMENTS
        and 1 <= query.shape[2] <= MAX_QUERIES
        and key.shape[2] >= MIN_TOKENS
        and query.shape[3] % 8 == value.shape[3] % 8 == 0
        and query.shape[:2] == key.shape[:2]
        and query.shape[3] == key.shape[3]
        and key.shape[:3] == value.shape[:3]
        and rows_contiguous(key)
        and rows_contiguous(value)
    )


def compiled_partial_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float
) -> tuple[Tensor, Tensor] | None:
    """Same contract as `reference.partial_attention`, for the calls that `supports` admits; None if it cannot be built.

    Threads share the work evenly for any number of heads, by splitting keys if needed.
    """
    batch, heads, queries, dim = query.shape
    room = 1 << (queries - 1).bit_length()  # calls of 1, 2, 3... tokens would each need a build of their own
    kernels = build(query.dtype, dim, value.shape[3], room)
    if kernels is None:
        return None
    query = functional.pad(query, (0, 0, 0, room - queries)).contiguous()
    out = torch.empty(batch, heads, room, value.shape[3], dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, heads, room, dtype=torch.float32, device=query.device)
    kernels.partial_attention(
        *(tensor.data_ptr() for tensor in (query, key, value, out, lse)),
        *(batch, heads, key.shape[2], *key.stride()[:2], *value.stride()[:2]),
        *(SPLIT_TOKENS, torch.get_num_threads(), scaling),
    )
    return out[:, :, :queries], lse[:, :, :queries]


def rows_contiguous(tensor: Tensor) -> bool:
    """Whether the tokens of each head of `[batch, heads, tokens, dim]` lie one after the other."""
    return tensor.stride()[2:] == (tensor.shape[3], 1)


@functools.cache
def build(dtype: torch.dtype, dim: int, value_dim: int, queries: int) -> ctypes.CDLL | None:
    """The kernels for these sizes, built if need be; None, with one warning, if they cannot be built."""
    macros = (f"-D{ELEMENTS[dtype]}", f"-DDIM={dim}", f"-DVALUE_DIM={value_dim}", f"-DQUERIES={queries}")
    try:
        kernels = load(SOURCE, macros)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning_once(
            f"the fast attention kernel for CPUs could not be built, torch's slower one serves: {error}"
        )
        return None
    arguments: list[Any] = [*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 8, ctypes.c_int, ctypes.c_float]
    kernels.partial_attention.argtypes, kernels.fused_decode.argtypes = arguments, [ctypes.c_void_p]
    kernels.partial_attention.errcheck = kernels.fused_decode.errcheck = _check
    kernels.decode_size.argtypes, kernels.decode_size.restype = [], ctypes.c_int64
    if (size := kernels.decode_size()) != ctypes.sizeof(structs.Decode):
        raise RuntimeError(f"decide.h has a Decode of {size} bytes, structs.py of {ctypes.sizeof(structs.Decode)}")
    return kernels


def _check(failed: Any, *_: Any) -> Any:
    if failed:
        raise MemoryError("there is no memory for the temporaries of attention on the CPU")
    return failed
