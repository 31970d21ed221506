"""Keys in few bits: the rotation, the quantizer's constants, the layout of codes, and what estimates are worth."""

import math
from dataclasses import dataclass

import pytest
import torch
from sketch_reference import estimates, half_variance, odd_values, segment_spans, token_scales
from torch import Tensor

from qada_cache.sketch import BITS, Sketch, codec, encode_segments, rounded_slopes, segments_of, selection

CPU = torch.device("cpu")
DIMS = (16, 64, 80, 96)
LENGTH = 1700  # three segments, the last of 676 tokens


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sketch_of(keys: Tensor, energies: Tensor | None, bits: int) -> Sketch:
    """Of one head's keys `[tokens, dim]`, without values."""
    dim = keys.shape[1]
    made = encode_segments(keys, energies, bits, last=True)
    return Sketch(**made, mean_value=torch.zeros(4), **rounded_slopes(torch.zeros(4, dim)))


@dataclass
class Unequal:
    """Gaussian keys, each segment's about a mean of its own, and queries, whose channels differ in both.

    Scores have a deviation of 1.
    """

    dim: int
    spread: float = 1.0  # of the logarithms of deviations

    def __post_init__(self) -> None:
        dim, deviations = self.dim, torch.exp(self.spread * random(self.dim, seed=1))
        self.energies = torch.exp(2 * self.spread * random(dim, seed=2))
        means = random(3, dim, seed=4).repeat_interleave(torch.tensor([512, 512, LENGTH - 1024]), dim=0)
        self.keys = random(LENGTH, dim, seed=3) * deviations + means
        self.query = random(100, dim, seed=5) * self.energies.sqrt()
        self.scaling = 1 / float((self.query @ (self.keys - means).mT).std())
        self.scores = self.scaling * self.query.double() @ self.keys.double().mT

    def errors(self, sketch: Sketch) -> Tensor:
        """What the sketch's scores are off by, without the half variance that is added to them; float64."""
        return estimated(self, sketch) - added(self, sketch) - self.scores


def estimated(made: Unequal, sketch: Sketch) -> Tensor:
    return codec.estimated_scores(made.query, sketch, LENGTH, scaling=made.scaling).double()


def added(made: Unequal, sketch: Sketch) -> Tensor:
    """Half the variance of each estimate, by `half_variances`."""
    halves = codec.half_variances(made.query, sketch, scaling=made.scaling).double()
    lengths = torch.tensor([last - first for first, last in segment_spans(LENGTH)])
    return halves.repeat_interleave(lengths, dim=1) * token_scales(sketch, LENGTH) ** 2


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_keeps_scores(dim: int) -> None:
    """Orthogonal, and every channel goes into as many as the largest power of two that divides their number."""
    turn = codec.rotation(dim, CPU)
    torch.testing.assert_close(turn @ turn.mT, torch.eye(dim))
    assert (turn != 0).sum(dim=1).min() == dim & -dim


@pytest.mark.parametrize("bits", BITS)
def test_constants_are_those_of_a_gaussian(bits: int) -> None:
    """By integration: the error at the step given, which is the least of steps near it."""
    x = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])

    def error(step: float) -> float:
        top = 2 ** (bits - 1)
        level = torch.floor(x / step).clamp(-top, top - 1) + 0.5
        return float(((x - level * step).square() * density).sum())

    assert error(codec.STEPS[bits]) == pytest.approx(codec.ERRORS[bits], rel=2e-3)
    assert error(codec.STEPS[bits]) <= min(error(codec.STEPS[bits] * factor) for factor in (0.97, 1.03))
    assert codec.spread_of(bits) == pytest.approx(2 * codec.ERRORS[bits] / codec.STEPS[bits] ** 2)


@pytest.mark.parametrize("with_energies", [False, True])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_what_is_kept_of_a_segment(bits: int, dim: int, with_energies: bool) -> None:
    """In float64: mean, weights, the nearest odd values, and scales that leave the least squared error."""
    made = Unequal(dim, spread=0.5)
    energies = made.energies if with_energies else None
    sketch = sketch_of(made.keys, energies, bits)
    assert sketch.bits == bits
    assert sketch.codes.shape == (LENGTH, dim * bits // 8)
    assert len(sketch.units) == len(segment_spans(LENGTH)) == 3
    for index, (first, last) in enumerate(segment_spans(LENGTH)):
        keys = made.keys[first:last].double()
        # bfloat16 has 8 bits; means near 0 are of sums in float32
        torch.testing.assert_close(sketch.centres[index].double(), keys.mean(dim=0), rtol=2**-8, atol=1e-5)
        centred = keys - sketch.centres[index].double()
        variances = centred.square().mean(dim=0)
        asked = torch.ones(dim).double() if energies is None else energies.double().clamp_min(0.03 * energies.mean())
        weights = (asked / variances) ** 0.25
        weights /= weights.log().mean().exp()
        torch.testing.assert_close(sketch.weights[index].double(), weights, rtol=2**-8, atol=0)
        odd = odd_values(sketch.codes[first:last], dim=dim)
        turned = (centred * sketch.weights[index].double()) @ codec.rotation(dim, CPU).double().mT
        step = codec.STEPS[bits] * turned.square().mean(dim=-1, keepdim=True).sqrt()
        inside = turned.abs() < 2 ** (bits - 1) * step
        assert ((turned - odd * step / 2).abs() <= step / 2 + 1e-5)[inside].all()
        assert (odd.sign() == turned.sign())[turned.abs() > 1e-5].all()
        best = (turned * odd).sum(dim=-1) / odd.square().sum(dim=-1)
        unit = float(sketch.units[index])
        assert unit == pytest.approx(float(best.max()) / 255, rel=1e-5)
        scales = sketch.scales[first:last].double() * unit
        assert ((scales - best).abs() <= (0.5 + 1e-3) * unit).all()
        assert float(sketch.mean_squares[index]) == pytest.approx(float(scales.square().mean()), rel=1e-5)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_estimates_equal_float64(bits: int, dim: int) -> None:
    """From what is stored. Integer products are exact, so float32 rounds sums of two terms and the centre's score."""
    made = Unequal(dim)
    sketch = sketch_of(made.keys, made.energies, bits)
    expected = estimates(query=made.query[:8], sketch=sketch, length=LENGTH, scaling=made.scaling)
    found = estimated(made, sketch)[:8]
    # A turned value that lies between two integers may fall either way in float32: one unit of a query.
    close = torch.isclose(found, expected, rtol=1e-5, atol=1e-4)
    assert close.double().mean() > 0.95
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_estimates_are_off_by_as_much_as_is_said(bits: int, dim: int) -> None:
    """Within a factor of two, of the mean squared error: it takes values for Gaussian and errors for even, and rotation
    makes both nearly so, the less the smaller its blocks."""
    made = Unequal(dim, spread=0.7)
    sketch = sketch_of(made.keys, made.energies, bits)
    ratio = float(made.errors(sketch).square().mean() / (2 * added(made, sketch)).mean())
    assert 0.5 < ratio < 2


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_energies_make_estimates_better(bits: int, dim: int) -> None:
    """Where channels are very unequal."""
    made = Unequal(dim)
    errors = [
        float(made.errors(sketch_of(made.keys, energies, bits)).square().mean()) for energies in (made.energies, None)
    ]
    assert errors[0] < 0.9 * errors[1]
    if dim == 64 and bits > 1:  # a whole Hadamard matrix, and errors that are nearly Gaussian
        assert errors[0] < 0.55 * errors[1]


@pytest.mark.parametrize("bits", BITS)
def test_unreliable_is_said_of_the_mean_over_tokens(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of unlike lengths; one has no sketch, and what is behind a row's segments may be anything."""
    made, lengths = Unequal(16), [LENGTH, 0, 1030]
    rows = [sketch_of(made.keys[: length or 600], made.energies, bits) for length in lengths]
    room = segments_of(LENGTH) + 1

    def padded(tensor: Tensor) -> Tensor:
        filled = tensor.new_full((room, *tensor.shape[1:]), torch.nan)
        filled[: len(tensor)] = tensor
        return filled

    of_heads = ("mean_value", "slopes", "slope_units")
    whole = {name: torch.stack([getattr(row, name) for row in rows])[:, None] for name in of_heads}
    for name in ("units", "centres", "weights", "mean_squares"):
        whole[name] = torch.stack([padded(getattr(row, name)) for row in rows])[:, None]
    codes = torch.zeros(3, 1, 2048, 16 * bits // 8, dtype=torch.uint8)
    sketch = Sketch(codes=codes, scales=codes[..., 0], **whole)
    expected = [
        half_variance(query=made.query, sketch=row, length=length, scaling=made.scaling)
        for row, length in zip(rows, lengths, strict=True) if length
    ]  # fmt: skip
    limit = float(torch.cat(expected).median()) * 1.0001  # none lies there
    monkeypatch.setitem(selection.UNRELIABLE, bits, limit)
    found = selection.unreliable(made.query.expand(3, 1, -1, -1), sketch, lengths, scaling=made.scaling)[:, 0]
    assert not found[1].any()
    for row, half in zip((0, 2), expected, strict=True):
        assert torch.equal(found[row], half > limit)
        assert 0 < found[row].sum() < 100


def test_keys_that_are_all_alike() -> None:
    """They score what the centre does, in whose rounding they all have a share."""
    keys, query = random(1, 32).expand(1100, 32), random(3, 32, seed=1)
    found = codec.estimated_scores(query, sketch_of(keys, None, 2), 1100, scaling=0.2)
    torch.testing.assert_close(found, query @ keys.mT * 0.2, rtol=0, atol=2**-8)


@pytest.mark.parametrize("energies", [None, torch.zeros(16), torch.cat([torch.zeros(8), torch.ones(8)])])
def test_channels_that_say_nothing(energies: Tensor | None) -> None:
    """Keys that are 0, in some channels or in all, and queries that look nowhere: all is finite."""
    keys = random(1100, 16)
    for channels in (slice(0), slice(4, 12), slice(0, 16)):
        keys[:, channels] = 0
        sketch = sketch_of(keys, energies, 2)
        assert all(tensor.isfinite().all() for tensor in sketch.tensors().values())
        assert (sketch.weights > 0).all()
        assert codec.estimated_scores(random(3, 16, seed=1), sketch, 1100, scaling=0.2).isfinite().all()
    assert not sketch.scales.any()


@pytest.mark.parametrize("bits", BITS)
def test_the_mass_of_many_tokens_is_estimated(bits: int) -> None:
    """Scores differ, their sum of exponentials does not; without the term for what codes leave out it would."""
    keys = random(4000, 64) * (0.2 + torch.rand(64, generator=torch.Generator().manual_seed(2)))
    query = random(32, 64, seed=1)
    sketch = sketch_of(keys, None, bits)
    true = (query @ keys.mT * 0.2).logsumexp(dim=-1)
    found = codec.estimated_scores(query, sketch, 4000, scaling=0.2).logsumexp(dim=-1)
    plain = [
        (token_scales(sketch, 4000)[first:last, None] * odd_values(sketch.codes[first:last], dim=64))
        @ codec.rotation(64, CPU).double() / sketch.weights[index].double() + sketch.centres[index].double()
        for index, (first, last) in enumerate(segment_spans(4000))
    ]  # fmt: skip
    without = (query.double() @ torch.cat(plain).mT * 0.2).logsumexp(dim=-1)
    assert (found - true).abs().mean() < (without - true).abs().mean()
    assert (found - true).abs().mean() < 0.1


def test_slopes_are_off_by_half_a_unit_of_their_channel_at_most() -> None:
    """Also of a channel in which keys hardly vary, and of one in which they do not."""
    covariance = torch.randn(2, 3, 24, 16, generator=torch.Generator().manual_seed(0))
    covariance[..., 0] *= 1e-6
    covariance[..., 1] = 0
    made = rounded_slopes(covariance)
    restored = made["slopes"] * made["slope_units"].double().unsqueeze(-2)
    assert ((restored - covariance).abs() <= 0.50001 * covariance.abs().amax(dim=-2, keepdim=True) / 127).all()
