"""A model, a store in an empty folder, and one that keeps a text."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept_text import TEXT, whole
from models import tiny
from transformers import PreTrainedModel

from qada_cache import PrefixStore
from qada_cache.said_once import warn_once


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """A process that has warned of nothing."""
    warn_once.cache_clear()


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def store(tmp_path: Path) -> PrefixStore:
    return PrefixStore(tmp_path / "prompts")


@pytest.fixture
def path(store: PrefixStore, tmp_path: Path) -> Path:
    """The folder of the store, which has kept the text."""
    store.keep(whole(), TEXT)
    return tmp_path / "prompts"
