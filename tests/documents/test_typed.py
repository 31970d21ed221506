"""The package's annotations reach a user's own type checker."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
from transformers import PreTrainedModel

from qada_cache import CacheStats, QAdACache


def measure(model: PreTrainedModel) -> float:
    cache = QAdACache(model, threshold=0.9, device_budget="auto")
    stats: CacheStats = cache.stats()
    twin: QAdACache = cache.fork(token_threshold=12.0)
    return stats.read_share + twin.stats().read_share


def mistaken(model: PreTrainedModel) -> None:
    QAdACache(model, treshold=0.9)
    QAdACache(model, device_budget=b"auto")
    number: int = QAdACache(model).stats()
    QAdACache(model).stats().read_shares
"""


# Mypy does not read the libraries that the package imports: it would take ten times as long, and add nothing here.
SETTINGS = """\
[mypy]
strict = True
follow_imports = silent
[mypy-torch.*,transformers.*,accelerate.*,safetensors.*,numpy.*,tqdm.*,huggingface_hub.*,triton.*]
follow_imports = skip
"""


def test_a_users_script_is_checked_against_our_types(tmp_path: Path) -> None:
    """Strict mypy finds nothing in the script's first function, and an error in every line of the second."""
    pytest.importorskip("mypy", reason="the type checker is a tool of developers")
    (tmp_path / "user.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    found = [int(line) for line in re.findall(r"^user.py:(\d+): error:", done.stdout, re.MULTILINE)]
    assert found == [14, 15, 16, 17], done.stdout + done.stderr
