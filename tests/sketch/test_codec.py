"""Keys in few bits: the layout of codes, the quantizers, what is kept of a segment, and what estimates are worth."""

from dataclasses import dataclass

import pytest
import torch
from drawn import random
from sketch_reference import (
    BITS,
    channel_noise,
    channel_variances,
    estimates,
    half_variance,
    is_unreliable,
    odd_values,
    rotation,
    segment_spans,
    slopes_of,
    squared_errors,
    token_scales,
    value_bits,
)
from torch import Tensor

from qada_cache.sketch import STEPS, Layout, codec, selection
from qada_cache.sketch.codec import Sketch, round_slopes, unpack_slopes

CPU = torch.device("cpu")
DIMS = (16, 64, 80, 96)
LENGTH = 1660  # three segments, the last of 636 tokens


def sketch_of(keys: Tensor, energies: Tensor | None, bits: float) -> Sketch:
    """The sketch of one head's keys `[tokens, dim]`, with values of 0."""
    return Sketch.of(keys, torch.zeros(len(keys), 4), energies, Layout.from_bits(keys.shape[1], bits))


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
        """Errors of the sketch's scores, without the half variance that is added to them; float64."""
        return estimated(self, sketch) - added(self, sketch) - self.scores


def estimated(made: Unequal, sketch: Sketch) -> Tensor:
    return codec.estimate_scores(made.query, sketch, LENGTH, scaling=made.scaling).double()


def added(made: Unequal, sketch: Sketch) -> Tensor:
    """Half the variance of each estimate, by what is kept of its segment."""
    parts, scales = [], token_scales(sketch, LENGTH)
    for index, (first, last) in enumerate(segment_spans(LENGTH)):
        weighed = made.query.double()[:, sketch.order[index].long()] / sketch.weights[index].double()
        errors = weighed.square() @ squared_errors(sketch)
        parts.append(errors[:, None] * scales[first:last] ** 2)
    return made.scaling**2 * torch.cat(parts, dim=1) / 2


@pytest.mark.parametrize("with_energies", [False, True])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_what_is_kept_of_a_segment(bits: float, dim: int, with_energies: bool) -> None:
    """In float64: mean, order, weights, the nearest odd values, and scales that leave the least error of scores."""
    made = Unequal(dim, spread=0.5)
    energies = made.energies if with_energies else None
    sketch = sketch_of(made.keys, energies, bits)
    assert sketch.layout == Layout.from_bits(dim, bits)
    assert sketch.codes.shape == (sketch.layout.count, LENGTH)
    assert len(sketch.units) == len(segment_spans(LENGTH)) == 3
    each = torch.tensor(value_bits(sketch))
    half_steps = torch.tensor([STEPS[one] / 2 if one else 1.0 for one in each.tolist()]).double()
    coded = int((each > 0).sum())
    for index, (first, last) in enumerate(segment_spans(LENGTH)):
        keys, order = made.keys[first:last].double(), sketch.order[index].long()
        # bfloat16 has 8 bits; means near 0 are of sums in float32
        torch.testing.assert_close(sketch.centres[index].double(), keys.mean(dim=0), rtol=2**-8, atol=1e-5)
        centred = keys - sketch.centres[index].double()
        variances = centred.square().mean(dim=0)
        asked = torch.ones(dim).double() if energies is None else energies.double().clamp_min(0.03 * energies.mean())
        assert torch.equal(order.sort().values, torch.arange(dim))
        need = (asked * variances)[order]
        assert (need[:-1] >= need[1:] * (1 - 1e-5)).all()
        weights = sketch.weights[index].double()
        torch.testing.assert_close(weights, 1 / variances[order].sqrt() / half_steps, rtol=2**-8, atol=0)
        odd_levels = odd_values(sketch.codes[:, first:last], words=sketch.layout.words)
        rotated = (centred[:, order] * weights)[:, :coded] @ rotation(coded)
        assert (odd_levels.sign() == rotated.sign())[rotated.abs() > 1e-5].all()
        importance = (asked[order] / weights.square()).view(-1, 8).mean(dim=1).repeat_interleave(8)[:coded]
        size = (rotated * half_steps[:coded]).square().mean(dim=-1).sqrt()
        for _ in range(4):
            most = 2 ** each[:coded] - 1
            nearest = (2 * torch.floor(rotated / (2 * size[:, None])) + 1).clamp(-most, most)
            size = (importance * rotated * nearest).sum(dim=-1) / (importance * nearest.square()).sum(dim=-1)
        assert (odd_levels == nearest).double().mean() > 0.999  # in float32, what lies between two may fall either way
        best = (importance * rotated * odd_levels).sum(dim=-1) / (importance * odd_levels.square()).sum(dim=-1)
        unit = float(sketch.units[index])
        assert unit == pytest.approx(float(best.max()) / 255, rel=1e-4)
        scales = sketch.scales[first:last].double() * unit
        assert ((scales - best).abs() <= (0.5 + 1e-2) * unit).all()
        assert float(sketch.mean_squares[index]) == pytest.approx(float(scales.square().mean()), rel=1e-5)
    torch.testing.assert_close(sketch.noise.double(), channel_noise(sketch, LENGTH), rtol=1e-4, atol=0)
    torch.testing.assert_close(sketch.variances.double(), channel_variances(sketch, LENGTH), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_estimates_equal_float64(bits: float, dim: int) -> None:
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
def test_estimates_are_off_by_as_much_as_is_said(bits: float, dim: int) -> None:
    """Within a factor of two, of the mean squared error: it takes values for Gaussian and errors for even, and rotation
    makes both nearly so, the less the smaller its blocks."""
    made = Unequal(dim, spread=0.7)
    sketch = sketch_of(made.keys, made.energies, bits)
    ratio = float(made.errors(sketch).square().mean() / (2 * added(made, sketch)).mean())
    assert 0.5 < ratio < 2


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_energies_make_estimates_better(bits: float, dim: int) -> None:
    """With very unequal channels, query energies make scores better, if there are unequal bits to give them."""
    made = Unequal(dim)
    errors = [
        float(made.errors(sketch_of(made.keys, energies, bits)).square().mean()) for energies in (made.energies, None)
    ]
    assert errors[0] < 1.02 * errors[1]
    if len(set(value_bits(sketch_of(made.keys, None, bits)))) > 2:
        assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("dim", DIMS)
def test_more_bits_make_estimates_better(dim: int) -> None:
    made = Unequal(dim)
    errors = {
        Layout.from_bits(dim, bits).count: float(made.errors(sketch_of(made.keys, made.energies, bits)).square().mean())
        for bits in BITS
    }
    found = [errors[count] for count in sorted(errors)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.3 * found[0]


@pytest.mark.parametrize("bits", BITS)
def test_unreliable_is_said_of_the_mean_over_tokens(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sketch is unreliable for the reference's queries, by noise as a mean over tokens, in rows of unlike lengths."""
    made, lengths = Unequal(16), [LENGTH, 1030]
    rows = [sketch_of(made.keys[:length], made.energies, bits) for length in lengths]
    told = [
        {"query": made.query, "sketch": row, "length": length, "scaling": made.scaling}
        for row, length in zip(rows, lengths, strict=True)
    ]
    half = torch.cat([half_variance(**one) for one in told])
    monkeypatch.setattr(selection, "UNRELIABLE", float(half.median()) * 1.0001)  # none lies there
    square = made.query.double().square()
    shares = (square @ channel_noise(rows[0], LENGTH)) / (square @ channel_variances(rows[0], LENGTH))
    for share in (0.0, float(shares.median()) * 1.0001):
        monkeypatch.setattr(selection, "NOISE_SHARE", share)
        for one in told:
            found = selection.find_unreliable(made.query, one["sketch"], scaling=made.scaling)
            assert torch.equal(found, is_unreliable(**one))
            assert share or 0 < found.sum() < 100


def test_keys_that_are_all_alike() -> None:
    """They score what the centre does, in whose rounding they all have a share."""
    keys, query = random(1, 32).expand(1100, 32), random(3, 32, seed=1)
    found = codec.estimate_scores(query, sketch_of(keys, None, 2), 1100, scaling=0.2)
    torch.testing.assert_close(found, query @ keys.mT * 0.2, rtol=0, atol=2**-8)


@pytest.mark.parametrize("energies", [None, torch.zeros(16), torch.cat([torch.zeros(8), torch.ones(8)])])
def test_channels_that_say_nothing(energies: Tensor | None) -> None:
    """Keys that are 0, in some channels or in all, and queries that look nowhere: all is finite."""
    keys = random(1100, 16)
    for channels in (slice(0), slice(4, 12), slice(0, 16)):
        keys[:, channels] = 0
        sketch = sketch_of(keys, energies, 2)
        assert all(tensor.isfinite().all() for tensor in sketch.to_tensors().values())
        assert (sketch.weights > 0).all()
        assert codec.estimate_scores(random(3, 16, seed=1), sketch, 1100, scaling=0.2).isfinite().all()
    assert not sketch.scales.any()


@pytest.mark.parametrize("bits", BITS)
def test_the_mass_of_many_tokens_is_estimated(bits: float) -> None:
    """Scores differ, their sum of exponentials does not; without the term for what codes leave out it would."""
    keys = random(4000, 64) * (0.2 + torch.rand(64, generator=torch.Generator().manual_seed(2)))
    query = random(32, 64, seed=1)
    sketch = sketch_of(keys, None, bits)
    true = (query @ keys.mT * 0.2).logsumexp(dim=-1)
    found = codec.estimate_scores(query, sketch, 4000, scaling=0.2).logsumexp(dim=-1)
    plain, words = [], sketch.layout.words
    for index, (first, last) in enumerate(segment_spans(4000)):
        odd_levels = odd_values(sketch.codes[:, first:last], words=words)
        coded, order = odd_levels.shape[1], sketch.order[index].long()
        keys = sketch.centres[index].double().expand(last - first, -1).clone()
        rotated = (token_scales(sketch, 4000)[first:last, None] * odd_levels) @ rotation(coded)
        keys[:, order[:coded]] += rotated / sketch.weights[index, :coded].double()
        plain.append(keys)
    without = (query.double() @ torch.cat(plain).mT * 0.2).logsumexp(dim=-1)
    assert (found - true).abs().mean() < (without - true).abs().mean()
    assert (found - true).abs().mean() < 0.1


def test_slopes_are_off_by_half_a_unit_of_their_channel_at_most() -> None:
    """Also of a channel in which keys hardly vary, and of one in which they do not."""
    covariance = torch.randn(2, 3, 24, 16, generator=torch.Generator().manual_seed(0))
    covariance[..., 0] *= 1e-6
    covariance[..., 1] = 0
    made = round_slopes(covariance)
    assert torch.equal(unpack_slopes(made["slopes"]), slopes_of(made["slopes"]))
    restored = slopes_of(made["slopes"]) * made["slope_units"].double().unsqueeze(-2)
    assert ((restored - covariance).abs() <= 0.50001 * covariance.abs().amax(dim=-2, keepdim=True) / 7).all()
