"""Means over a text, estimated from pieces of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# 95% quantiles of Student's t, by degrees of freedom from 1 on; beyond the table the last one serves, which is larger.
_T_95 = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
)


@dataclass(frozen=True)
class Estimate:
    """The mean over a text, estimated from pieces of it by Student's t, and its interval of 90%."""

    mean: float  # of the pieces
    low: float  # the true mean lies below with a probability of 5%
    high: float  # the true mean lies below with a probability of 95%


def estimate(values: Sequence[float]) -> Estimate:
    """The mean over a text, not negative, from one value a piece; one piece says nothing of the error."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, 0.0, math.inf)
    error = _T_95[min(len(values) - 2, len(_T_95) - 1)] * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, max(0.0, mean - error), mean + error)
