"""Intervals and choices, on numbers."""

from __future__ import annotations

import math

import pytest

from qada_cache.tuned_choice import Thresholds
from qada_cache.tuning import Budget, Setting, summarize
from qada_cache.tuning.estimates import _T_95, Estimate, estimate
from qada_cache.tuning.measuring import Figures


def below(t: float, freedom: int, steps: int = 20000) -> float:
    """Probability that Student's t lies below `t` > 0: Simpson's rule over its density."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = [scale * (1 + (t * i / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps + 1)]
    return 0.5 + t / steps / 3 * (density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]))


@pytest.mark.parametrize("freedom", range(1, len(_T_95) + 1))
def test_quantiles_of_student(freedom: int) -> None:
    assert below(_T_95[freedom - 1], freedom) == pytest.approx(0.95, abs=1e-4)


def test_estimates() -> None:
    """Estimates equal those by hand: the mean of 1, 2, 3, 6 is 3, the deviation sqrt(14 / 3), and t is 2.353."""
    error = 2.353 * math.sqrt(14 / 3) / 2
    found = estimate([1.0, 2.0, 3.0, 6.0])
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 3.0 - error, 3.0 + error))
    assert estimate([0.0, 0.1]).low == 0.0  # nothing here is negative
    assert estimate([2.0]) == Estimate(2.0, 0.0, math.inf)
    assert estimate([1.0] * 50) == Estimate(1.0, 1.0, 1.0)


def setting(token_threshold: float, kl: float, read: float, *, error: float = 0.0) -> Setting:
    estimates = Estimate(kl, kl - error, kl + error), Estimate(read, read - error, read + error)
    return Setting(Thresholds(token_threshold), *estimates, top1=1.0, seconds=1.0)


CURVE = [setting(1, 0.001, 0.20), setting(5, 0.002, 0.10), setting(12, 0.005, 0.08), setting(20, 0.020, 0.07)]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget(kl=0.002), 5),
        (Budget(kl=0.0019), 1),
        (Budget(kl=9.0), 20),
        (Budget(kl=0.0009), None),
        (Budget(bytes_read=0.08), 12),
        (Budget(bytes_read=1.0), 1),
        (Budget(bytes_read=0.06), None),
    ],
)
def test_choices(budget: Budget, expected: float | None) -> None:
    found = budget.choose(CURVE)
    assert (found and found.thresholds) == (expected and Thresholds(expected))


def test_the_upper_end_counts_for_a_choice_and_the_mean_confirms() -> None:
    unsure = setting(5, 0.0015, 0.10, error=0.001)
    assert Budget(kl=0.002).choose([unsure]) is None
    assert Budget(kl=0.0025).choose([unsure]) is unsure
    assert Budget(bytes_read=0.1).choose([unsure]) is None
    assert Budget(kl=0.002).is_within(unsure, "mean")
    assert not Budget(kl=0.0014).is_within(unsure, "mean")
    assert Budget(bytes_read=0.1).is_within(unsure, "mean")
    assert not Budget(bytes_read=0.09).is_within(unsure, "mean")


def test_pieces_together() -> None:
    found = summarize(Thresholds(3.0, 0.7), [Figures(0.1, 1.0, 0.2, 0.5), Figures(0.3, 0.5, 0.4, 1.5)])
    assert (found.thresholds, found.kl.mean, found.top1) == (Thresholds(3.0, 0.7), pytest.approx(0.2), 0.75)
    assert (found.bytes_read.mean, found.seconds) == (pytest.approx(0.3), 1.0)


@pytest.mark.parametrize("kl", [0.0, -1.0, math.nan, math.inf])
def test_wrong_budgets_of_kl(kl: float) -> None:
    with pytest.raises(ValueError, match="--kl must be positive and finite"):
        Budget(kl=kl)


@pytest.mark.parametrize("share", [0.0, -1.0, math.nan, 1.1])
def test_wrong_budgets_of_bytes(share: float) -> None:
    with pytest.raises(ValueError, match=r"--bytes must be a share in \(0, 1\]"):
        Budget(bytes_read=share)
