"""Comparisons of sketches allow the differences that rounding makes on another device, and no others."""

from collections.abc import Iterator

import pytest
import torch
from sketch_reference import is_same_but_for_ties
from small_sketch import small_sketch
from torch import Tensor

from qada_cache.sketch import Layout
from qada_cache.sketch.codec import average_channels, quantize_segments

TOKENS = 60
ENERGIES = torch.rand(2, 16, generator=torch.Generator().manual_seed(0)) + 0.1


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_sketch(6, 16):
        yield


def draw(seed: int, tokens: int = TOKENS) -> Tensor:
    return torch.randn(2, tokens, 16, generator=torch.Generator().manual_seed(seed)) + 0.5


def sketch(keys: Tensor, energies: Tensor | None = ENERGIES) -> dict[str, Tensor]:
    layout = Layout.from_bits(16, 1.5)
    made = quantize_segments(keys, energies, layout)
    return made | average_channels(made, layout, keys.shape[1])


def find_others(found: dict[str, Tensor], made: dict[str, Tensor]) -> set[str]:
    """The names of the fields that differ by more than ties."""
    return {name for name in made if not is_same_but_for_ties(found[name], made[name])}


def test_rounding_is_allowed() -> None:
    """As much as sums in another order make, and far more often than these do."""
    moved = 0
    for seed in range(300):
        keys = draw(seed)
        shaken = keys * (1 + 1e-6 * (draw(seed + 1) - 0.5))
        made, found = sketch(keys), sketch(shaken)
        moved += any(not torch.equal(made[name], found[name]) for name in ("codes", "scales", "centres", "weights"))
        assert not find_others(found, made), f"seed {seed}"
    assert moved


@pytest.mark.parametrize("token", [0, 20, TOKENS - 1])
def test_a_token_of_another_is_not(token: int) -> None:
    """Nor is it where codes and scales alone are the other's: those that a segment had before."""
    keys = draw(0)
    other = keys.clone()
    other[:, token] = draw(1)[:, token]
    made, found = sketch(keys), sketch(other)
    assert find_others(found, made) >= {"codes", "scales", "centres"}
    stale = {name: tensor.clone() for name, tensor in made.items()}
    for name in ("codes", "scales"):
        stale[name][..., token] = stale[name][..., token - 1]
    assert find_others(stale, made) & {"codes", "scales"}


def test_nor_are_segments_by_other_energies_or_of_other_tokens() -> None:
    keys = draw(0, TOKENS + 1)
    made = sketch(keys[:, 1:])
    assert find_others(sketch(keys[:, 1:], None), made) >= {"codes", "order"}
    assert find_others(sketch(keys[:, :-1]), made) >= {"codes", "scales", "centres"}
    assert find_others(made | {"codes": made["codes"].long()}, made) == {"codes"}
