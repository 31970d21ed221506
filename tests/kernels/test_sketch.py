"""Keys in few bits: the rotation, the quantizer's constants, the layout of codes, and what estimates are worth."""

import math

import pytest
import torch
from sketch_reference import odd_values

from qada_cache.kernels import sketch

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [16, 64, 80, 96])
def test_rotation_keeps_scores(dim: int) -> None:
    """Orthogonal, and every channel goes into as many as the largest power of two that divides their number."""
    turn = sketch.rotation(dim, CPU)
    torch.testing.assert_close(turn @ turn.mT, torch.eye(dim))
    assert (turn != 0).sum(dim=1).min() == dim & -dim


@pytest.mark.parametrize("bits", sketch.BITS)
def test_constants_are_those_of_a_gaussian(bits: int) -> None:
    """By integration: the error at the step given, which is the least of steps near it."""
    x = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])

    def error(step: float) -> float:
        top = 2 ** (bits - 1)
        level = torch.floor(x / step).clamp(-top, top - 1) + 0.5
        return float(((x - level * step).square() * density).sum())

    assert error(sketch.STEPS[bits]) == pytest.approx(sketch.ERRORS[bits], rel=2e-3)
    assert error(sketch.STEPS[bits]) <= min(error(sketch.STEPS[bits] * factor) for factor in (0.97, 1.03))
    assert sketch.spread_of(bits) == pytest.approx(2 * sketch.ERRORS[bits] / sketch.STEPS[bits] ** 2)


@pytest.mark.parametrize("dim", [16, 96])
@pytest.mark.parametrize("bits", sketch.BITS)
def test_codes_hold_the_nearest_odd_values(bits: int, dim: int) -> None:
    """Unpacked by plain arithmetic; scales leave the least squared error."""
    keys = random(3, 40, dim)
    centre = keys.mean(dim=1)
    codes, scales = sketch.encode(keys, centre, bits)
    assert codes.shape == (3, 40, dim * bits // 8)
    odd = torch.stack([odd_values(head, dim=dim) for head in codes])
    assert torch.equal(odd, sketch.decode(codes, bits).double())
    turned = (keys - centre.unsqueeze(1)).double() @ sketch.rotation(dim, CPU).double().mT
    step = sketch.STEPS[bits] * turned.square().mean(dim=-1, keepdim=True).sqrt()
    inside = turned.abs() < 2 ** (bits - 1) * step
    assert ((turned - odd * step / 2).abs() <= step / 2 + 1e-5)[inside].all()
    best = (turned * odd).sum(dim=-1) / odd.square().sum(dim=-1)
    torch.testing.assert_close(scales.double(), best, rtol=2**-8, atol=0)


def test_keys_that_are_all_alike() -> None:
    """What is at the centre has no scale, and scores what the centre does."""
    keys = random(1, 1, 32).expand(1, 50, 32)
    codes, scales = sketch.encode(keys, keys.mean(dim=1), 2)
    query = random(1, 3, 32, seed=1)
    estimates = sketch.estimated_scores(query, codes, scales, keys.mean(dim=1), scaling=0.2)
    torch.testing.assert_close(estimates, query @ keys.mT * 0.2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", sketch.BITS)
def test_the_mass_of_many_tokens_is_estimated(bits: int) -> None:
    """Scores differ, their sum of exponentials does not; without the term for what codes leave out it would."""
    keys = random(4, 4000, 64) * (0.2 + torch.rand(64, generator=torch.Generator().manual_seed(2)))
    query, centre = random(4, 8, 64, seed=1), keys[:, :256].mean(dim=1)
    codes, scales = sketch.encode(keys, centre, bits)
    true = (query @ keys.mT * 0.2).logsumexp(dim=-1)
    found = sketch.estimated_scores(query, codes, scales, centre, scaling=0.2).logsumexp(dim=-1)
    plain = sketch.rotation(64, CPU)
    coded = scales.float().unsqueeze(-1) * sketch.decode(codes, bits) @ plain + centre.unsqueeze(1)
    without = (query @ coded.mT * 0.2).logsumexp(dim=-1)
    assert (found - true).abs().mean() < (without - true).abs().mean()
    assert (found - true).abs().mean() < 0.1
