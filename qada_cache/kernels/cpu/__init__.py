"""Kernels in C++, for CPUs: `attention.cpp` and `partial.cpp` built for each shape when it is first met, and partial
attention by the latter.

Building (`building.py`) takes seconds and a C++ compiler. Without one, or if it fails, torch's own kernel serves, at a
fraction of the memory's speed.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ...sketch import HADAMARD, WORD_BITS, codec, selection
from ...sketch.coded import RecordLayout
from ..border import check_tensor
from .addresses import CPU, find_address
from .building import build_library, check_memory

MIN_TOKENS = 1024  # fewer keys are not worth a build
MAX_QUERIES = 16  # a power of two; torch's kernel, which multiplies matrices, serves more queries
THREAD_TOKENS = 512  # a thread's part of a head's keys is at least this long
ELEMENTS = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32"}
SOURCE = Path(__file__).with_name("attention.cpp")
PARTIAL = SOURCE.with_name("partial.cpp")
FAILED = "the fast attention kernel for CPUs could not be built, torch's slower one serves"
# Macros of `SOURCE`, so that it reads a sketch as `sketch/` defines it.
CONSTANTS = {
    "QUERY_LEVELS": codec.QUERY_LEVELS, "MIN_PEAK": codec.MIN_PEAK, "HADAMARD": HADAMARD, "WORD_BITS": WORD_BITS,
    "HOPELESS": selection.HOPELESS, "FLAT": selection.FLAT,
    "MOST_HALF": codec.MOST_HALF, "MOST_RISE": codec.MOST_RISE,
}  # fmt: skip


def supports(query: Tensor, key: Tensor, value: Tensor, beside: int = 0) -> bool:
    """Whether `compiled_partial_attention` computes this call (shapes as there), if the build succeeds. `beside` are
    further tokens of the same attention, which lie elsewhere."""
    return (
        query.device.type == key.device.type == value.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and supports_sizes(query.dtype, query.shape[3], value.shape[3], query.shape[2])
        and key.shape[2] + beside >= MIN_TOKENS
        and (query.shape[:2], query.shape[3]) == (key.shape[:2], key.shape[3])
        and key.shape[:3] == value.shape[:3]
        and all(map(has_contiguous_rows, (key, value)))
    )


def supports_sizes(dtype: torch.dtype, dim: int, value_dim: int, queries: int) -> bool:
    """Whether there are kernels for this dtype, these channels, and so many queries of a KV head."""
    return dtype in ELEMENTS and 1 <= queries <= MAX_QUERIES and dim % 8 == value_dim % 8 == 0


def split_heads(heads: int) -> int:
    """The heads that a kernel takes at once, of so many that share a key: the greatest divisor up to `MAX_QUERIES`."""
    return next(size for size in range(min(heads, MAX_QUERIES), 0, -1) if heads % size == 0)


def round_queries(queries: int) -> int:
    """The number of queries that a build is for, a power of two: else each number would need a build of its own."""
    return 1 << (queries - 1).bit_length()


def compiled_partial_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float
) -> tuple[Tensor, Tensor] | None:
    """Same contract as `reference.partial_attention`, for the calls that `supports` admits; None if it cannot be built.
    Threads share the work evenly for any number of heads, by splitting keys if needed."""
    (batch, heads, queries, dim), (tokens, value_dim) = query.shape, value.shape[2:]
    check_tensor("query", query, ELEMENTS, query.shape, CPU, packed=0)
    addresses = (
        find_address("key", key, query.dtype, (batch, heads, tokens, dim), packed=2),
        find_address("value", value, query.dtype, (batch, heads, tokens, value_dim), packed=2),
    )
    room = round_queries(queries)
    kernel = build_partial(query.dtype, dim, value_dim, room)
    if kernel is None:
        return None
    query = functional.pad(query, (0, 0, 0, room - queries)).contiguous()
    out = torch.empty(batch, heads, room, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, heads, room, dtype=torch.float32, device=query.device)
    kernel.partial_attention(
        find_address("query", query, query.dtype, (batch, heads, room, dim)),
        *addresses,
        find_address("out", out, torch.float32, (batch, heads, room, value_dim)),
        find_address("lse", lse, torch.float32, (batch, heads, room)),
        *(batch, heads, tokens, *key.stride()[:2], *value.stride()[:2]),
        *(THREAD_TOKENS, torch.get_num_threads(), scaling),
    )
    return out[:, :, :queries], lse[:, :, :queries]


def has_contiguous_rows(tensor: Tensor) -> bool:
    """Whether the tokens of each head of `[batch, heads, tokens, dim]` lie one after the other."""
    return tensor.stride()[2:] == (tensor.shape[3], 1)


def define(
    element: str, dim: int, value_dim: int, queries: int, records: RecordLayout | None = None, *, shared: bool = False
) -> tuple[str, ...]:
    """The macros that both sources are built with, `element` being one of `ELEMENTS`; keys and values are `shared` as
    by `operands.is_shared`."""
    values = CONSTANTS | {"DIM": dim, "VALUE_DIM": value_dim, "VALUES_IN_KEYS": int(shared), "QUERIES": queries}
    bits = (records.key_bits, records.value_bits, records.size) if records else (0, 0, 1)
    values |= dict(zip(("KEY_BITS", "VALUE_BITS", "RECORD_SIZE"), bits, strict=True))
    return f"-D{element}", *(f"-D{name}={value}" for name, value in values.items())


@functools.cache
def build(
    dtype: torch.dtype,
    dim: int,
    value_dim: int,
    queries: int,
    records: RecordLayout | None = None,
    *,
    shared: bool = False,
) -> ctypes.CDLL | None:
    """The decode step for these sizes, and for bulks in such `records`, built if need be; None, with one warning, if it
    cannot be built."""
    macros = define(ELEMENTS[dtype], dim, value_dim, queries, records, shared=shared)
    if (kernels := build_library(SOURCE, macros, FAILED)) is not None:
        kernels.fused_decode.errcheck = check_memory
    return kernels


@functools.cache
def build_partial(dtype: torch.dtype, dim: int, value_dim: int, queries: int) -> ctypes.CDLL | None:
    """As `build`, partial attention alone, which takes a third of the time to build."""
    kernel = build_library(PARTIAL, define(ELEMENTS[dtype], dim, value_dim, queries), FAILED)
    if kernel is not None:
        tensors, counts = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 8
        kernel.partial_attention.argtypes = [*tensors, *counts, ctypes.c_int, ctypes.c_float]
        kernel.partial_attention.errcheck = check_memory
    return kernel
