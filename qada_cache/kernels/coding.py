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
from .reference import CompileAhead, find_fault

logger = logging.getLogger(__name__)

MIN_EQUAL = 0.99  # share of equal codes, scales and orders: sums in another order round some to a neighbour
ROWS, HEADS = 2, 2  # of a trial


class Coder(NamedTuple):
    """The functions that code keys and values into a sketch and records, and decode records."""

    code: Callable[[Sketch, slice, int, Tensor, Tensor | None], None]  # `triton.coding.code_segments`
    derive: Callable[[Sketch, slice, int, Tensor], None]  # `triton.deriving.derive`
    # `triton.recording.code_records`.
    record: Callable[[Sketch, slice, int, Tensor, Tensor, Tensor, RecordLayout], Tensor]
    decode: Callable[..., tuple[Tensor, Tensor]]  # `triton.decoding.decode_tokens`


def choose_coder(
    kernels: str, device: torch.device, dtype: torch.dtype, layout: Layout, value_dim: int, *, plain: bool
) -> Coder | None:
    """The `Coder` for keys of `dtype` and values of `value_dim` channels; None if torch has to code them.

    `plain`: there are no query energies. `kernels` is one of `choice.KINDS`. A process tries each kind of coder once,
    and waits for the device then.
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
    from .triton.launching import compile_ahead
    from .triton.recording import code_records

    coder = Coder(code_segments, derive, code_records, decode_tokens)
    if (fault := find_coding_fault(coder, device, dtype, layout, value_dim, plain, compile_ahead)) is None:
        return coder
    warn_once(logger, f"keys are coded on {device} by torch's operations, not by Triton's kernels: {fault}")
    return None


def find_coding_fault(
    coder: Coder,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout,
    value_dim: int,
    plain: bool,
    compile_ahead: CompileAhead | None = None,
) -> str | None:
    """The fault of a coder on this device, as `reference.find_fault` says it, which has `compile_ahead`. It codes two
    segments of random tokens. Other arguments are as for `choose_coder`."""
    generator, tokens = torch.Generator("cpu").manual_seed(0), SEGMENT_TOKENS + LAST_TOKENS + 5  # two segments
    keys, spread = (
        torch.randn(*shape, layout.dim, generator=generator, dtype=torch.float32, device="cpu")
        for shape in ((ROWS, HEADS, tokens), (2, ROWS, HEADS, 1))
    )
    # Means of segments are exact in bfloat16: halfway between two of its numbers, sums in another order would round to
    # another centre.
    centred = [part - part.mean(dim=-2, keepdim=True) for part in keys.split(SEGMENT_TOKENS, dim=-2)]
    keys = torch.cat(centred, dim=-2) * (2 * spread[0]).exp() + (3 * spread[1]).bfloat16()
    keys = keys.to(dtype)
    energies = None if plain else (2 * spread[1, 0, :, 0]).exp()
    covariance = torch.randn(ROWS, HEADS, value_dim, layout.dim, generator=generator, dtype=torch.float32, device="cpu")
    values = torch.randn(ROWS, HEADS, tokens, value_dim, generator=generator, dtype=torch.float32, device="cpu")
    values, weights = values.to(dtype), spread[0, 0, :, 0].exp()
    records = RecordLayout(layout.dim, value_dim, *RUNGS[8])
    expected = quantize_segments(keys, None if energies is None else energies.expand(ROWS, -1, -1), layout)
    expected |= average_channels(expected, layout, tokens) | round_slopes(covariance)
    if has_records := RecordLayout.serves(layout.dim, value_dim):
        predicted = estimate_keys(expected, layout)
        coded = code_tokens(keys, values, predicted, weights, records)
        expected_sketch = Sketch(**expected, mean_value=values.float().mean(dim=-2))
        decoded = decode_keys(coded, predicted, weights, records), decode_values(coded, records)
        expected |= {"records": coded} | dict(
            zip(("keys", "values"), (part.to(dtype) for part in decoded), strict=True)
        )

    def compute() -> tuple[Tensor, ...]:
        fields = list_fields(layout.dim, value_dim, layout.count, tokens).items()
        tensors = {name: torch.zeros(ROWS, HEADS, *shape, dtype=kind, device=device) for name, (kind, shape) in fields}
        sketch, rows = Sketch(**tensors), slice(0, ROWS)
        coder.code(sketch, rows, 0, keys.to(device), None if energies is None else energies.to(device))
        coder.derive(sketch, rows, tokens, covariance.to(device))
        if has_records:
            split = (part.to(device).split([SEGMENT_TOKENS, tokens - SEGMENT_TOKENS], dim=2) for part in (keys, values))
            coding = weights.to(device), records
            segment_records = [
                coder.record(sketch, rows, first, segment_keys, segment_values, *coding)
                for first, (segment_keys, segment_values) in enumerate(zip(*split, strict=True))
            ]
            tensors["records"] = fit_records(torch.cat(segment_records, dim=2), records.size)
            on_device = expected_sketch.map(lambda tensor: tensor.to(device))
            operands = coded.to(device), on_device, rows, slice(0, HEADS), *coding
            tensors["keys"], tensors["values"] = coder.decode(*operands, (keys, values), first=0, segments=2)
        return _reduce_to_compared({name: tensors[name].cpu() for name in expected}, expected)

    return find_fault(compute, _reduce_to_compared(expected, expected), compile_ahead=compile_ahead)


def _reduce_to_compared(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The tensors to compare: floats as they are; for integers a bool, whether `MIN_EQUAL` of them are as expected."""
    compared = []
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            compared.append(found[name])
        else:
            compared.append((found[name] == tensor).float().mean() >= MIN_EQUAL)
    return tuple(compared)
