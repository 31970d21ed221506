"""Only products of keys and queries count: keys that are larger in a channel, for queries that are smaller there by the
same factor, have the same codes. Norms of keys and queries, as many models have them, make such channels. Nor do keys
have to be of any size."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from drawn import random
from torch import Tensor

from qada_cache.kernels.cpu import quantizing
from qada_cache.sketch import Layout, codec
from qada_cache.sketch.codec import Sketch, estimate_scores
from qada_cache.sketch.coded import RecordLayout, code_tokens, estimate_keys, find_query_weights

DIM, LENGTH = 64, 1660
# Of channels: all alike, and powers of two, which scale all numbers exactly.
FACTORS = torch.ones(DIM), 2.0 ** torch.tensor((0, 3, -2, 1, -3, 2, -1, 0) * 8)


def draw(factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys `[1, LENGTH, DIM]`, query energies `[1, DIM]` and queries `[10, DIM]` of channels with these factors."""
    keys = random(1, LENGTH, DIM, seed=1) * torch.exp(0.5 * random(DIM, seed=2)) + random(DIM, seed=3)
    deviations = torch.exp(0.5 * random(DIM, seed=4))
    queries = random(10, DIM, seed=5) * deviations
    return keys * factors, (deviations / factors).square()[None], queries / factors


CODING = pytest.mark.parametrize("quantize_segments", [codec.quantize_segments, quantizing.quantize_segments])


@CODING
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("factor", [1e-14, 1e-19, 3e-20, 1e-21, 1e-30, 1e-40, 0.0])
def test_small_keys(factor: float, known: bool, quantize_segments: Callable[..., dict[str, Tensor]]) -> None:
    """However small keys are, nothing of their codes is infinite or not a number."""
    (keys, energies, queries), layout = draw(FACTORS[0]), Layout.from_bits(DIM, 4)
    keys = keys * factor
    made = quantize_segments(keys[None], energies[None] if known else None, layout)
    assert all(part.isfinite().all() for part in made.values())
    error = (keys - estimate_keys(made, layout)[0]).double().square().mean().sqrt()
    share = {1e-30: 0.3, 1e-40: 1.2}.get(factor, 0.12)  # squares of numbers below 1e-22 are 0 in float32
    assert error <= share * (keys - keys.mean(dim=1, keepdim=True)).double().square().mean().sqrt()
    with mock.patch.object(codec, "quantize_segments", quantize_segments):
        sketch = Sketch.of(keys[None], random(1, 1, LENGTH, 8, seed=6), energies[None] if known else None, layout)
    assert estimate_scores(queries, sketch[0, 0], LENGTH, scaling=0.1).isfinite().all()


@CODING
def test_codes(quantize_segments: Callable[..., dict[str, Tensor]]) -> None:
    layout, made = Layout.from_bits(DIM, 1.5), []
    for factors in FACTORS:
        keys, energies, _ = draw(factors)
        made.append(quantize_segments(keys[None], energies[None], layout))
    for name in ("codes", "scales", "units", "order", "mean_squares"):
        assert torch.equal(made[0][name], made[1][name]), name


def test_scores() -> None:
    layout, scores = Layout.from_bits(DIM, 1.5), []
    for factors in FACTORS:
        keys, energies, queries = draw(factors)
        sketch = Sketch.of(keys, random(1, LENGTH, 8, seed=6), energies, layout)
        scores.append(estimate_scores(queries, sketch.map(lambda part: part[0]), LENGTH, scaling=0.1))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)  # sums in another order


def test_records() -> None:
    layout, records, made = Layout.from_bits(DIM, 1.5), RecordLayout(DIM, 8, 5, 6), []
    for factors in FACTORS:
        keys, energies, _ = draw(factors)
        sketch = Sketch.of(keys, random(1, LENGTH, 8, seed=6), energies, layout)
        predicted = estimate_keys(sketch.to_tensors(), layout)
        weights = find_query_weights(energies, DIM, torch.device("cpu"))
        made.append(code_tokens(keys, random(1, LENGTH, 8, seed=6), predicted, weights, records))
    assert torch.equal(made[0], made[1])
