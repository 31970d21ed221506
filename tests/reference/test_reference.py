"""The reference itself, on cases small enough to work out by hand and against torch's own attention."""

import math
from typing import Any

import pytest
import torch
from drawn import random
from reference import (
    attend,
    bulk_indices,
    decide,
    gaussian_log_bulk,
    is_local,
    key_moments,
    local_indices,
    log_local_fraction,
    log_masses,
)

SMALL = {"sink_tokens": 1, "local_tokens": 3}  # one sink, a window of two
INFINITY = math.inf


def test_local_indices() -> None:
    assert local_indices(0, **SMALL) == {0}
    assert local_indices(2, **SMALL) == {0, 1, 2}
    assert local_indices(3, **SMALL) == {0, 2, 3}
    assert local_indices(9, **SMALL) == {0, 8, 9}
    assert bulk_indices(9, **SMALL) == [1, 2, 3, 4, 5, 6, 7]
    assert local_indices(127) == set(range(128))
    assert bulk_indices(128) == [16]
    assert local_indices(999) == set(range(16)) | set(range(888, 1000))


def test_key_moments() -> None:
    mean, covariance = key_moments(keys=torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
    assert mean.tolist() == [2.0, 2.0]
    assert covariance.tolist() == [[1.0, 2.0], [2.0, 4.0]]
    keys = random(7, 3)
    torch.testing.assert_close(key_moments(keys=keys)[1], torch.cov(keys.double().T, correction=0))
    assert not any(moment.any() for moment in key_moments(keys=torch.zeros(0, 3)))


def test_gaussian_log_bulk() -> None:
    query, covariance = torch.tensor([2.0, 1.0]), torch.tensor([[1.0, 0.5], [0.5, 2.0]])
    # mu = 0.5 (2 * 3 + 1) = 3.5; variance = 0.25 (4 * 1 + 2 * 2 * 0.5 + 2) = 2
    options = {"query": query, "mean": torch.tensor([3.0, 1.0]), "covariance": covariance, "scaling": 0.5}
    assert gaussian_log_bulk(bulk_tokens=10, **options) == pytest.approx(math.log(10) + 3.5 + 1.0)
    assert gaussian_log_bulk(bulk_tokens=0, **options) == -INFINITY


@pytest.mark.parametrize("criterion", ["gaussian", "oracle"])
def test_uniform_keys_give_the_fraction_of_tokens(criterion: str) -> None:
    """With equal keys the estimate is exact: A_local / A = T_local / T, here 3 of 10."""
    options = {"query": random(2, 4), "keys": random(1, 1, 4).expand(1, 10, 4), "position": 9, "scaling": 0.5}
    for log_local, log_bulk in log_masses(criterion=criterion, **options, **SMALL):
        assert log_local_fraction(log_local=log_local, log_bulk=log_bulk) == pytest.approx(math.log(0.3))
    assert decide(criterion=criterion, threshold=0.299, **options, **SMALL).all()
    assert not decide(criterion=criterion, threshold=0.301, **options, **SMALL).any()


def test_gaussian_is_close_to_oracle_for_gaussian_keys() -> None:
    options = {"query": random(2, 4), "keys": random(2, 4000, 4, seed=1), "position": 3999, "scaling": 0.5}
    estimated, true = log_masses(criterion="gaussian", **options), log_masses(criterion="oracle", **options)
    for (local, bulk), (true_local, true_bulk) in zip(estimated, true, strict=True):
        assert local == true_local
        assert bulk == pytest.approx(true_bulk, abs=0.2)


def test_threshold_edges() -> None:
    assert is_local(log_local=0.0, log_bulk=0.0, threshold=0.5)  # exactly one half
    assert not is_local(log_local=0.0, log_bulk=0.0, threshold=0.51)
    assert is_local(log_local=-500.0, log_bulk=500.0, threshold=0.0)
    assert not is_local(log_local=500.0, log_bulk=-500.0, threshold=1.0)  # the fraction rounds to 1
    assert is_local(log_local=0.0, log_bulk=-INFINITY, threshold=1.0)
    assert not is_local(log_local=0.0, log_bulk=INFINITY, threshold=0.1)
    assert is_local(log_local=0.0, log_bulk=INFINITY, threshold=0.0)


def test_moments_of_current_frozen_and_other_prompt() -> None:
    """One query head, scaling 1, query 1: the scores are the keys; bulk = tokens 1 to 4."""
    keys = torch.tensor([0.0, 1.0, 3.0, 5.0, 7.0, 0.0, 0.0])[None, :, None]
    options = {"query": torch.ones(1, 1), "keys": keys, "position": 6, "scaling": 1.0}

    def log_bulk(**more: Any) -> float:
        [(log_local, log_bulk)] = log_masses(criterion="gaussian", **options, **more, **SMALL)
        assert log_local == pytest.approx(math.log(3))
        return log_bulk

    assert log_bulk() == pytest.approx(math.log(4) + 4 + 5 / 2)
    assert log_bulk(frozen_count=2) == pytest.approx(math.log(4) + 2 + 1 / 2)
    other = torch.full((1, 1), 6.0), torch.full((1, 1, 1), 0.5)
    assert log_bulk(moments={4: other}.__getitem__, frozen_count=2) == pytest.approx(math.log(4) + 6 + 0.25)
    assert log_bulk(frozen_count=0) == INFINITY
    assert not decide(**options, **SMALL, threshold=0.001, frozen_count=0).any()
    assert decide(**options, **SMALL, threshold=0.0, frozen_count=0).all()


def test_fixed_criteria() -> None:
    options = {"query": random(4, 3), "keys": random(2, 5, 3, seed=1), "scaling": 1.0}
    static = torch.tensor([True, False, False, True])
    for criterion, expected in [("dense", [False] * 4), ("local", [True] * 4), (static, (~static).tolist())]:
        for position in (3, 4):  # a bulk of one token, of two
            assert decide(**options, position=position, criterion=criterion, **SMALL).tolist() == expected
        assert decide(**options, position=2, criterion=criterion, **SMALL).all()  # no bulk
    with pytest.raises(ValueError, match="group_rule"):
        decide(**options, position=4, group_rule="all", **SMALL)
    with pytest.raises(ValueError, match="criterion"):
        decide(**options, position=4, criterion="nothing", **SMALL)


def test_group_rules() -> None:
    """Query heads 0 and 1 share a key head; scores are the queries, over a bulk of two of five equal keys."""
    options = {"query": random(4, 3), "keys": random(2, 1, 3).expand(2, 5, 3), "position": 4, "scaling": 1.0}
    static = torch.tensor([True, False, True, True])
    for rule, expected in [("head", [False, True, False, False]), ("any", [False, False, False, False])]:
        assert decide(criterion=static, group_rule=rule, **options, **SMALL).tolist() == expected
    for threshold, expected in [(0.599, True), (0.601, False)]:  # every head's fraction is 3 / 5
        for rule in ("any", "head"):
            found = decide(criterion="oracle", group_rule=rule, threshold=threshold, **options, **SMALL)
            assert found.tolist() == [expected] * 4
    # Fractions 3 / 5 and, for a query of 0 mass but in the bulk, about 0.
    keys = torch.zeros(1, 5, 1)
    keys[:, 1:3] = 50.0
    query = torch.tensor([[0.0], [1.0]])
    for rule, threshold, expected in [
        ("head", 0.4, [True, False]),
        ("any", 0.4, [False, False]),
        ("head", 1.0, [False, False]),
        ("any", 1.0, [False, False]),
    ]:
        found = decide(
            query=query, keys=keys, position=4, scaling=1.0, criterion="oracle", threshold=threshold,
            group_rule=rule, **SMALL,
        )  # fmt: skip
        assert found.tolist() == expected


def test_attend_by_hand() -> None:
    """Equal scores average the values: locally tokens 0, 3, 4 of 0..4; in full, all five; never token 5."""
    values = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0, 1e9])[None, :, None]
    output = attend(
        query=torch.zeros(2, 3), keys=random(1, 6, 3), values=values, position=4, scaling=1.0,
        local=torch.tensor([True, False]), **SMALL,
    )  # fmt: skip
    torch.testing.assert_close(output, torch.tensor([[11001.0 / 3], [11111.0 / 5]], dtype=torch.float64))


def test_query_heads_share_key_value_heads_in_order() -> None:
    values = torch.tensor([[[1.0]], [[2.0]]])
    output = attend(
        query=random(6, 3), keys=random(2, 1, 3), values=values, position=0, scaling=1.0,
        local=torch.ones(6, dtype=torch.bool), **SMALL,
    )  # fmt: skip
    assert output[:, 0].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("criterion", ["gaussian", "oracle"])
def test_query_heads_decide_on_their_own_keys(criterion: str) -> None:
    """A query of 1 finds its mass in the bulk of key head 0, a query of -1 in that of key head 1."""
    keys = torch.zeros(2, 9, 1)
    keys[0, 1:7], keys[1, 1:7] = 9.0, -9.0
    options = {"query": torch.tensor([[1.0], [-1.0]] * 2), "keys": keys, "position": 8, "scaling": 1.0}
    assert decide(criterion=criterion, **options, **SMALL).tolist() == [False, True, True, False]
