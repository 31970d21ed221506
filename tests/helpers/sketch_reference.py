"""What a sketch says of its keys, in float64 and plain arithmetic.

It shares the rotation and constants with the package, and no other code. Sketches here are one head's.
"""

import math

import torch
from torch import Tensor

from qada_cache.sketch import Sketch, codec, rotation, selection


def segment_spans(length: int) -> list[tuple[int, int]]:
    """First and last token, the latter excluded, of every segment: 512 tokens, the last one 256 to 767."""
    starts = list(range(0, length, 512))
    if len(starts) > 1 and length - starts[-1] < 256:
        starts.pop()
    return list(zip(starts, [*starts[1:], length], strict=True))


def sketch_bytes(length: int, *, dim: int, value_dim: int, bits: int) -> int:
    """What one head reads of a sketch of so many tokens."""
    tokens = length * (dim * bits // 8 + 1)  # a code and a scale each
    segments = len(segment_spans(length)) * (2 * 2 * dim + 2 * 4)  # centre and weights, unit and mean square
    return tokens + segments + 4 * (value_dim + dim) + dim * value_dim  # mean value, units of slopes, slopes


def odd_values(codes: Tensor, *, dim: int) -> Tensor:
    """The odd integers `[tokens, dim]` float64 that codes `[tokens, bytes]` stand for."""
    size = codes.shape[1]
    bits = 8 * size // dim
    values = [
        [2 * ((row[d % size] >> (d // size * bits)) % 2**bits) - (2**bits - 1) for d in range(dim)]
        for row in codes.tolist()
    ]
    return torch.tensor(values, dtype=torch.float64).view(len(values), dim)


def token_scales(sketch: Sketch, length: int) -> Tensor:
    """`[length]` float64."""
    parts = [
        sketch.scales[first:last].double() * sketch.units[segment].double()
        for segment, (first, last) in enumerate(segment_spans(length))
    ]
    return torch.cat(parts)


def estimates(*, query: Tensor, sketch: Sketch, length: int, scaling: float) -> Tensor:
    """Scores `[heads, tokens]` that coded keys are expected to weigh, for `query` `[heads, dim]`."""
    dim = query.shape[1]
    turn, odd = rotation(dim, torch.device("cpu")).double(), odd_values(sketch.codes[:length], dim=dim)
    scales = token_scales(sketch, length)
    keys = scales[:, None] * odd  # centred, weighed and rotated
    error = squared_error(8 * sketch.codes.shape[1] // dim) * scales**2  # of a value
    scores = torch.empty(len(query), length, dtype=torch.float64)
    for head, one in enumerate(query.double()):
        for segment, (first, last) in enumerate(segment_spans(length)):
            weighed = one / sketch.weights[segment].double()
            turned = turn @ weighed
            unit = turned.abs().max() / 127
            score = keys[first:last] @ (unit * torch.round(turned / unit)) + sketch.centres[segment].double() @ one
            variance = scaling**2 * (weighed @ weighed) * error[first:last]
            scores[head, first:last] = scaling * score + variance / 2
    return scores


def squared_error(bits: int) -> float:
    """Of a coded value, where a value's odd integer counts once."""
    return codec.ERRORS[bits] / (codec.STEPS[bits] / 2) ** 2


def half_variance(*, query: Tensor, sketch: Sketch, length: int, scaling: float) -> Tensor:
    """Half the variance `[heads]` of what estimates are off by, on average over tokens."""
    error = squared_error(8 * sketch.codes.shape[1] // query.shape[1]) * token_scales(sketch, length) ** 2
    total = torch.zeros(len(query), dtype=torch.float64)
    for segment, (first, last) in enumerate(segment_spans(length)):
        weighed = query.double() / sketch.weights[segment].double()
        total += weighed.square().sum(dim=1) * error[first:last].sum()
    return scaling**2 * total / length / 2


def log_shares(*, estimates: Tensor, log_near: Tensor, bulk_tokens: int) -> Tensor:
    """Log of how many times an even share of the bulk each token gets `[heads, tokens]`; `log_near` `[heads]`."""
    total = torch.logaddexp(log_near.double(), estimates.logsumexp(dim=1))
    return estimates - total[:, None] + math.log(bulk_tokens)


def unread(*, estimates: Tensor, read: Tensor, query: Tensor, sketch: Sketch, scaling: float) -> tuple[Tensor, Tensor]:
    """What stands for the tokens that are not `read` `[tokens]`: log of its weight `[heads]`, `[heads, value_dim]`.

    By the line of regression of values on scores, at the mean score of unread tokens as attention weighs them.
    """
    logs, values = [], []
    for scores, one in zip(estimates, query.double(), strict=True):
        left = scores[~read]
        value = sketch.mean_value.double()
        if len(left):
            spread = (scores - scores.mean()).square().mean()
            score = (torch.softmax(left, dim=0) * left).sum()
            slope = (sketch.slopes * sketch.slope_units.double()) @ one * scaling / spread
            value = value + slope * (score - scores.mean())
        logs.append(torch.logsumexp(left, dim=0) + math.log(selection.UNREAD_WEIGHT))
        values.append(value)
    return torch.stack(logs), torch.stack(values)
