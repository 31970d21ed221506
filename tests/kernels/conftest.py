"""What tests of several kernels share."""

from typing import Any

import pytest


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The kernels that a decode step of Triton's launches, and their constants; nothing is computed."""
    from steps import Launched, triton_decode  # which are there with triton alone

    found: list[tuple[str, dict[str, Any]]] = []
    for name in ("local_kernel", "bulk_kernel", "estimate_kernel", "selected_kernel"):
        monkeypatch.setattr(triton_decode, name, Launched(name, found))
    return found
