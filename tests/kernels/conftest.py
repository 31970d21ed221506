"""Fixtures that tests of several kernels share."""

from collections.abc import Iterator
from typing import Any

import pytest
from decode_scene import Scene
from small_sketch import small_sketch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The kernels that a decode step of Triton's launches, and their constants; nothing is computed."""
    from steps import Launched, triton_decode  # which are there with triton alone

    found: list[tuple[str, dict[str, Any]]] = []
    for name in ("local_kernel", "bulk_kernel", "estimate_kernel", "selected_kernel"):
        monkeypatch.setattr(triton_decode, name, Launched(name, found))
    return found


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of few tokens have a sketch, in segments, and are split; four query heads of a group are merged at once."""
    from steps import small_splits, triton_decode

    monkeypatch.setattr(triton_decode.sizing, "PART_BYTES", 2048)
    with small_sketch(40, 128), small_splits(*Scene.splits):
        yield


@pytest.fixture
def whole_segments(short_rows: None) -> Iterator[None]:
    """As `short_rows`, with segments of the package's size."""
    with small_sketch(40):
        yield
