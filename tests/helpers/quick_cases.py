"""Which of many cases the default suite runs."""

from collections.abc import Sequence
from typing import Any

import pytest


def mark_rest_slow(cases: Sequence[tuple], quick: int) -> list[Any]:
    """The cases, those behind the first `quick` ones marked as slow: each takes a build, or the interpreter."""
    return [*cases[:quick], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[quick:])]
