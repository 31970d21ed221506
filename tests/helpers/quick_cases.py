"""Which of many cases the default suite runs."""

from collections.abc import Sequence
from typing import Any

import pytest


def mark_rest_slow(cases: Sequence[tuple], quick: int) -> list[Any]:
    """The cases, those behind the first `quick` ones marked as slow: each takes a build, or the interpreter."""
    marks = [()] * quick + [pytest.mark.slow] * (len(cases) - quick)
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]
