"""Keys and values of records, decoded on the CPU in one call of `records.cpp`."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ...sketch import SEGMENT_TOKENS
from ...sketch.codec import Sketch
from ...sketch.coded import RecordLayout
from . import ELEMENTS, define
from .building import build_library, check_size
from .compiled_decode import View, view

SOURCE = Path(__file__).with_name("records.cpp")
OF_SKETCH = ("codes", "scales", "units", "centres", "weights", "order")


class Decoding(ctypes.Structure):
    """`Decoding` of records.cpp."""

    _fields_ = (
        *((name, View) for name in ("records", *OF_SKETCH, "record_weights", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "first", "room", "segment_tokens")),
        *((name, ctypes.c_int64) for name in ("segments", "threads")),
        ("words", ctypes.c_int * 3),
    )


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
        segments: of the bulk, the last of which may be longer.
    """
    if not records.is_cpu or not records.numel() or records.stride()[2:] != (layout.size, 1):
        return None
    if (library := build_decoder(layout)) is None:
        return None
    rows, heads, tokens = records.shape[:3]
    found = [torch.empty(rows, heads, tokens, size, device="cpu") for size in (layout.dim, layout.value_dim)]
    weights = weights.expand(heads, -1).contiguous()[None]
    tensors = dict(zip(("keys", "values"), found, strict=True)) | {"records": records, "record_weights": weights}
    tensors |= {name: getattr(sketch, name) for name in OF_SKETCH}
    call = Decoding(**{name: view(tensor) for name, tensor in tensors.items()}, batch=rows, heads=heads, tokens=tokens)
    call.first, call.room, call.segment_tokens = first, sketch.codes.stride(2), SEGMENT_TOKENS
    call.segments, call.threads, call.words = segments, torch.get_num_threads(), sketch.layout.words
    library.decode_records(ctypes.byref(call))
    return found[0], found[1]


@functools.cache
def build_decoder(layout: RecordLayout) -> ctypes.CDLL | None:
    """The library for such records, built if need be; None, with one warning, if it cannot be."""
    macros = define(ELEMENTS[torch.float32], layout.dim, layout.value_dim, 1, layout)
    warning = "records of few bits are decoded by torch, as the kernel could not be built"
    if (library := build_library(SOURCE, macros, warning)) is not None:
        check_size(Decoding, library.decoding_size(), SOURCE)
    return library
