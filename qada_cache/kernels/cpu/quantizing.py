"""Keys coded as in a sketch on the CPU, in one call of `quantize.cpp`."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ...sketch import BLOCK, SEGMENT_TOKENS, Layout, codec, count_segments
from . import ELEMENTS, define
from .addresses import View, find_address, find_view
from .building import build_library, check_size

SOURCE = Path(__file__).with_name("quantize.cpp")
# Macros of quantize.cpp, so that it codes as `sketch/codec.py` does.
CONSTANTS = {
    "ROUNDINGS": codec.ROUNDINGS, "MIN_ENERGY": codec.MIN_ENERGY, "MIN_VARIANCE": codec.MIN_VARIANCE,
    "MIN_MEAN": codec.MIN_MEAN,
    "SCALE_LEVELS": codec.SCALE_LEVELS, "ROTATED": BLOCK,
}  # fmt: skip


class Quantizing(ctypes.Structure):
    """`Quantizing` of quantize.cpp."""

    _fields_ = (
        ("keys", View),
        *((name, ctypes.c_void_p) for name in ("energies", "half_steps", "levels", "codes", "scales", "units")),
        *((name, ctypes.c_void_p) for name in ("centres", "order", "weights", "mean_squares", "exact")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "tokens", "segment_tokens", "segments")),
        *((name, ctypes.c_int64) for name in ("token_stride", "threads")),
        ("words", ctypes.c_int * 3),
    )


def quantize_segments(keys: Tensor, energies: Tensor | None, layout: Layout) -> dict[str, Tensor]:
    """As `codec.quantize_segments` of `keys` `[rows, kv_heads, tokens, dim]`. Sums have another order, so now and then
    a code is the neighbouring one. `codec` computes it where keys are not on a CPU, or nothing can be built."""
    if not keys.is_cpu or not keys.numel() or keys.dtype not in ELEMENTS:
        return codec.quantize_segments(keys, energies, layout)
    if (library := build_quantizer(keys.dtype, layout.dim)) is None:
        return codec.quantize_segments(keys, energies, layout)
    (*each, tokens, dim), device = keys.shape, keys.device
    if keys.stride(3) != 1:
        keys = keys.contiguous()
    if energies is None:
        energies = torch.ones(dim, dtype=torch.float32, device=device)
    energies = energies.float().expand(*each, dim).contiguous()
    fields, codes = codec.list_fields(dim, 0, layout.count, tokens), dict[str, Tensor]()
    for name, (dtype, shape) in ((name, fields[name]) for name in codec.CODES):
        codes[name] = torch.empty(*each, *shape, dtype=dtype, device=device)
    inputs = {"energies": energies, "half_steps": layout.find_half_steps(device), "levels": layout.find_levels(device)}
    shapes = {"energies": (*each, dim), "half_steps": (dim,), "levels": (dim,)}
    exact = torch.empty(*each, tokens, dtype=torch.float32, device=device)
    call = Quantizing(
        keys=find_view("keys", keys, keys.dtype, (*each, tokens, dim), packed=1),
        **{name: find_address(name, part, torch.float32, shapes[name]) for name, part in inputs.items()},
        **{name: find_address(name, part, part.dtype, part.shape) for name, part in codes.items()},
        exact=find_address("exact", exact, torch.float32, exact.shape), rows=each[0], heads=each[1], tokens=tokens,
        segment_tokens=SEGMENT_TOKENS, segments=count_segments(tokens), token_stride=keys.stride(2),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    call.words = layout.words
    library.quantize_segments(ctypes.byref(call))
    return codes


def define_quantizer(dtype: torch.dtype, dim: int) -> tuple[str, ...]:
    """The macros that `SOURCE` is built with."""
    return *define(ELEMENTS[dtype], dim, dim, 1), *(f"-D{name}={value}" for name, value in CONSTANTS.items())


@functools.cache
def build_quantizer(dtype: torch.dtype, dim: int) -> ctypes.CDLL | None:
    """The library for keys of `dim` channels, built if need be; None, with one warning, if it cannot be."""
    warning = "sketches are made by torch, as the kernel could not be built"
    if (library := build_library(SOURCE, define_quantizer(dtype, dim), warning)) is not None:
        check_size(Quantizing, library.quantizing_size(), SOURCE)
    return library
