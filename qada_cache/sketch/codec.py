"""Codes of keys, segment by segment, and the scores that they give.

A key is centred, weighed, rotated and quantized with a scale of its own: `R (w * (k - c)) ~ scale * levels`, where
`levels` are odd integers, `w = (m / s)^(1/4)` weighs each channel by the energy `m` of the queries and the variance `s`
of the keys in it, and `R` is a signed Hadamard matrix, after which no channel stands out. A query is turned alike,
`R (q / w)`, and rounded to 8 bits, so that a score takes integer products alone and every implementation finds the
same. `c`, `w` and the unit of the scales belong to a segment (`segments.py`) and follow from its keys.
"""

import functools
import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .segments import SEGMENT_TOKENS, segment_start, segments_of

BITS = (1, 2, 4)
# For a Gaussian of deviation 1: the step of the uniform quantizer that is best, and the squared error it leaves.
STEPS = {1: 1.5958, 2: 0.9957, 4: 0.3352}
ERRORS = {1: 0.3634, 2: 0.1188, 4: 0.01154}
QUERY_LEVELS = 127  # a rounded query's largest value
SCALE_LEVELS = 255  # a rounded scale's largest value
SLOPE_LEVELS = 127  # a rounded slope's largest value
LEAST_ENERGY = 0.03  # of the mean of the channels: a guard against queries unlike those that were seen
LEAST_VARIANCE = 1e-4  # likewise


@dataclass(eq=False)
class Sketch:
    """The tensors of a sketch; `...` are `[batch, kv_heads]`, or nothing for one head's.

    Attributes:
        codes: uint8 `[..., capacity, dim * bits / 8]`. Byte `j` holds, from its lowest bits on, the values `j`,
            `j + dim * bits / 8`, and so on, each as the index of its level.
        scales: uint8 `[..., capacity]`, in units of the token's segment.
        units: float32 `[..., segments]`.
        centres: bfloat16 `[..., segments, dim]`, the mean key.
        weights: bfloat16 `[..., segments, dim]`, `w`.
        mean_squares: float32 `[..., segments]`, of the scales.
        mean_value: float32 `[..., value_dim]`, of the whole bulk.
        slopes: int8 `[..., value_dim, dim]`, the covariance of values and keys over the whole bulk, in units of:
        slope_units: float32 `[..., dim]`, of each channel of keys.
    """

    codes: Tensor
    scales: Tensor
    units: Tensor
    centres: Tensor
    weights: Tensor
    mean_squares: Tensor
    mean_value: Tensor
    slopes: Tensor
    slope_units: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __getitem__(self, index: tuple[int, int]) -> "Sketch":
        """One row's and head's."""
        return Sketch(*(tensor[index] for tensor in self.tensors().values()))

    @property
    def bits(self) -> int:
        """Of a coded value."""
        return self.codes.shape[-1] * 8 // self.centres.shape[-1]

    @property
    def byte_counts(self) -> tuple[int, int, int]:
        """Bytes that one head reads of it for each token, for each segment, and for what unread tokens are worth."""
        dim, value_dim = self.slopes.shape[-1], self.slopes.shape[-2]
        return self.codes.shape[-1] + 1, 2 * 2 * dim + 2 * 4, 4 * (value_dim + dim) + dim * value_dim

    def read_bytes(self, length: int) -> int:
        """Bytes that one head of a bulk of `length` tokens reads of it."""
        token, segment, head = self.byte_counts
        return length * token + segments_of(length) * segment + head


def code_bytes(dim: int, bits: int) -> int:
    """Bytes of one key's codes."""
    return dim * bits // 8


def spread_of(bits: int) -> float:
    """Half the squared error of a coded value, in units of its key's squared scale (half a step)."""
    return 0.5 * ERRORS[bits] / (STEPS[bits] / 2) ** 2


@functools.cache
def _rotation(dim: int) -> Tensor:
    block = dim & -dim  # the largest power of two that divides it
    made: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # torch's defaults are the user's
    hadamard = torch.ones(1, 1, **made)
    while len(hadamard) < block:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator("cpu").manual_seed(0), **made) * 2.0 - 1
    return torch.kron(torch.eye(dim // block, **made), hadamard / math.sqrt(block)) * signs


@functools.cache
@torch.inference_mode(False)  # it is used outside of it as well
def rotation(dim: int, device: torch.device) -> Tensor:
    """The orthogonal `R` `[dim, dim]` float32: of Hadamard blocks where `dim` is not a power of two."""
    return _rotation(dim).to(device)


def channel_weights(centred: Tensor, energies: Tensor | None) -> Tensor:
    """`w` bfloat16 `[..., dim]` for centred keys float32 `[..., tokens, dim]` and the queries' energies `[..., dim]`.

    The error of a score is least if what is coded of a channel grows as the geometric mean of the deviations of its
    keys and its queries. Without energies, queries are taken to be alike in all channels.
    """
    variances = centred.square().mean(dim=-2)
    variances = variances.clamp_min(LEAST_VARIANCE * variances.mean(dim=-1, keepdim=True))
    energies = torch.ones_like(variances) if energies is None else energies.float()
    energies = energies.clamp_min(LEAST_ENERGY * energies.mean(dim=-1, keepdim=True))
    ratio = torch.where((variances > 0) & (energies > 0), energies / variances, 1.0)
    ratio = ratio / ratio.log().mean(dim=-1, keepdim=True).exp()  # their common factor says nothing
    return ratio.pow(0.25).clamp(1e-4, 1e4).to(torch.bfloat16)


def rounded_slopes(covariance: Tensor) -> dict[str, Tensor]:
    """The `slopes` and `slope_units` of a sketch, for the covariance float32 `[..., value_dim, dim]` that they round.

    Channels of keys have a unit each: where keys vary little, queries may be large, and count as much.
    """
    units = covariance.abs().amax(dim=-2) / SLOPE_LEVELS
    slopes = torch.round(covariance / units.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-2))
    return {"slopes": slopes.to(torch.int8), "slope_units": units}


def encode(keys: Tensor, energies: Tensor | None, bits: int) -> dict[str, Tensor]:
    """Code segments of keys.

    Args:
        keys: `[..., tokens, dim]`, any floating dtype, each of the leading dimensions a segment of its own;
            `dim * bits` a multiple of 8.
        energies: float32 `[..., dim]`, of queries, or None.
        bits: of `BITS`.

    Returns:
        those of `Sketch`'s tensors that a segment has, without the dimension of segments: codes `[..., tokens, *]`,
        scales `[..., tokens]`, which leave the least squared error, units, centres, weights, mean_squares.
    """
    dim, levels = keys.shape[-1], 2**bits
    wide = keys.float()
    centre = wide.mean(dim=-2).to(torch.bfloat16)
    centred = wide - centre.float().unsqueeze(-2)
    weight = channel_weights(centred, energies)
    turned = torch.matmul(centred * weight.float().unsqueeze(-2), rotation(dim, keys.device).mT)
    step = STEPS[bits] * turned.square().mean(dim=-1, keepdim=True).sqrt()
    tiny = torch.finfo(torch.float32).tiny
    index = torch.floor(turned / step.clamp_min(tiny)).clamp(-levels // 2, levels // 2 - 1) + levels // 2
    odd = 2 * index - (levels - 1)
    scale = (turned * odd).sum(dim=-1) / odd.square().sum(dim=-1)
    unit = scale.amax(dim=-1) / SCALE_LEVELS
    scales = torch.round(scale / unit.clamp_min(tiny).unsqueeze(-1)).clamp_max(SCALE_LEVELS)
    planes = index.to(torch.uint8).unflatten(-1, (8 // bits, code_bytes(dim, bits)))
    codes = planes[..., 0, :].clone()
    for plane in range(1, 8 // bits):
        codes |= planes[..., plane, :] << (plane * bits)
    return {
        "codes": codes,
        "scales": scales.to(torch.uint8),
        "units": unit,
        "centres": centre,
        "weights": weight,
        "mean_squares": (scales * unit.unsqueeze(-1)).square().mean(dim=-1),
    }


def encode_segments(keys: Tensor, energies: Tensor | None, bits: int, *, last: bool) -> dict[str, Tensor]:
    """Code tokens `[..., tokens, dim]` that begin a segment, in segments of their own; arguments as for `encode`.

    Args:
        keys: see `encode`.
        energies: float32, of the leading dimensions and `[dim]`.
        bits: see `encode`.
        last: whether the bulk ends with them; else they fill their segments.

    Returns:
        as `encode`, with the dimension of segments behind the leading ones, and all tokens side by side.
    """
    tokens = keys.shape[-2]
    start = segment_start(tokens) if last else tokens
    parts = []
    for part in (keys[..., :start, :], keys[..., start:, :]):
        if part.shape[-2]:
            segments = part.unflatten(-2, (-1, SEGMENT_TOKENS)) if part.shape[-2] == start else part.unsqueeze(-3)
            made = encode(segments, None if energies is None else energies.unsqueeze(-2), bits)
            parts.append({name: t.flatten(-3, -2) if name == "codes" else t for name, t in made.items()})
            parts[-1]["scales"] = parts[-1]["scales"].flatten(-2)
    axes = {"codes": -2, "centres": -2, "weights": -2}
    return {name: torch.cat([part[name] for part in parts], dim=axes.get(name, -1)) for name in parts[0]}


def decode(codes: Tensor, bits: int) -> Tensor:
    """The odd integers `[..., tokens, dim]` float32 of codes `[..., tokens, dim * bits / 8]`."""
    levels = 2**bits
    planes = [(codes >> (plane * bits)) & (levels - 1) for plane in range(8 // bits)]
    return 2 * torch.cat(planes, dim=-1).float() - (levels - 1)


def rounded_query(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[..., dim]` float32 in whole numbers of at most 127, weighed and rotated; and their unit `[..., 1]`.

    `weights` `[..., dim]` are a segment's, for each query.
    """
    turned = torch.matmul(query / weights.float(), rotation(query.shape[-1], query.device).mT)
    unit = turned.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / QUERY_LEVELS
    return torch.round(turned / unit), unit


def half_variances(query: Tensor, sketch: Sketch, *, scaling: float) -> Tensor:
    """Half the variance of what estimates are off by, per squared scale: float32 `[..., queries, segments]`.

    `query` is `[..., queries, dim]`, with the leading dimensions of the sketch. What a code leaves of a key is as
    likely to point one way as another: the variance is `scaling^2 |q / w|^2 e^2`, `e^2` the squared error of a value.
    """
    weighed = query.float().unsqueeze(-2) / sketch.weights.float().unsqueeze(-3)
    return spread_of(sketch.bits) * scaling**2 * weighed.square().sum(dim=-1)


def estimated_scores(query: Tensor, sketch: Sketch, length: int, *, scaling: float) -> Tensor:
    """What one head's coded keys are expected to weigh, as scores.

    A score is off by a Gaussian of variance `sigma^2` (`half_variances`); the mean of its exponential is that of
    `score + sigma^2 / 2`, which is what is returned. Without it, all that is far would seem lighter than it is.

    Args:
        query: `[queries, dim]` float32.
        sketch: one head's.
        length: tokens of the bulk.
        scaling: multiplies the scores.

    Returns:
        `[queries, length]` float32.
    """
    start = segment_start(length)
    found = []
    spreads = half_variances(query, sketch, scaling=scaling)
    for first, stop, segments in ((0, start, start // SEGMENT_TOKENS), (start, length, 1)):
        if first == stop:
            continue
        which = slice(first // SEGMENT_TOKENS, first // SEGMENT_TOKENS + segments)
        integers, unit = rounded_query(query, sketch.weights[which].unsqueeze(1))  # [segments, queries, dim]
        levels = decode(sketch.codes[first:stop], sketch.bits).unflatten(0, (segments, -1))
        products = torch.matmul(integers, levels.mT)  # exact: integers below 2 ** 24
        middle = torch.matmul(sketch.centres[which].float(), query.mT).unsqueeze(-1) * scaling
        scale = sketch.scales[first:stop].float().unflatten(0, (segments, 1, -1)) * sketch.units[which, None, None]
        spread = spreads[:, which].mT.unsqueeze(-1)
        scores = middle + scale * (scaling * unit * products + spread * scale)  # [segments, queries, tokens]
        found.append(scores.transpose(0, 1).flatten(1))
    return torch.cat(found, dim=1)
