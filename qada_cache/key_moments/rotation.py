"""Rotary positions: turning keys back to position 0, and averaging their moments over the positions of a bulk.

Position `n` turns a key's pairs of dims `(i, partner(i))` by the angles `n * frequency(i)`; dims without a frequency
stay as they are. If unturned keys do not depend on their positions, the moments of a bulk at positions `first .. first
+ length - 1` follow from theirs in closed form, for any length: every second moment is one of the unturned keys times a
mean of `cos` and `sin` of sums and differences of two frequencies.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

LAYOUTS = ("half", "interleaved")


@dataclass(frozen=True)
class Rotation:
    """How one layer turns its keys; without frequencies it does not.

    Args:
        dim: dims of a key.
        frequencies: radians per position of each pair of dims; the first `2 * len(frequencies)` dims are turned.
        layout: pairs of dims: "half", dim `i` with dim `i + len(frequencies)`; "interleaved", dim `2i` with `2i + 1`.
    """

    dim: int
    frequencies: tuple[float, ...] = ()
    layout: str = "half"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown rotary layout {self.layout!r}: use one of {', '.join(LAYOUTS)}")
        if 2 * len(self.frequencies) > self.dim:
            raise ValueError(f"{len(self.frequencies)} rotary frequencies need more than {self.dim} dims")

    @property
    def partners(self) -> Tensor:
        """The index of every dim's partner int64 `[dim]`; unturned dims are their own partners."""
        return _by_dim(self)[1]

    def turn(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys `[..., tokens, dim]` of position 0 at `positions` `[tokens]`; negative positions turn back."""
        frequency, partner, sign = (tensor.to(keys.device) for tensor in _by_dim(self))
        angle = positions.to(keys.device, torch.float64)[:, None] * frequency
        return keys * angle.cos().to(keys.dtype) + keys[..., partner] * (angle.sin() * sign).to(keys.dtype)

    def average(self, mean: Tensor, covariance: Tensor, *, first: int, length: int) -> tuple[Tensor, Tensor]:
        """Moments of keys at every position of `first .. first + length - 1`, each key at each position.

        Args:
            mean: of the keys at position 0, `[..., dim]`.
            covariance: population covariance of the same, `[..., dim, dim]`.
            first, length: in tokens.

        Returns:
            mean `[..., dim]` and population covariance `[..., dim, dim]`, float64 on the CPU.
        """
        _, partner, _ = _by_dim(self)
        cos, sin, cos_cos, cos_sin, sin_sin = _means(self, first, length)
        mean = mean.double().cpu()
        second = covariance.double().cpu() + mean[..., :, None] * mean[..., None, :]
        columns = second[..., partner]
        turned = cos_cos * second + cos_sin * columns + (cos_sin * columns).transpose(-1, -2)
        turned += sin_sin * columns[..., partner, :]
        mean = cos * mean + sin * mean[..., partner]
        return mean, turned - mean[..., :, None] * mean[..., None, :]


@lru_cache(maxsize=64)
def _by_dim(rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Of every dim: its frequency, its partner's index, and the sign of the partner's sine; all `[dim]`."""
    dim, pairs = rotation.dim, len(rotation.frequencies)
    frequency, partner, sign = torch.zeros(dim, dtype=torch.float64), torch.arange(dim), torch.zeros(dim).double()
    pair = torch.arange(pairs)
    one, other = (pair, pair + pairs) if rotation.layout == "half" else (2 * pair, 2 * pair + 1)
    frequency[one] = frequency[other] = torch.tensor(rotation.frequencies, dtype=torch.float64)
    partner[one], partner[other] = other, one
    sign[one], sign[other] = -1.0, 1.0
    return frequency, partner, sign


@lru_cache(maxsize=64)
def _means(rotation: Rotation, first: int, length: int) -> tuple[Tensor, ...]:
    """Means over the positions of `cos`, `sin` `[dim]`, and of their products for two dims `[dim, dim]`.

    The sines carry the sign of their dim. `cos_sin[a, b]` is the mean of `cos_a * sin_b`.
    """
    frequency, _, sign = _by_dim(rotation)
    cos, sin = _mean_cos_sin(frequency, first, length)
    cos_less, sin_less = _mean_cos_sin(frequency[:, None] - frequency[None, :], first, length)
    cos_more, sin_more = _mean_cos_sin(frequency[:, None] + frequency[None, :], first, length)
    cos_cos, sin_sin = (cos_less + cos_more) / 2, (cos_less - cos_more) / 2 * sign[:, None] * sign[None, :]
    cos_sin = (sin_more - sin_less) / 2 * sign[None, :]
    return cos, sin * sign, cos_cos, cos_sin, sin_sin


def _mean_cos_sin(frequency: Tensor, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Means of `cos(n * frequency)` and `sin(n * frequency)` over `n = first .. first + length - 1`, float64.

    The sum of a geometric series (Dirichlet's kernel): its middle term's cosine or sine, times a ratio of sines.
    """
    half = frequency / 2
    whole_turns = (half.sin().abs() < 1e-15) | (frequency == 0)  # 0/0: the limit is 1
    ratio = (length * half).sin() / (length * half.sin()).masked_fill(whole_turns, 1.0)
    ratio = ratio.masked_fill(whole_turns, 1.0)
    middle = (first + (length - 1) / 2) * frequency
    return ratio * middle.cos(), ratio * middle.sin()


def rounded(length: int) -> int:
    """`length` rounded up by at most 64 tokens or one part in 32, for moments. A growing sequence seldom needs new
    moments then, and a row gets the same ones in any batch.
    """
    step = max(64, 1 << max(0, math.ceil(math.log2(max(length, 1))) - 6))
    return -(-length // step) * step
