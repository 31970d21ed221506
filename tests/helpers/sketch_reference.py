"""A sketch's estimates, errors and substitutes for unread tokens, in float64 and plain arithmetic.

It shares the quantizers' constants and the choice of words with the package, and no other code. Sketches here are one
head's.
"""

import math

import torch
from torch import Tensor

from qada_cache.sketch import ERRORS, STEPS, Layout, selection
from qada_cache.sketch.codec import Sketch

BITS = (1, 1.5, 2, 4)  # bits of a value, on average, that tests try
TIES = 0.01  # share of a sketch's integers that rounding may decide
MOST = 4.0  # nats: what half the variance of an estimate's error counts at most, or three times its mean


def is_same_but_for_ties(found: Tensor, made: Tensor) -> bool:
    """Whether two tensors of sketches of the same tokens differ by no more than another order of sums can cause.

    Another device adds in another order, so a number near the middle between two representable ones may go to either. A
    centre or a weight, which are bfloat16, then differs by one part in 128 or 256. A few codes of its segment differ
    with it, and their scales. Mistakes, as another token's codes or other channels' weights, change more.
    """
    if found.shape != made.shape or found.dtype != made.dtype:
        return False
    if found.is_floating_point():
        return torch.allclose(found.float(), made.float(), rtol=2**-6, atol=1e-4)
    if found.dtype == torch.int32:  # codes, by their bits
        differing = torch.stack([(found ^ made) >> bit & 1 for bit in range(32)])
    else:  # channels, and scales, which may round to the next number
        differing = (found.int() - made.int()).abs() > 1
    return float(differing.float().mean()) <= TIES


SEGMENT_TOKENS, LAST_TOKENS = 512, 128  # tokens of a segment, and the fewest of the last one; see `small_sketch`


def segment_spans(length: int) -> list[tuple[int, int]]:
    """The first token of every segment, and the one after its last."""
    starts = list(range(0, length, SEGMENT_TOKENS))
    if len(starts) > 1 and length - starts[-1] < LAST_TOKENS:
        starts.pop()
    return list(zip(starts, [*starts[1:], length], strict=True))


def sketch_bytes(length: int, *, dim: int, value_dim: int, bits: float) -> int:
    """Bytes that one head reads of a sketch of `length` tokens."""
    tokens = length * (4 * sum(Layout.from_bits(dim, bits).words) + 1)  # a code and a scale each
    order = 1 if dim <= 256 else 2
    segments = len(segment_spans(length)) * ((2 + order + 2) * dim + 4)  # centre, order and weights, and a unit
    # Noise, variances, mean value, units of slopes; slopes.
    return tokens + segments + 4 * (3 * dim + value_dim) + dim * value_dim // 2


def slopes_of(pairs: Tensor) -> Tensor:
    """The slopes `[..., value_dim, dim]`, from -8 to 7, that a sketch holds two a byte: the first half in low bits."""
    pairs = pairs.int() % 256
    halves = torch.cat([pairs % 16, pairs // 16], dim=-1)
    return torch.where(halves < 8, halves, halves - 16)


def layout_of(sketch: Sketch) -> Layout:
    """The layout whose words add up to those of the sketch."""
    return Layout.from_words(sketch.centres.shape[-1], sketch.codes.shape[-2])


def value_bits(sketch: Sketch) -> list[int]:
    """Bits of every channel `[dim]`, in the sketch's order; 0 for channels without bits."""
    made = layout_of(sketch)
    four, two, one = made.words
    return ([4] * (8 * four) + [2] * (16 * two) + [1] * (32 * one) + [0] * made.dim)[: made.dim]


def odd_values(codes: Tensor, *, words: tuple[int, int, int]) -> Tensor:
    """The odd integers `[tokens, coded]` float64 that codes `[words, tokens]` stand for."""
    rows, place = [], 0
    for bits, count in zip((4, 2, 1), words, strict=True):
        for word in codes[place : place + count].tolist():
            for value in range(32 // bits):
                byte, plane = value % 4, value // 4
                levels = [((token % 2**32) >> (8 * byte + bits * plane)) % 2**bits for token in word]
                rows.append([2 * level - (2**bits - 1) for level in levels])
        place += count
    return torch.tensor(rows, dtype=torch.float64).T


def rotation(size: int) -> Tensor:
    """Float64 `[size, size]`: Hadamard blocks of 8."""
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    return torch.kron(torch.eye(size // 8, dtype=torch.float64), torch.kron(torch.kron(pair, pair), pair))


def token_scales(sketch: Sketch, length: int) -> Tensor:
    """Scales of tokens, each times its segment's unit: float64 `[length]`."""
    parts = [
        sketch.scales[first:last].double() * sketch.units[segment].double()
        for segment, (first, last) in enumerate(segment_spans(length))
    ]
    return torch.cat(parts)


def estimates(*, query: Tensor, sketch: Sketch, length: int, scaling: float) -> Tensor:
    """Scores `[heads, tokens]` of coded keys for `query [heads, dim]`, plus half the variance of their error: so that
    their exponentials are right on average. That half is at most 4 nats, or three times its mean over all tokens."""
    words = layout_of(sketch).words
    odd_levels = odd_values(sketch.codes[:, :length], words=words)
    scales, coded = token_scales(sketch, length), odd_levels.shape[1]
    scores = torch.empty(len(query), length, dtype=torch.float64)
    for head, one in enumerate(query.double()):
        for segment, (first, last) in enumerate(segment_spans(length)):
            weighed = one[sketch.order[segment].long()] / sketch.weights[segment].double()
            rotated = rotation(coded) @ weighed[:coded]
            unit = rotated.abs().max() / 127
            product = odd_levels[first:last] @ (unit * torch.round(rotated / unit)) * scales[first:last]
            error = (weighed.square() * squared_errors(sketch)).sum() * scales[first:last] ** 2
            most = max(MOST, 3 * scaling**2 / 2 * float(one.square() @ channel_noise(sketch, length)))
            scores[head, first:last] = scaling * (product + sketch.centres[segment].double() @ one)
            scores[head, first:last] += (scaling**2 * error / 2).clamp(max=most)
    return scores


def squared_errors(sketch: Sketch) -> Tensor:
    """The mean squared error of every channel `[dim]`, in the sketch's order, in units in which odd integers are coded.
    A channel without bits has the whole square, 1."""
    found = [ERRORS[bits] / (STEPS[bits] / 2) ** 2 if bits else 1.0 for bits in value_bits(sketch)]
    return torch.tensor(found, dtype=torch.float64)


def channel_noise(sketch: Sketch, length: int) -> Tensor:
    """The mean squared error `[dim]` of each channel of the keys."""
    total = torch.zeros(sketch.centres.shape[-1], dtype=torch.float64)
    scales = token_scales(sketch, length)
    for segment, (first, last) in enumerate(segment_spans(length)):
        error = squared_errors(sketch) / sketch.weights[segment].double().square()
        total[sketch.order[segment].long()] += error * scales[first:last].square().sum()
    return total / length


def half_variance(*, query: Tensor, sketch: Sketch, length: int, scaling: float) -> Tensor:
    """Half the variance `[heads]` of the estimates' errors, as a mean over tokens."""
    return scaling**2 * query.double().square() @ channel_noise(sketch, length) / 2


def channel_variances(sketch: Sketch, length: int) -> Tensor:
    """The mean over segments of the variance `[dim]` of each channel of the keys."""
    steps = [STEPS[bits] / 2 if bits else 1.0 for bits in value_bits(sketch)]
    total = torch.zeros(sketch.centres.shape[-1], dtype=torch.float64)
    for segment, (first, last) in enumerate(segment_spans(length)):
        deviation = 1 / (sketch.weights[segment].double() * torch.tensor(steps, dtype=torch.float64))
        total[sketch.order[segment].long()] += deviation.square() * (last - first)
    return total / length


def is_unreliable(*, query: Tensor, sketch: Sketch, length: int, scaling: float) -> Tensor:
    """Whether each head's estimates are too rough to select by: bool `[heads]`."""
    square = query.double().square()
    shared = square @ channel_noise(sketch, length) > selection.NOISE_SHARE * (
        square @ channel_variances(sketch, length)
    )
    half = half_variance(query=query, sketch=sketch, length=length, scaling=scaling)
    return half.isnan() | ((half > selection.UNRELIABLE) & (shared | (half > 4 * selection.UNRELIABLE)))


def log_shares(*, estimates: Tensor, log_buffer: Tensor, bulk_tokens: int) -> Tensor:
    """Log of each token's share of attention times `bulk_tokens` `[heads, tokens]`: 0 is an even share of the bulk.
    `log_buffer [heads]` is the log mass of tokens outside the stored bulk."""
    total = torch.logaddexp(log_buffer.double(), estimates.logsumexp(dim=1))
    return estimates - total[:, None] + math.log(bulk_tokens)


def unread(*, estimates: Tensor, read: Tensor, query: Tensor, sketch: Sketch, scaling: float) -> tuple[Tensor, Tensor]:
    """The substitute for tokens that are not `read`, bool `[tokens]`: log of its weight `[heads]`, and its value
    `[heads, value_dim]`.

    The value is that of the regression line of values on scores, at the mean score of unread tokens, weighted by
    attention.
    """
    logs, values = [], []
    for scores, one in zip(estimates, query.double(), strict=True):
        left = scores[~read]
        value = sketch.mean_value.double()
        if len(left):
            spread = (scores - scores.mean()).square().mean()
            score = (torch.softmax(left, dim=0) * left).sum()
            slope = (slopes_of(sketch.slopes) * sketch.slope_units.double()) @ one * scaling / spread
            value = value + slope * (score - scores.mean())
        logs.append(torch.logsumexp(left, dim=0) + math.log(selection.UNREAD_WEIGHT))
        values.append(value)
    return torch.stack(logs), torch.stack(values)
