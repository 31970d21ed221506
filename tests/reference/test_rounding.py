"""The error allowed for rounding in float32 is enough for any order of sums, and less than any mistake makes."""

from typing import Any

import pytest
import torch
from rounding import DEVIATIONS, deviation, error_budget, naive_attention
from torch import Tensor

SIZES = [(16, 16, 12), (16, 16, 45), (64, 64, 51), (512, 64, 51), (128, 128, 400)]  # dims, and tokens


def draw(dim: int, value_dim: int, tokens: int, seed: int) -> dict[str, Any]:
    """Arguments of `naive_attention` but for a dtype, as tests of kernels have them."""
    made = torch.Generator().manual_seed(seed)
    shapes = {"query": (1, 4, 1, dim), "keys": (1, 2, tokens, dim), "values": (1, 2, tokens, value_dim)}
    given: dict[str, Any] = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    given |= {"query": 1.5 * given["query"], "keys": given["keys"] + 0.2, "scaling": dim**-0.5}
    return given | {"mask": torch.ones(1, 1, 1, tokens, dtype=torch.bool)}


def budget(given: dict[str, Any]) -> tuple[Tensor, float]:
    """Attention in float64, and the error budget of float32."""
    expected, lowp = (naive_attention(**given, dtype=dtype) for dtype in (torch.float64, torch.float32))
    return expected, error_budget(reference64=expected, lowp=lowp, deviations=deviation(**given))


def attend_in_order(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor, *, made: torch.Generator
) -> Tensor:
    """One product after another in float32, dims in a random order; exp wrong by up to 2 ulps."""
    keys, values = (tensor.repeat_interleave(2, dim=1) for tensor in (keys, values))
    scores = torch.zeros(1, 4, 1, keys.shape[2])
    for dim in torch.randperm(query.shape[3], generator=made).tolist():
        scores = scores + query[..., dim, None] * keys[:, :, None, :, dim]
    weights = torch.exp(scores * scaling - (scores * scaling).amax(dim=-1, keepdim=True))
    weights = weights * (1 + 2 * torch.finfo(torch.float32).eps * (2 * torch.rand(weights.shape, generator=made) - 1))
    total, outputs = torch.zeros(1, 4, 1, 1), torch.zeros(1, 4, 1, values.shape[3])
    for token in range(keys.shape[2]):
        weight = weights[..., token, None]
        total, outputs = total + weight, outputs + weight * values[:, :, None, token]
    return outputs / total


@pytest.mark.parametrize("size", SIZES)
def test_sums_in_any_order_are_within(size: tuple[int, int, int]) -> None:
    made, shares = torch.Generator().manual_seed(1), []
    for seed in range(8):
        given = draw(*size, seed)
        expected, allowed = budget(given)
        error = float((attend_in_order(**given, made=made).double() - expected).abs().max())
        assert error < allowed
        shares.append(error / float(deviation(**given).max()))
    assert 1 < max(shares) < DEVIATIONS  # it is no wide margin


@pytest.mark.parametrize("size", SIZES)
def test_mistakes_are_not(size: tuple[int, int, int]) -> None:
    """The lightest token left out, scores off by one part in 100,000, and one token's value by a thousandth."""
    for seed in range(8):
        given = draw(*size, seed)
        expected, allowed = budget(given)
        seen = given["mask"].expand(1, 4, 1, -1).clone()
        keys = given["keys"].double().repeat_interleave(2, dim=1)
        lightest = (given["query"].double() @ keys.mT).argmin(dim=-1, keepdim=True)
        values = given["values"].clone()
        values[:, :, size[2] // 2] *= 1.001
        for wrong in (
            {"scaling": given["scaling"] * (1 + 1e-5)}, {"mask": seen.scatter(-1, lightest, False)}, {"values": values}
        ):  # fmt: skip
            off = naive_attention(**given | wrong, dtype=torch.float64) - expected
            assert float(off.abs().max()) > allowed, wrong.keys()
