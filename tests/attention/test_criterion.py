"""The criteria as pure functions, against the float64 reference one query at a time."""

import math

import pytest
import reference
import torch
from drawn import random

from qada_cache import StaticHeads
from qada_cache.criterion import (
    decide_for_groups,
    find_long_context,
    gaussian_log_bulk,
    logit,
    score_moments,
)
from qada_cache.key_moments.running import flatten

SCALING = 0.3
EDGE_THRESHOLDS = (0.0, 1e-300, 1e-6, 0.1, 0.5, 0.6, 0.999, 1 - 1e-15, 1.0)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("tokens", [1, 63, 111, 257])
def test_gaussian_estimate_equals_reference(tokens: int, group: int) -> None:
    """Row by row and head by head; the budget is a few ulps of the sums that the estimate adds up."""
    batch, kv_heads, dim = 2, 2, 16
    keys, queries = random(batch, kv_heads, tokens, dim) + 0.7, random(batch, kv_heads, group, dim, seed=1)
    moments = [[reference.key_moments(keys=head) for head in row] for row in keys]
    mean = torch.stack([torch.stack([head[0] for head in row]) for row in moments])
    covariance = torch.stack([torch.stack([head[1] for head in row]) for row in moments])
    log_tokens = torch.tensor(float(tokens)).log().view(1, 1, 1, 1)
    given = queries.flatten(1, 2).unsqueeze(2), *flatten(mean.float(), covariance.float()), log_tokens
    found = gaussian_log_bulk(*given, kv_heads=kv_heads, scaling=SCALING).squeeze(3)
    for row in range(batch):
        for head in range(kv_heads):
            for index in range(group):
                query = queries[row, head, index]
                expected = reference.gaussian_log_bulk(
                    query=query, mean=mean[row, head], covariance=covariance[row, head], bulk_tokens=tokens,
                    scaling=SCALING,
                )  # fmt: skip
                magnitude = float(query.abs() @ mean[row, head].float().abs()) * SCALING
                magnitude += float(query.abs() @ covariance[row, head].float().abs() @ query.abs()) * SCALING**2
                budget = 8 * torch.finfo(torch.float32).eps * (magnitude + math.log(tokens) + 1)
                assert abs(float(found[row, head, index]) - expected) <= budget


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_moments_of_one_prompt_serve_every_row(softcap: float | None) -> None:
    queries, mean, covariance = random(3, 2 * 4, 5, 8), random(1, 2, 8, seed=1), random(1, 2, 8, 8, seed=2)
    covariance = covariance @ covariance.transpose(-1, -2)
    log_tokens, options = random(3, 1, 1, 5), {"kv_heads": 2, "scaling": SCALING, "softcap": softcap}
    together = gaussian_log_bulk(queries, *flatten(mean, covariance), log_tokens, **options)
    repeated = flatten(mean.repeat(3, 1, 1), covariance.repeat(3, 1, 1, 1))
    apart = gaussian_log_bulk(queries, *repeated, log_tokens, **options)
    assert together.shape == (3, 2, 4, 5)
    assert together.is_contiguous()  # as kernels read it
    torch.testing.assert_close(together, apart)


def test_a_cap_far_away_changes_nothing() -> None:
    """The products without a cap are those of the scores' mean and variance."""
    queries, mean, covariance = random(3, 2 * 4, 5, 8), random(3, 2, 8, seed=1), random(3, 2, 8, 8, seed=2)
    given = queries, *flatten(mean, covariance @ covariance.transpose(-1, -2)), random(3, 1, 1, 5)
    capped = gaussian_log_bulk(*given, kv_heads=2, scaling=SCALING, softcap=1e4)
    found = gaussian_log_bulk(*given, kv_heads=2, scaling=SCALING)
    torch.testing.assert_close(found, capped, rtol=1e-5, atol=1e-4)


def test_variance_is_never_negative() -> None:
    """A covariance without a direction of the query, off by rounding: the variance is 0 rather than below."""
    covariance = torch.tensor([[[[1.0, 0.0], [0.0, -1e-7]]]])
    _, variance = score_moments(torch.tensor([[[[0.0, 1.0]]]]), torch.zeros(1, 1, 2), covariance, scaling=1.0)
    assert variance.item() == 0.0


def test_no_bulk_has_no_mass() -> None:
    nothing = torch.full((1, 1, 1, 1), -math.inf)
    found = gaussian_log_bulk(random(1, 1, 1, 4), random(1, 1, 4), random(1, 4, 4), nothing, kv_heads=1, scaling=1.0)
    assert found.item() == -math.inf


@pytest.mark.parametrize("threshold", EDGE_THRESHOLDS)
def test_decision_equals_reference(threshold: float) -> None:
    """Away from the threshold itself the two formulas agree, up to masses that overflow and to empty bulks."""
    masses = [-math.inf, -500.0, -80.0, -1.0, 0.0, 0.25, 1.0, 7.0, 90.0, 500.0, math.inf]
    compared = 0
    for log_local in masses[1:-1]:
        for log_bulk in masses:
            fraction = reference.log_local_fraction(log_local=log_local, log_bulk=log_bulk) if log_bulk > -800 else 0.0
            if 0 < threshold < 1 and abs(fraction - math.log(threshold)) < 1e-6:
                continue
            local = reference.is_local(log_local=log_local, log_bulk=log_bulk, threshold=threshold)
            found = find_long_context(torch.tensor(log_local), torch.tensor(log_bulk), logit(threshold))
            assert bool(found) is not local, (log_local, log_bulk)
            compared += 1
    assert compared >= 60


def test_decision_at_the_threshold() -> None:
    """A head whose share is exactly the threshold is local (the paper's >=)."""
    half = torch.tensor(2.0)
    assert not find_long_context(half, half, logit(0.5))
    assert find_long_context(half, half, logit(0.5 + 1e-6))
    assert not find_long_context(half, half, logit(0.5 - 1e-6))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_decisions_of_random_heads(scale: float) -> None:
    log_local, log_bulk = scale * random(500), scale * random(500, seed=1)
    for threshold in (0.1, 0.6, 0.95):
        expected = [
            not reference.is_local(log_local=local, log_bulk=bulk, threshold=threshold)
            for local, bulk in zip(log_local.tolist(), log_bulk.tolist(), strict=True)
        ]
        assert find_long_context(log_local, log_bulk, logit(threshold)).tolist() == expected
        assert 10 < sum(expected) < 490


@pytest.mark.parametrize(("threshold", "read"), [(0.0, False), (0.5, True), (1.0, True)])
def test_an_estimate_that_is_no_number(threshold: float, read: bool) -> None:
    assert bool(find_long_context(torch.tensor(2.0), torch.tensor(math.nan), logit(threshold))) is read


def test_group_rules() -> None:
    """Two groups of two heads, `[batch, kv_heads, group, queries]`; every query decides by itself."""
    flags = torch.tensor([[[[True, False], [False, False]], [[True, True], [True, False]]]])
    assert decide_for_groups(flags, "head") is flags
    assert torch.equal(decide_for_groups(flags, "any"), torch.tensor([[[[True, False]] * 2, [[True, True]] * 2]]))


@pytest.mark.parametrize(
    ("table", "got"),
    [
        ([[True, False]], "got list"),
        (torch.ones(2, 4), "torch.float32"),
        (torch.ones(4, dtype=torch.bool), r"\[4\]"),
        (torch.ones(1, 2, 4, dtype=torch.bool), r"\[1, 2, 4\]"),
    ],
)
def test_static_heads_validation(table: object, got: str) -> None:
    with pytest.raises(TypeError, match=f"StaticHeads.*bool tensor.*{got}"):
        StaticHeads(table)
