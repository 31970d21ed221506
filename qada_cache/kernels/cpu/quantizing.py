"""Keys rounded to the codes of a sketch on the CPU, in one call of `quantize.cpp`."""

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...sketch import Layout, codec
from . import ELEMENTS, define
from .addresses import find_address
from .building import build_library, check_size

SOURCE = Path(__file__).with_name("quantize.cpp")


class Quantizing(ctypes.Structure):
    """`Quantizing` of quantize.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "centres", "order", "weights", "importance", "most")),
        *((name, ctypes.c_void_p) for name in ("half_steps", "half_levels", "codes", "scales")),
        *((name, ctypes.c_int64) for name in ("segments", "tokens", "threads")),
        ("words", ctypes.c_int * 3),
    )


def round_keys(
    keys: Tensor, fit: Mapping[str, Tensor], importance: Tensor, most: Tensor | None, layout: Layout
) -> tuple[Tensor, Tensor]:
    """As `codec.round_keys`, but for the order of sums, so that a code may be the one beside it now and then; by it
    where keys are not on a CPU, or nothing can be built."""
    if not keys.is_cpu or not keys.numel() or (library := build_quantizer(layout.dim)) is None:
        return codec.round_keys(keys, fit, importance, most, layout)
    (*leading, tokens, dim), coded = keys.shape, layout.coded
    own = {
        "keys": keys,
        "centres": fit["centres"].float(),
        "order": fit["order"][..., :coded].long(),
        "weights": fit["weights"][..., :coded].float(),
        "importance": importance,
        "half_steps": layout.find_half_steps(keys.device)[:coded],
        "half_levels": layout.find_levels(keys.device)[:coded] / 2,
    }
    own = {name: part.contiguous() for name, part in own.items()}
    codes = torch.empty(*leading, layout.count, tokens, dtype=torch.int32, device="cpu")
    scales = torch.empty(*leading, tokens, dtype=torch.float32, device="cpu")
    each, real = (*leading, coded), torch.float32
    call = Quantizing(
        keys=find_address("keys", own["keys"], real, keys.shape),
        centres=find_address("centres", own["centres"], real, (*leading, dim)),
        order=find_address("order", own["order"], torch.int64, each),
        weights=find_address("weights", own["weights"], real, each),
        importance=find_address("importance", own["importance"], real, each),
        most=None if most is None else find_address("most", most, real, leading),
        half_steps=find_address("half_steps", own["half_steps"], real, (coded,)),
        half_levels=find_address("half_levels", own["half_levels"], real, (coded,)),
        codes=find_address("codes", codes, torch.int32, codes.shape),
        scales=find_address("scales", scales, real, scales.shape),
        segments=scales.numel() // tokens, tokens=tokens, threads=torch.get_num_threads(),
    )  # fmt: skip
    call.words = layout.words
    library.round_keys(ctypes.byref(call))
    return codes, scales


def define_quantizer(dim: int) -> tuple[str, ...]:
    """The macros that `SOURCE` is built with."""
    return *define(ELEMENTS[torch.float32], dim, dim, 1), f"-DROUNDINGS={codec.ROUNDINGS}"


@functools.cache
def build_quantizer(dim: int) -> ctypes.CDLL | None:
    """The library for keys of `dim` channels, built if need be; None, with one warning, if it cannot be."""
    warning = "sketches are made by torch, as the kernel could not be built"
    if (library := build_library(SOURCE, define_quantizer(dim), warning)) is not None:
        check_size(Quantizing, library.quantizing_size(), SOURCE)
    return library
