"""Exact attention of many queries in bfloat16 or float32 on the CPU, in one call of `prompt.cpp`.

Torch's own leaves much of what a processor can multiply unused, most of it where there is AVX512-BF16.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ..border import OperandError
from ..reference import has_gradients
from .addresses import find_address
from .building import build_library, check_memory, check_size
from .processor import find_kind, read_instructions

MIN_QUERIES = 64  # fewer are bound by memory, as decoding is
MIN_TOKENS = 512  # fewer keys are not worth a build
SOURCE = Path(__file__).with_name("prompt.cpp")
NUMBERS = {torch.bfloat16: "uint16_t", torch.float32: "float"}  # as C++ has them
OUT = (torch.bfloat16, torch.float32)  # dtypes of `out`, whatever the queries' dtype


class Call(ctypes.Structure):
    """`Call` of prompt.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lse")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("query", "key", "value", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "tokens")),
        *((name, ctypes.c_int64) for name in ("causal", "narrow", "threads")),
        ("scaling", ctypes.c_double),
    )


def serves(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> bool:
    """Whether `prompt_attention` computes this call, its build included (shapes as there)."""
    dim, value_dim = query.shape[3], value.shape[3]
    return (
        query.device.type == key.device.type == value.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and serves_sizes(dim, value_dim, query.dtype)
        and query.shape[2] >= MIN_QUERIES
        and key.shape[2] >= max(MIN_TOKENS, query.shape[2] if causal else 0)
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[1] % key.shape[1] == 0
        and key.shape[:3] == value.shape[:3]
        and all(tensor.stride(3) == 1 for tensor in (query, key, value))
        and not has_gradients(query, key, value)
        and build(dim, value_dim, query.dtype) is not None
    )


def serves_sizes(dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for these sizes, on processors with its instructions."""
    return dtype in NUMBERS and dim * dtype.itemsize % 4 == value_dim % 16 == 0


def prompt_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool, out: Tensor, lse: Tensor | None = None
) -> None:
    """Softmax attention of queries over keys, for calls that `serves` admits: sums in float32, weights in the queries'
    dtype, as torch's own.

    Args:
        query: `[batch, heads, queries, dim]`.
        key, value: `[batch, kv_heads, tokens, dim or value_dim]`, whose heads serve `heads // kv_heads` each.
        scaling: of scores.
        causal: query `i` sees the tokens up to `tokens - queries + i`; else every one sees all.
        out: bfloat16 or float32 `[batch, heads, queries, value_dim]`, any strides but of dimensions, written.
        lse: float32 `[batch, heads, queries]` contiguous, written: the log-sum-exp of each query's scores.

    MemoryError, if there is none for keys and values of one head, which are packed for the processor.
    """
    (batch, heads, queries, dim), (kv_heads, tokens, value_dim) = query.shape, value.shape[1:]
    if heads % max(1, kv_heads) or (causal and tokens < queries):
        raise OperandError("query", list(query.shape), f"of a multiple of {kv_heads} heads, and of known tokens")
    addresses = (
        find_address("query", query, NUMBERS, query.shape, packed=1),
        find_address("key", key, query.dtype, (batch, kv_heads, tokens, dim), packed=1),
        find_address("value", value, query.dtype, (batch, kv_heads, tokens, value_dim), packed=1),
        find_address("out", out, OUT, (batch, heads, queries, value_dim), packed=1),
        None if lse is None else find_address("lse", lse, torch.float32, (batch, heads, queries)),
    )
    kernel = build(dim, value_dim, query.dtype)
    assert kernel is not None
    call = Call(
        *addresses,
        *((ctypes.c_int64 * 3)(*tensor.stride()[:3]) for tensor in (query, key, value, out)),
        *(batch, heads, kv_heads, queries, tokens),
        *(causal, out.dtype == torch.bfloat16, torch.get_num_threads(), scaling),
    )
    kernel.prompt_attention(ctypes.byref(call))


def attend_part(query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`out` `[batch, heads, queries, value_dim]` and `lse` of `prompt_attention`, both new and float32."""
    out = query.new_empty(*query.shape[:3], value.shape[3], dtype=torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    prompt_attention(query, key, value, scaling=scaling, causal=causal, out=out, lse=lse)
    return out, lse


def count_pairs(query: Tensor, key: Tensor) -> int:
    """The pairs of a query and a key that causal attention has, of the last tokens' `query` `[batch, heads, queries,
    dim]` with `key` `[batch, kv_heads, tokens, dim]`."""
    queries, tokens = query.shape[2], key.shape[2]
    return query.shape[:2].numel() * (queries * (2 * tokens - queries + 1) // 2)


def define(dim: int, value_dim: int, dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that `SOURCE` is built with, and flags that take away instructions which the processor lacks."""
    there, kind = read_instructions(), find_kind(read_instructions())
    lacking = (flag for name, flag in kind.better.items() if name not in there) if kind else ()
    return f"-DDIM={dim}", f"-DVALUE_DIM={value_dim}", f"-DNUMBER={NUMBERS[dtype]}", *lacking


def build(dim: int, value_dim: int, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernel for these sizes and a dtype, as by `build_kernel`."""
    return build_kernel(SOURCE, Call, define(dim, value_dim, dtype))


def build_kernel(source: Path, call: type[ctypes.Structure], macros: tuple[str, ...]) -> ctypes.CDLL | None:
    """`source`, which has `prompt_attention` of one `call`, built if need be; None on another processor, and, with one
    warning, if it cannot be built."""
    return _build_once(source, call, macros) if has_instructions() else None


def has_instructions() -> bool:
    """Whether the source knows this processor."""
    return find_kind(read_instructions()) is not None


@functools.cache
def _build_once(source: Path, call: type[ctypes.Structure], macros: tuple[str, ...]) -> ctypes.CDLL | None:
    warning = f"{source.name}, a fast kernel for prompts, could not be built, and a slower one serves"
    if (kernel := build_library(source, macros, warning)) is None:
        return None
    kernel.prompt_attention.errcheck = check_memory
    check_size(call, kernel.call_size(), source)
    return kernel
