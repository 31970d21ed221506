"""A file to read, alter and write over; and the user's cache folder, still empty."""

from pathlib import Path

import pytest
from models import SMALL, generate, prompt, tiny

from qada_cache import QAdACache
from qada_cache.key_moments import defaults
from qada_cache.said_once import warn_once


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A cache's, of `tiny()`, that holds a bulk and counts."""
    model = tiny()
    cache = QAdACache(model, threshold=0.12, moments="current", **SMALL)
    generate(model, prompt(150)[0], cache)
    cache.save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet, and a process that remembers no moments and has warned of nothing."""
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(defaults, "_remembered", {})
    warn_once.cache_clear()
    return tmp_path / "home"
