"""Codes of keys, segment by segment, and the scores that they give.

A key is centred, its channels are ordered by energy times variance and weighed, and it is rotated and quantized with a
scale for each key: `R (w * (k - c)) ~ scale * odd_levels`, odd integers. A query is rotated by the same blocks, `R (q /
w)`, and rounded to 8 bits. So a score takes integer products alone, and all implementations return the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from . import (
    BLOCK,
    SEGMENT_TOKENS,
    WORD_BITS,
    Layout,
    count_segments,
    find_peak,
    find_segment_start,
    pack,
    rotate,
    unpack,
)

QUERY_LEVELS = 127  # a rounded query's largest value
MIN_PEAK = 1e-30  # of a rotated query, below which it is rounded to zeros: its inverse is finite in float32
SCALE_LEVELS = 255  # a rounded scale's largest value
SLOPE_LEVELS = 7  # a rounded slope's largest value: two lie in a byte
# What half the variance of a score's error counts at most: the greater one of so many nats, and so many times its mean
# over tokens. Without a limit, a key that is much longer than the others would seem to outweigh them all.
MOST_HALF, MOST_RISE = 4.0, 3.0
ROUNDINGS = 4  # of a key; more gain nothing
# Of the mean of the channels. A model may have large keys and small queries in a channel, or the reverse, as only their
# product counts. So these only keep weights finite: a greater one would spend bits on such channels.
MIN_ENERGY = 1e-4
MIN_VARIANCE = 1e-8
MIN_MEAN = 1e-28  # below it all channels count as 1: the squares of their weights would not be finite in float32
TINY = torch.finfo(torch.float32).tiny
FIT = ("units", "centres", "order", "weights")  # a segment's parameters, by which its tokens are coded
TOKENS = ("codes", "scales")  # the fields of a `Sketch` with a value for each token, in the last dimension
SEGMENTS = (*FIT, "mean_squares")  # the fields with a value for each segment
CODES = (*TOKENS, *SEGMENTS)
Codes = Callable[[], dict[str, Tensor]]  # returns views of these fields of some segments, by name


@dataclass(eq=False)
class Sketch:
    """The tensors of a sketch: `[batch, kv_heads, ...]`, or one head's; dtypes and shapes: `list_fields`."""

    codes: Tensor  # see `pack`
    scales: Tensor  # in units of the token's segment
    units: Tensor
    centres: Tensor  # the mean key
    order: Tensor  # channels, by descending energy times variance
    weights: Tensor  # `w` in this order
    mean_squares: Tensor  # of the scales
    noise: Tensor  # the squared error of each channel, the mean over the whole bulk
    variances: Tensor  # of each channel within segments, the mean over the whole bulk
    mean_value: Tensor  # of the whole bulk
    slopes: Tensor  # the covariance of values and keys over the whole bulk (see `unpack_slopes`), in units of:
    slope_units: Tensor  # of each channel of keys

    def to_tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return dict(vars(self))

    def __getitem__(self, index: tuple[int, int]) -> "Sketch":
        """The sketch of one row and head."""
        return self.map(lambda tensor: tensor[index])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Sketch":
        """A sketch of `change(tensor)` for each of its tensors."""
        return Sketch(*map(change, self.to_tensors().values()))

    @staticmethod
    def of(keys: Tensor, values: Tensor, energies: Tensor | None, layout: Layout) -> "Sketch":
        """The sketch of bulks of equal length: `keys` `[..., tokens, dim]`, `values` (`value_dim`), and `energies`
        as for `quantize_segments`."""
        codes, tokens = quantize_segments(keys, energies, layout), keys.shape[-2]
        keys, values = keys.float(), values.float()
        mean_key, mean = keys.mean(dim=-2, keepdim=True), values.mean(dim=-2)
        slopes = round_slopes(torch.matmul((values - mean.unsqueeze(-2)).mT, keys - mean_key) / tokens)
        return Sketch(**codes, **average_channels(codes, layout, tokens), **slopes, mean_value=mean)

    @property
    def layout(self) -> Layout:
        """The layout of its codes."""
        return Layout.from_words(self.centres.shape[-1], self.codes.shape[-2])

    @property
    def byte_counts(self) -> tuple[int, int, int]:
        """Bytes of the sketch that one head reads for each token, for each segment, and once."""
        dim, value_dim = self.slope_units.shape[-1], self.mean_value.shape[-1]
        token = self.codes.shape[-2] * WORD_BITS // 8 + 1
        return token, (2 + 2 + self.order.element_size()) * dim + 4, 4 * (value_dim + 3 * dim) + dim * value_dim // 2

    def count_read_bytes(self, length: int) -> int:
        """Bytes of the sketch that one head of a bulk of `length` tokens reads."""
        token, segment, head = self.byte_counts
        return length * token + count_segments(length) * segment + head


def choose_order_dtype(dim: int) -> torch.dtype:
    """The smallest integer dtype of kernels for indices of `dim` channels."""
    return torch.uint8 if dim <= 256 else torch.int16


def has_whole_order(order: Tensor) -> bool:
    """Whether each order, integers `[..., dim]`, has each channel once: kernels use it as an index to write to."""
    channels = torch.arange(order.shape[-1], dtype=torch.int64, device=order.device)
    return bool((order.long().sort(dim=-1).values == channels).all())


def list_fields(dim: int, value_dim: int, words: int, capacity: int) -> dict[str, tuple[torch.dtype, tuple]]:
    """dtype and shape of each tensor of one head's `Sketch` of `words` a key, with room for `capacity` tokens."""
    segments = count_segments(capacity) if capacity else 0
    return {
        "codes": (torch.int32, (words, capacity)),
        "scales": (torch.uint8, (capacity,)),
        "units": (torch.float32, (segments,)),
        "centres": (torch.bfloat16, (segments, dim)),
        "order": (choose_order_dtype(dim), (segments, dim)),
        "weights": (torch.bfloat16, (segments, dim)),
        "mean_squares": (torch.float32, (segments,)),
        "noise": (torch.float32, (dim,)),
        "variances": (torch.float32, (dim,)),
        "mean_value": (torch.float32, (value_dim,)),
        "slopes": (torch.int8, (value_dim, dim // 2)),
        "slope_units": (torch.float32, (dim,)),
    }


def view_span(name: str, tensor: Tensor, start: int, stop: int) -> Tensor:
    """A view of the part of `tensor`, a sketch's `CODES` of this name `[rows, kv_heads, ...]`, for tokens
    `start..stop`, whole segments of a bulk."""
    if name in TOKENS:
        return tensor[..., start:stop]
    return tensor[:, :, start // SEGMENT_TOKENS : count_segments(stop) if stop else 0]


def set_floor(values: Tensor, share: float) -> Tensor:
    """`values` `[..., dim]`, raised to at least `share` times their mean; ones where that is at most `MIN_MEAN`."""
    mean = values.mean(dim=-1, keepdim=True)
    return torch.where(mean > MIN_MEAN, values.clamp_min(share * mean), 1.0)


def round_slopes(covariance: Tensor) -> dict[str, Tensor]:
    """The `slopes` and `slope_units` of a sketch, for the covariance float32 `[..., value_dim, dim]` that they round.
    Channels of keys have a unit each: where keys vary little, queries may be large, and count as much."""
    units = find_peak(covariance, -2) / SLOPE_LEVELS
    slopes = torch.round(covariance / units.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-2))
    low, high = slopes.to(torch.int8).chunk(2, dim=-1)
    return {"slopes": high << 4 | low & 15, "slope_units": units}


def unpack_slopes(slopes: Tensor) -> Tensor:
    """int8 `[..., value_dim, dim]` of a sketch's `slopes` `[..., value_dim, dim / 2]`. A byte's lower four bits are the
    slope of channel `i`, its upper four that of channel `i + dim / 2`, each with its sign."""
    return torch.cat([slopes << 4 >> 4, slopes >> 4], dim=-1)


def find_fit(keys: Tensor, energies: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Centres, order and weights of segments of float32 keys; arguments as for `quantize`."""
    centre = keys.mean(dim=-2).to(torch.bfloat16)
    centred = keys - centre.float().unsqueeze(-2)
    variances = set_floor(centred.square().mean(dim=-2), MIN_VARIANCE)
    order = (energies * variances).argsort(dim=-1, descending=True, stable=True)
    weights = (variances.gather(-1, order).rsqrt() / layout.find_half_steps(keys.device)).to(torch.bfloat16)
    return {"centres": centre, "order": order.to(choose_order_dtype(layout.dim)), "weights": weights}


def round_keys(
    keys: Tensor, fit: Mapping[str, Tensor], importance: Tensor, most: Tensor | None, layout: Layout
) -> tuple[Tensor, Tensor]:
    """`codes`, and scales float32 `[..., tokens]`, of float32 keys `[..., tokens, dim]` under the `FIT` of their
    segments. Scales leave the least error, in which a coded channel counts by its `importance` `[..., coded]`. They are
    `most` `[...]`, if that is given, before the last rounding."""
    weights, coded = fit["weights"].float(), slice(layout.coded)
    centred = keys - fit["centres"].float().unsqueeze(-2)
    index = fit["order"].long()[..., None, coded].expand(*centred.shape[:-1], -1)
    rotated = rotate(centred.gather(-1, index) * weights[..., None, coded])
    importance, half = importance.unsqueeze(-2), layout.find_levels(keys.device)[coded] / 2
    scale = (rotated * layout.find_half_steps(keys.device)[coded]).square().mean(dim=-1).sqrt()
    for _ in range(ROUNDINGS):  # each to the nearest levels, then the scale that leaves these the least error
        scale = scale if most is None else scale.minimum(most.unsqueeze(-1))
        level = torch.floor(rotated / (2 * scale.unsqueeze(-1)).clamp_min(TINY)).clamp(-half, half - 1)
        odd_levels = 2 * level + 1
        scale = (importance * rotated * odd_levels).sum(dim=-1) / (importance * odd_levels.square()).sum(dim=-1)
    return pack(level + half, layout), scale


def quantize(
    keys: Tensor, energies: Tensor | None, layout: Layout, fit: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Code segments of keys, one for each of the leading dimensions of `keys` `[..., tokens, dim]`.

    `energies` float32 `[..., dim]` are of queries; without them all channels are taken to be alike. Returns those of
    `Sketch`'s tensors that a segment has, without the dimension of segments. Scales leave the least error of scores.
    With the `FIT` of another coding, tokens are coded under it, each by itself: its units bound their scales.
    """
    wide = keys.float()
    if energies is None:
        energies = wide.new_ones(layout.dim)
    energies = set_floor(energies.float().expand(*wide.shape[:-2], -1), MIN_ENERGY)
    used = find_fit(wide, energies, layout) if fit is None else {name: fit[name] for name in FIT}
    most = None if fit is None else SCALE_LEVELS * used["units"]
    order = used["order"].long()
    # A rotated channel's error goes to all channels of its block alike.
    importance = energies.gather(-1, order) / used["weights"].float().square()
    importance = importance.unflatten(-1, (-1, BLOCK)).mean(dim=-1).repeat_interleave(BLOCK, dim=-1)
    codes, scale = round_keys(wide, used, importance[..., : layout.coded], most, layout)
    unit = scale.amax(dim=-1) / SCALE_LEVELS if fit is None else used["units"]
    scales = torch.round(scale / unit.clamp_min(TINY).unsqueeze(-1)).clamp(0, SCALE_LEVELS)
    coded = {"codes": codes, "scales": scales.to(torch.uint8), "units": unit}
    return coded | used | {"mean_squares": average_squares(scales, unit)}


def average_squares(scales: Tensor, units: Tensor) -> Tensor:
    """The `mean_squares` of segments with these scales `[..., tokens]` and units `[...]`."""
    return (scales * units.unsqueeze(-1)).square().mean(dim=-1)


def quantize_segments(keys: Tensor, energies: Tensor | None, layout: Layout) -> dict[str, Tensor]:
    """`CODES` of `keys` `[..., tokens, dim]`, by name: whole segments, or all tokens up to a bulk's last. Fields
    are laid out as in `list_fields`, tokens or segments side by side. `energies` float32 are `[..., dim]`, or None."""
    tokens = keys.shape[-2]
    start = find_segment_start(tokens) if tokens % SEGMENT_TOKENS else tokens
    parts = []
    for part, size in ((keys[..., :start, :], SEGMENT_TOKENS), (keys[..., start:, :], tokens - start)):
        if part.shape[-2]:
            segments = part.unflatten(-2, (-1, size))
            each = None if energies is None else energies.unsqueeze(-2)
            coded = quantize(segments, each, layout)
            coded["codes"] = coded["codes"].transpose(-3, -2).flatten(-2)  # all tokens of a word side by side
            parts.append(coded | {"scales": coded["scales"].flatten(-2)})
    axes = {"centres": -2, "order": -2, "weights": -2}
    return {name: torch.cat([part[name] for part in parts], dim=axes.get(name, -1)) for name in parts[0]}


def average_channels(codes: dict[str, Tensor], layout: Layout, length: int) -> dict[str, Tensor]:
    """`noise` and `variances` of a sketch of `length` tokens, from its `CODES` without unused room."""
    count, device = codes["units"].shape[-1], codes["units"].device
    tokens = torch.full((count,), SEGMENT_TOKENS, dtype=torch.float32, device=device)
    tokens[-1:].fill_(length - find_segment_start(length))  # a number that is assigned is copied, and waited for
    share, square = tokens / length, codes["weights"].float().square()
    noise = layout.find_errors(device) / square * (codes["mean_squares"] * share).unsqueeze(-1)  # [..., segments, dim]
    variances = share.unsqueeze(-1) / (square * layout.find_half_steps(device).square())
    order = codes["order"].long()
    return {
        name: torch.zeros_like(ordered).scatter_(-1, order, ordered).sum(dim=-2)
        for name, ordered in (("noise", noise), ("variances", variances))
    }


def estimate_scores(query: Tensor, sketch: Sketch, length: int, *, scaling: float, expected: bool = True) -> Tensor:
    """Scores float32 `[queries, length]` of one head's coded keys, whose exponential is a weight's expected value.

    A score is off by a Gaussian of variance `sigma^2 = scaling^2 sum_i (q / w)_i^2 e_i^2 scale^2`, `e_i^2` the squared
    error of a value (`Layout.find_errors`); the mean of its exponential is that of `score + sigma^2 / 2`, which is what
    is returned, up to a limit (`MOST_HALF`, `MOST_RISE`). Without it, all that is far would seem lighter than it is.
    `query` is `[queries, dim]` float32. Without `expected` it is the score alone, to which `coded.score_residuals` are
    added.
    """
    start, layout, count = find_segment_start(length), sketch.layout, count_segments(length)
    order = sketch.order[:count, None].long().expand(-1, len(query), -1)
    weighed = query.expand_as(order).gather(-1, order) / sketch.weights[:count, None].float()  # q / w of every segment
    spread = 0.5 * scaling**2 * torch.matmul(weighed.square(), layout.find_errors(query.device)).unsqueeze(-1)
    mean = 0.5 * scaling**2 * torch.matmul(query.square(), sketch.noise).unsqueeze(-1)
    widest = ((MOST_RISE * mean).clamp_min(MOST_HALF) / spread).sqrt()  # the greatest scale that counts
    rotated = rotate(weighed[..., : layout.coded])
    unit = rotated.abs().amax(dim=-1, keepdim=True).clamp_min(MIN_PEAK) / QUERY_LEVELS
    integers = torch.round(rotated / unit)
    spans, closed = [], [(0, start, count - 1)] if start else []
    for first, stop, segments in (*closed, (start, length, 1)):
        which = slice(first // SEGMENT_TOKENS, first // SEGMENT_TOKENS + segments)
        odd_levels = unpack(sketch.codes[:, first:stop], layout).unflatten(0, (segments, -1))
        products = torch.matmul(integers[which], odd_levels.mT)  # exact: integers below 2 ** 24
        middle = torch.matmul(sketch.centres[which].float(), query.mT).unsqueeze(-1) * scaling
        scale = sketch.scales[first:stop].float().unflatten(0, (segments, 1, -1)) * sketch.units[which, None, None]
        scores = middle + scale * (scaling * unit[which] * products)
        if expected:
            scores += spread[which] * scale.minimum(widest[which]).square()
        spans.append(scores.transpose(0, 1).flatten(1))  # of [segments, queries, tokens]
    return torch.cat(spans, dim=1)
