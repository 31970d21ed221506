"""Marks cases that the default suite leaves out."""

from collections.abc import Sequence
from typing import Any

import pytest


def mark_rest_slow(cases: Sequence[tuple], quick: int) -> list[Any]:
    """Pytest's parameters of these cases, with all after the first `quick` marked slow: each of them takes a build, or
    Triton's interpreter."""
    marks = [()] * quick + [pytest.mark.slow] * (len(cases) - quick)
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]
