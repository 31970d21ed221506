"""Which implementation codes keys as they are stored: Triton's kernels on a GPU, once tried there; else torch."""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..said_once import warn_once
from ..sketch import LAST_TOKENS, SEGMENT_TOKENS, Layout
from ..sketch.codec import Sketch, average_channels, list_fields, quantize_segments, round_slopes
from ..sketch.coded import RUNGS, RecordLayout, code_tokens, decode_keys, decode_values, estimate_keys, fit_records
from .choice import AUTO_DEVICES, explain_unsupported
from .reference import find_fault

logger = logging.getLogger(__name__)

ALIKE = 0.99  # of codes, scales and orders, at least: sums in another order round some to a neighbour
ROWS, HEADS = 2, 2  # of a trial


class Coder(NamedTuple):
    """What writes into a sketch's tensors."""

    code: Callable[[Sketch, slice, int, Tensor, Tensor | None], None]  # `triton.coding.code_segments`
    derive: Callable[[Sketch, slice, int, Tensor], None]  # `triton.deriving.derive`
    # `triton.recording.code_records`.
    record: Callable[[Sketch, slice, int, Tensor, Tensor, Tensor, RecordLayout], Tensor]
    decode: Callable[..., tuple[Tensor, Tensor]]  # `triton.decoding.decode_tokens`, which only reads them


def choose_coder(
    kernels: str, device: torch.device, dtype: torch.dtype, layout: Layout, value_dim: int, *, plain: bool
) -> Coder | None:
    """What codes keys of `dtype` beside values of `value_dim`, `plain` without query energies; None: torch is to.
    `kernels` is one of `choice.KINDS`.

    The trial, which a process makes once for each kind, waits for the device.
    """
    if kernels == "torch" or device.type not in AUTO_DEVICES:
        return None
    return _find_coder(device, dtype, layout, value_dim, plain)


@functools.cache
def _find_coder(device: torch.device, dtype: torch.dtype, layout: Layout, value_dim: int, plain: bool) -> Coder | None:
    like = torch.empty(1, 1, 1, layout.dim, dtype=dtype, device=device)
    if explain_unsupported(like, like, like, None) is not None:
        return None  # decoding tokens needs the same, and warns of it
    from .triton.coding import code_segments
    from .triton.decoding import decode_tokens
    from .triton.deriving import derive
    from .triton.recording import code_records

    coder = Coder(code_segments, derive, code_records, decode_tokens)
    if (fault := find_coding_fault(coder, device, dtype, layout, value_dim, plain)) is None:
        return coder
    warn_once(logger, f"keys are coded on {device} by torch's operations, not by Triton's kernels: {fault}")
    return None


def find_coding_fault(
    coder: Coder, device: torch.device, dtype: torch.dtype, layout: Layout, value_dim: int, plain: bool
) -> str | None:
    """The fault of a coder on this device, as of `reference.find_fault`, by two segments of made-up tokens. Other
    arguments are as for `choose_coder`."""
    made, tokens = torch.Generator("cpu").manual_seed(0), SEGMENT_TOKENS + LAST_TOKENS + 5  # two segments
    keys, spread = (
        torch.randn(*shape, layout.dim, generator=made, dtype=torch.float32, device="cpu")
        for shape in ((ROWS, HEADS, tokens), (2, ROWS, HEADS, 1))
    )
    # Means of segments lie on numbers of bfloat16: halfway between two, sums in another order give another centre.
    parts = [part - part.mean(dim=-2, keepdim=True) for part in keys.split(SEGMENT_TOKENS, dim=-2)]
    keys = torch.cat(parts, dim=-2) * (2 * spread[0]).exp() + (3 * spread[1]).bfloat16()
    keys = keys.to(dtype)
    energies = None if plain else (2 * spread[1, 0, :, 0]).exp()
    covariance = torch.randn(ROWS, HEADS, value_dim, layout.dim, generator=made, dtype=torch.float32, device="cpu")
    values = torch.randn(ROWS, HEADS, tokens, value_dim, generator=made, dtype=torch.float32, device="cpu")
    values, weights = values.to(dtype), spread[0, 0, :, 0].exp()
    records = RecordLayout(layout.dim, value_dim, *RUNGS[8])
    expected = quantize_segments(keys, None if energies is None else energies.expand(ROWS, -1, -1), layout)
    expected |= average_channels(expected, layout, tokens) | round_slopes(covariance)
    if has_records := RecordLayout.serves(layout.dim, value_dim):
        predicted = estimate_keys(expected, layout)
        coded = code_tokens(keys, values, predicted, weights, records)
        known = Sketch(**expected, mean_value=values.float().mean(dim=-2))
        decoded = decode_keys(coded, predicted, weights, records), decode_values(coded, records)
        expected |= {"records": coded} | dict(
            zip(("keys", "values"), (part.to(dtype) for part in decoded), strict=True)
        )

    def compute() -> tuple[Tensor, ...]:
        fields = list_fields(layout.dim, value_dim, layout.count, tokens).items()
        there = {name: torch.zeros(ROWS, HEADS, *shape, dtype=kind, device=device) for name, (kind, shape) in fields}
        sketch, rows = Sketch(**there), slice(0, ROWS)
        coder.code(sketch, rows, 0, keys.to(device), None if energies is None else energies.to(device))
        coder.derive(sketch, rows, tokens, covariance.to(device))
        if has_records:
            held = (part.to(device).split([SEGMENT_TOKENS, tokens - SEGMENT_TOKENS], dim=2) for part in (keys, values))
            coding = weights.to(device), records
            found = [
                coder.record(sketch, rows, first, of_keys, of_values, *coding)
                for first, (of_keys, of_values) in enumerate(zip(*held, strict=True))
            ]
            there["records"] = fit_records(torch.cat(found, dim=2), records.size)
            of_coded = coded.to(device), known.map(lambda tensor: tensor.to(device)), rows, slice(0, HEADS), *coding
            there["keys"], there["values"] = coder.decode(*of_coded, (keys, values), first=0, segments=2)
        return _reduce_to_compared({name: there[name].cpu() for name in expected}, expected)

    return find_fault(compute, _reduce_to_compared(expected, expected))


def _reduce_to_compared(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """What has to be the same: numbers, and whether nearly all integers are those that are expected."""
    compared = []
    for name, one in expected.items():
        if one.is_floating_point():
            compared.append(found[name])
        else:
            compared.append((found[name] == one).float().mean() >= ALIKE)
    return tuple(compared)
