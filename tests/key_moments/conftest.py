"""Tests of moments start as in a process of a user that has collected none."""

from pathlib import Path

import pytest

from qada_cache.key_moments import defaults
from qada_cache.said_once import warn_once


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no memory of what earlier tests collected."""
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(defaults, "_remembered", {})
    warn_once.cache_clear()
    return tmp_path / "home" / "moments"
