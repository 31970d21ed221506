"""Settings every test runs under."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Triton decides when it decorates a kernel: on the CPU its interpreter runs them. `make gpu` compiles them instead.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Tensors here are tiny: more threads only wait for each other, and badly so on a busy machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache folder is not the tests'."""
    folder = tmp_path_factory.mktemp("qada-home")
    before, os.environ["QADA_HOME"] = os.environ.get("QADA_HOME"), str(folder)
    yield folder
    del os.environ["QADA_HOME"]
    if before is not None:
        os.environ["QADA_HOME"] = before


@pytest.fixture(scope="session")
def all_tasks() -> Any:
    """The index of all of lm-eval's tasks, which takes seconds to make."""
    return pytest.importorskip("lm_eval.tasks", reason="tasks are lm-eval's").TaskManager()
