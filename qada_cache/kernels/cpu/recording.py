"""Keys and values as records, and back, on the CPU, each in one call of `records.cpp`."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ...sketch import SEGMENT_TOKENS
from ...sketch.codec import Sketch, list_fields
from ...sketch.coded import RecordLayout
from ..border import OperandError
from . import ELEMENTS, define
from .addresses import View, find_view
from .building import build_library, check_size

SOURCE = Path(__file__).with_name("records.cpp")
OF_SKETCH = ("codes", "scales", "units", "centres", "weights", "order")


class Coding(ctypes.Structure):
    """`Coding` of records.cpp."""

    _fields_ = (
        *((name, View) for name in ("records", *OF_SKETCH, "record_weights", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_stride", "value_stride")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "first", "room", "segment_tokens")),
        *((name, ctypes.c_int64) for name in ("segments", "threads")),
        ("words", ctypes.c_int * 3),
    )


def code_records(
    keys: Tensor, values: Tensor, sketch: Sketch, weights: Tensor, layout: RecordLayout, *, first: int, segments: int
) -> Tensor | None:
    """Records uint8 `[rows, heads, tokens, size]` of `keys` `[rows, heads, tokens, dim]` and `values` (`value_dim`), of
    a bulk's tokens from `first` on; as `code_tokens` of `coded.py`, but for a number beside the nearest one now and
    then. None where they are not on a CPU, or nothing can be built. Other arguments are as for `decode_records`."""
    if not keys.is_cpu or not keys.numel() or (library := build_coder(layout)) is None:
        return None
    records = torch.empty(*keys.shape[:3], layout.size, dtype=torch.uint8, device="cpu")
    # Strides of tokens are passed on: to copy a prompt's keys takes nearly as long as to code them.
    keys, values = ((part if part.stride(3) == 1 else part.contiguous()).float() for part in (keys, values))
    _call(library.code_records, records, keys, values, sketch, weights, layout, first=first, segments=segments)
    return records


def decode_records(
    records: Tensor, sketch: Sketch, weights: Tensor, layout: RecordLayout, *, first: int, segments: int
) -> tuple[Tensor, Tensor] | None:
    """Keys `[rows, heads, tokens, dim]` and values (`value_dim`) in float32 of `records` `[rows, heads, tokens, size]`,
    of a bulk's tokens from `first` on; as `decode_keys` and `decode_values` of `coded.py`, but for the order of sums.
    None where they are not on a CPU, or nothing can be built.

    Args:
        sketch: of these rows and heads, with room for all of the bulk's tokens.
        weights: `m`, float32 `[heads, dim]` or `[dim]`.
        layout: of the records.
        segments: number of the bulk's segments; the last one may be longer.
    """
    if not records.is_cpu or not records.numel() or records.stride()[2:] != (layout.size, 1):
        return None
    if (library := build_coder(layout)) is None:
        return None
    sizes = layout.dim, layout.value_dim
    keys, values = (torch.empty(*records.shape[:3], size, dtype=torch.float32, device="cpu") for size in sizes)
    _call(library.decode_records, records, keys, values, sketch, weights, layout, first=first, segments=segments)
    return keys, values


def _call(
    function: Callable, records: Tensor, keys: Tensor, values: Tensor, sketch: Sketch, weights: Tensor,
    layout: RecordLayout, *, first: int, segments: int,
) -> None:  # fmt: skip
    each = records.shape[:3]
    weights = weights.expand(each[1], -1).contiguous()[None]
    call = describe_records(records, sketch, weights, layout, first=first, segments=segments)
    call.keys = find_view("keys", keys, torch.float32, (*each, layout.dim), packed=1)
    call.values = find_view("values", values, torch.float32, (*each, layout.value_dim), packed=1)
    call.key_stride, call.value_stride = keys.stride(2), values.stride(2)
    function(ctypes.byref(call))


def describe_records(
    records: Tensor, sketch: Sketch, weights: Tensor, layout: RecordLayout, *, first: int, segments: int
) -> Coding:
    """`records` and their sketch, without keys and values; arguments as for `decode_records`, but `weights` float32
    `[1, heads, dim]`. OperandError, if they do not fit each other."""
    (rows, heads, tokens), capacity = records.shape[:3], sketch.scales.shape[2]
    if not 0 <= first <= capacity - tokens:
        raise OperandError("first", first, f"from 0 to {capacity - tokens}, as the sketch has room for {capacity}")
    if not 0 < segments <= sketch.units.shape[2]:
        raise OperandError("segments", segments, f"from 1 to {sketch.units.shape[2]}, as the sketch has")
    each = (rows, heads)
    views = {
        "records": find_view("records", records, torch.uint8, (*each, tokens, layout.size), packed=2),
        "record_weights": find_view("weights", weights, torch.float32, (1, heads, layout.dim), packed=2),
    }
    fields = list_fields(layout.dim, layout.value_dim, sketch.codes.shape[2], capacity)
    for name, (dtype, shape) in ((name, fields[name]) for name in OF_SKETCH):
        views[name] = find_view(name, getattr(sketch, name), dtype, (*each, *shape), packed=len(shape))
    call = Coding(**views, batch=rows, heads=heads, tokens=tokens)
    call.first, call.room, call.segment_tokens = first, capacity, SEGMENT_TOKENS
    call.segments, call.threads, call.words = segments, torch.get_num_threads(), sketch.layout.words
    return call


def define_coder(layout: RecordLayout) -> tuple[str, ...]:
    """The macros that `SOURCE` is built with."""
    return define(ELEMENTS[torch.float32], layout.dim, layout.value_dim, 1, layout)


@functools.cache
def build_coder(layout: RecordLayout) -> ctypes.CDLL | None:
    """The library for such records, built if need be; None, with one warning, if it cannot be."""
    warning = "records of few bits are made and decoded by torch, as the kernel could not be built"
    if (library := build_library(SOURCE, define_coder(layout), warning)) is not None:
        check_size(Coding, library.coding_size(), SOURCE)
    return library
