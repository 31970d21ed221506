"""Partial attention of a few queries on the CPU by `partial_attention.cpp`, built for each shape when it is first met.

Building takes a second and a C++ compiler; what was built is kept in the user's cache folder. Without a compiler,
or where it fails, torch's own kernel serves, which reads keys at a fraction of the memory's speed.
"""

import ctypes
import functools
import logging
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .build import library

logger = logging.getLogger(__name__)

MIN_TOKENS = 1024  # fewer keys are not worth a build
MAX_QUERIES = 16  # more are compute enough for torch's kernel, which multiplies matrices
SPLIT_TOKENS = 512  # a thread's part of a head's keys is at least this long
ELEMENTS = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32"}
SOURCE = Path(__file__).with_name("partial_attention.cpp")


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `partial_attention` computes this call, but for the build (shapes as there)."""
    return (
        query.device.type == key.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.dtype in ELEMENTS
        and 1 <= query.shape[2] <= MAX_QUERIES
        and key.shape[2] >= MIN_TOKENS
        and query.shape[3] % 8 == value.shape[3] % 8 == 0
        and _rows_contiguous(key)
        and _rows_contiguous(value)
    )


def partial_attention(query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> tuple[Tensor, Tensor] | None:
    """Same contract as `reference.partial_attention`, for the calls that `supports` admits; None if it cannot be built.

    Threads share the work evenly, whatever the number of heads: the keys are split among them where it takes that.
    """
    batch, heads, queries, dim = query.shape
    function = _function(ELEMENTS[query.dtype], dim, value.shape[3], queries)
    if function is None:
        return None
    query = query.contiguous()
    out = torch.empty(batch, heads, queries, value.shape[3])
    lse = torch.empty(batch, heads, queries)
    threads = torch.get_num_threads()
    function(
        *(tensor.data_ptr() for tensor in (query, key, value, out, lse)),
        *(batch, heads, key.shape[2], *key.stride()[:2], *value.stride()[:2]),
        _splits(batch * heads, key.shape[2], threads),
        threads,
        scaling,
    )
    return out, lse


def _rows_contiguous(tensor: Tensor) -> bool:
    return tensor.stride()[2:] == (tensor.shape[3], 1)


def _splits(heads: int, tokens: int, threads: int) -> int:
    """Into how many parts to split each head's keys, so that every thread gets the same number of them."""
    return max(1, min(threads // math.gcd(threads, heads), tokens // SPLIT_TOKENS))


@functools.cache
def _function(element: str, dim: int, value_dim: int, queries: int) -> Callable | None:
    """The kernel for these sizes, built if need be; None, said once, if it cannot be."""
    macros = (f"-D{element}", f"-DDIM={dim}", f"-DVALUE_DIM={value_dim}", f"-DQUERIES={queries}")
    try:
        function = ctypes.CDLL(str(library(SOURCE, macros))).partial_attention
    except (OSError, subprocess.SubprocessError) as error:
        _say_once(str(error))
        return None
    function.argtypes = 5 * [ctypes.c_void_p] + 8 * [ctypes.c_int64] + [ctypes.c_int, ctypes.c_float]
    function.restype = None
    return function


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("the fast attention kernel for CPUs could not be built, torch's slower one serves: %s", reason)
