"""The layout of codes: words, bits, packing, rotation, and the quantizers' constants."""

import math

import pytest
import torch
from sketch_reference import BITS, odd_values, rotation

from qada_cache.sketch import ERRORS, STEPS, Layout, pack, rotate, unpack

DIMS = (16, 64, 80, 96)


def test_rotation_is_orthogonal_in_blocks_of_eight() -> None:
    turn = rotate(torch.eye(24))
    torch.testing.assert_close(turn.double(), rotation(24))
    torch.testing.assert_close(turn @ turn.mT, torch.eye(24))


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 64, 72, 80, 96, 120, 128, 256, 512])
@pytest.mark.parametrize("bits", [0.5, 1, 1.3, 1.5, 2, 3, 4])
def test_words_come_near_the_bits_that_are_asked_for(dim: int, bits: float) -> None:
    """Within half a word, if that is one; all channels fit, and need decides."""
    made = Layout.from_bits(dim, bits)
    assert abs(32 * made.count - dim * bits) <= 16 or made.count == 1
    assert made.coded == len(made.bits) <= dim
    assert made.coded % 8 == 0
    assert made.bits == sorted(made.bits, reverse=True)
    assert Layout.from_words(dim, made.count) == made
    assert (Layout.from_bits(64, 1.5).words, Layout.from_bits(128, 1.5).words) == ((1, 1, 1), (2, 2, 2))


@pytest.mark.parametrize(("dim", "words"), [(64, 9), (64, 0), (12, 1), (4, 1)])
def test_no_code_of_so_many_words(dim: int, words: int) -> None:
    with pytest.raises(ValueError, match=f"there is no code of {words} words for {dim} channels"):
        Layout.from_words(dim, words)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_words_unpack_to_what_was_packed(bits: float, dim: int) -> None:
    """The highest bit of a word included, which is a sign to int32."""
    made = Layout.from_bits(dim, bits)
    levels = torch.tensor([2**one for one in made.bits])
    index = (torch.rand(3, 50, made.coded, generator=torch.Generator().manual_seed(0)) * levels).long()
    codes = pack(index, made)
    assert codes.shape == (3, made.count, 50)
    assert (codes < 0).any()
    odd_levels = 2 * index - (levels - 1)
    assert torch.equal(unpack(codes, made).long(), odd_levels)
    assert torch.equal(odd_values(codes[1], words=made.words).long(), odd_levels[1])


@pytest.mark.parametrize("bits", STEPS)
def test_constants_are_those_of_a_gaussian(bits: int) -> None:
    """The errors are those of a Gaussian at the steps, by integration, and less than at steps near them."""
    x = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])

    def error(step: float) -> float:
        top = 2 ** (bits - 1)
        level = torch.floor(x / step).clamp(-top, top - 1) + 0.5
        return float(((x - level * step).square() * density).sum())

    assert error(STEPS[bits]) == pytest.approx(ERRORS[bits], rel=2e-3)
    assert error(STEPS[bits]) <= min(error(STEPS[bits] * factor) for factor in (0.97, 1.03))
