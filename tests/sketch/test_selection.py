"""The selection of tokens, and the substitute for the others, compared with full attention in float64."""

import math

import pytest
import torch
from drawn import random
from sketch_reference import BITS, estimates, log_shares, unread
from torch import Tensor

from qada_cache.kernels.reference import merge_partials, partial_attention
from qada_cache.sketch import Layout
from qada_cache.sketch.codec import Sketch
from qada_cache.sketch.selection import Selection, estimate_unread, select_tokens

LENGTH, DIM, GROUP = 2300, 64, 4
SCALING = DIM**-0.5


def sketch_of(keys: Tensor, values: Tensor, bits: float = 2) -> Sketch:
    """The sketch of one head's keys `[tokens, dim]` and values `[tokens, value_dim]`."""
    return Sketch.of(keys, values, None, Layout.from_bits(keys.shape[1], bits))


def selected(
    query: Tensor, sketch: Sketch, near: Tensor, token_threshold: float, flags: Tensor | None = None
) -> Selection:
    """The selection for `query` `[group, queries, dim]`, given the log mass `[group, queries]` of near tokens."""
    queries = query.shape[1]
    return select_tokens(
        query,
        sketch,
        LENGTH,
        log_buffer=near,
        bulk_tokens=torch.full((queries,), LENGTH),
        flags=torch.ones(GROUP, queries, dtype=torch.bool) if flags is None else flags,
        scaling=SCALING,
        token_threshold=token_threshold,
    )


def attended(
    query: Tensor, keys: Tensor, values: Tensor, sketch: Sketch, selection: Selection
) -> tuple[Tensor, Tensor]:
    """Attention over read tokens and the substitute for the rest, merged: output `[group, queries, value_dim]` and log
    mass `[group, queries]`."""
    outs, masses = [], []
    for one, tokens in enumerate(selection.tokens):
        part = query[None, None, :, one]
        read = partial_attention(part, keys[tokens][None, None], values[tokens][None, None], scaling=SCALING)
        rest = estimate_unread(query[:, one], sketch, selection.tilt[:, one], scaling=SCALING)
        out, mass = merge_partials(*read, rest[None, None], selection.log_unread[None, None, :, one])
        outs.append(out[0, 0])
        masses.append(mass[0, 0])
    return torch.stack(outs, dim=1), torch.stack(masses, dim=1)


def full(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(SCALING * query.double() @ keys.double().mT, dim=-1) @ values.double()


NOTHING_NEAR = torch.full((GROUP, 3), -torch.inf)


@pytest.mark.parametrize("token_threshold", [0.8, 1.5, 5.0])
@pytest.mark.parametrize("bits", BITS)
def test_equals_float64(bits: float, token_threshold: float) -> None:
    """Tokens, what is unread, and its value; each query by itself, by what its flagged heads ask for."""
    keys, values, query = random(LENGTH, DIM), random(LENGTH, 8, seed=1), random(GROUP, 3, DIM, seed=2)
    near, flags = 6 + random(GROUP, 3, seed=3), torch.ones(GROUP, 3, dtype=torch.bool)
    flags[1:3, 0] = flags[0, 1] = False
    sketch = sketch_of(keys, values, bits)
    found = selected(query, sketch, near, token_threshold, flags)
    stead = estimate_unread(query, sketch, found.tilt, scaling=SCALING)
    for one in range(3):
        kwargs = {"query": query[:, one], "sketch": sketch, "scaling": SCALING}
        scores = estimates(**kwargs, length=LENGTH)
        shares = log_shares(estimates=scores, log_buffer=near[:, one], bulk_tokens=LENGTH) - math.log(token_threshold)
        sure = (shares.abs() > 1e-3).all(dim=0)  # in float32, or by a query that was rounded the other way
        assert sure.double().mean() > 0.95
        wanted = (shares >= 0)[flags[:, one]].any(dim=0)
        assert torch.equal(found.tokens[one][sure], wanted[sure])
        log_unread, value = unread(**kwargs, estimates=scores, read=found.tokens[one])
        torch.testing.assert_close(found.log_unread[:, one].double(), log_unread, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(stead[:, one].double(), value, rtol=1e-3, atol=1e-3)
    assert 0.001 < found.tokens.double().mean() < 0.9


def test_reading_all_leaves_nothing() -> None:
    keys, values, query = random(LENGTH, DIM), random(LENGTH, 8, seed=1), random(GROUP, 3, DIM, seed=2)
    sketch = sketch_of(keys, values)
    found = selected(query, sketch, NOTHING_NEAR, 1e-30)
    assert found.tokens.all()
    assert (found.log_unread == -torch.inf).all()
    assert not found.tilt.any()
    out = attended(query, keys, values, sketch, found)[0]
    torch.testing.assert_close(out.double(), full(query, keys, values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("token_threshold", [5.0, 1e9])
def test_values_that_are_linear_in_keys(token_threshold: float) -> None:
    """If values are linear in keys, the substitute for unread tokens is near their attention output, which their mean
    is not.

    It is not equal: keys vary across the query, too, and that part of values is not linear in scores.
    """
    keys, query = random(LENGTH, DIM), random(GROUP, 3, DIM, seed=2)
    values = keys @ random(DIM, 8, seed=4) / DIM**0.5 + random(8, seed=5)
    sketch = sketch_of(keys, values)
    found = selected(query, sketch, NOTHING_NEAR, token_threshold)
    true = full(query, keys, values)
    errors = []
    for tilt in (found.tilt, torch.zeros_like(found.tilt)):
        out = attended(query, keys, values, sketch, Selection(found.tokens, found.log_unread, tilt))[0]
        errors.append(float((out - true).norm() / (true - values.double().mean(dim=0)).norm()))
    assert errors[0] < 0.3 * errors[1]
    assert errors[0] < 0.2


def test_the_tilt_is_exact_for_values_that_follow_scores() -> None:
    """Values on a line of keys, nothing read: the mean of unread values, weighed by estimates, to rounding."""
    keys, query = random(LENGTH, DIM), random(GROUP, 3, DIM, seed=2)
    direction = query[0, 0] / query[0, 0].norm()
    lines = torch.tensor([-7.0, -3, -1, 0, 2, 4, 6, 7]) * 2 / 7  # slopes of which 4 bits hold
    values = (keys @ direction)[:, None] * lines + 3
    sketch = sketch_of(keys, values, 4)
    found = selected(query, sketch, NOTHING_NEAR, 1e9)
    assert not found.tokens.any()
    out = estimate_unread(query[:1, 0], sketch, found.tilt[:1, 0], scaling=SCALING)
    scores = estimates(query=query[0, :1], sketch=sketch, length=LENGTH, scaling=SCALING)
    expected = torch.softmax(scores, dim=1) @ values.double()
    # Scores in 4 bits: of what lies 1 standard deviation from the mean, 2 %.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.04)
    assert ((expected - 3).abs() > 0.2).any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("token_threshold", [0.5, 0.9, 1.0, 1.1])
def test_flat_attention(token_threshold: float, bits: float) -> None:
    """All keys nearly equal: what is near and what is far get their shares, whatever happens to be read of it.

    The unread count a tenth less than they weigh, which takes a tenth of the share that is near off the bulk's.
    """
    keys = random(1, DIM) + 1e-3 * random(LENGTH, DIM, seed=1)
    values, query = 1 + 0.5 * random(LENGTH, 8, seed=2), random(GROUP, 3, DIM, seed=3)
    sketch = sketch_of(keys, values, bits)
    log_far = (SCALING * query.double() @ keys.double().mT).logsumexp(dim=-1)
    for log_ratio, most in ((-3.0, 0.03), (-1.5, 0.03), (0.0, 0.055)):  # of what is near, whose values are 0
        near = log_far + log_ratio
        found = selected(query, sketch, near.float(), token_threshold)
        out, mass = attended(query, keys, values, sketch, found)
        out = out.double() * torch.sigmoid(mass.double() - near).unsqueeze(-1)
        true = full(query, keys, values) * torch.sigmoid(log_far - near).unsqueeze(-1)
        assert ((out - true).norm(dim=-1) < most * true.norm(dim=-1)).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", range(4))
def test_keys_that_are_all_alike(seed: int, bits: float) -> None:
    """As of one token that is repeated without positions: scores differ by rounding, which says nothing of values."""
    keys, values = (30 * random(1, DIM, seed=seed)).expand(LENGTH, DIM), random(LENGTH, 8, seed=seed + 9)
    query, near = 2 * random(GROUP, 3, DIM, seed=seed + 20), torch.full((GROUP, 3), -1e9)
    sketch = sketch_of(keys, values, bits)
    found = selected(query, sketch, near, 4.4)
    assert not found.tilt.any()
    out, _ = attended(query, keys, values, sketch, found)
    assert (out - values.mean(dim=0)).norm(dim=-1).max() < 0.1


@pytest.mark.parametrize("times", [8, 20, 100])
def test_a_key_that_is_much_longer_than_the_others(times: int) -> None:
    """The error of its estimate is as much larger. It does not keep the others from being read."""
    query, keys, values = 2 * random(GROUP, 1, DIM), random(LENGTH, DIM), random(LENGTH, DIM)
    shares = []
    for _ in range(2):
        selection = selected(query, sketch_of(keys, values), torch.full((GROUP, 1), -50.0), 2.0)
        weights = torch.softmax(SCALING * query[:, 0].double() @ keys.double().mT, dim=-1)
        shares.append((weights * selection.tokens[0].double()).sum(dim=-1).mean())
        keys[1000] *= times
    assert shares[1] > 0.9 * shares[0] > 0.5
