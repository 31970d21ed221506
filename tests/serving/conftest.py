"""Gives tests of custom generation a folder for the code that transformers copies before it runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from calling import Reads
from models import tiny
from transformers import PreTrainedModel, dynamic_module_utils

from qada_cache.prefix_store import folder


@pytest.fixture(autouse=True)
def modules_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder of such code is not the tests'."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path / "modules"
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def prompts_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store that requests go to by default is each test's own."""
    monkeypatch.setattr(folder, "FOLDER", f"prompts-of-{tmp_path.name}")


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def reads(model: PreTrainedModel) -> Iterator[Reads]:
    counted = Reads(model)
    yield counted
    counted.handle.remove()
