"""The lines that docs/prefix-store.md begins with work as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import needle
import pytest
from documents import DOCUMENTS, FENCED, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from qada_cache.versions import CACHE


@pytest.mark.usefixtures("builds_of_others")
def test_the_first_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tests' model in the named one's place, which would have to be downloaded."""
    (language, block), *_ = FENCED.findall(DOCUMENTS["docs/prefix-store.md"])
    assert language == "python"
    assert len([line for line in block.splitlines() if line]) <= 10
    for kind in (AutoModelForCausalLM, AutoTokenizer):
        original = kind.from_pretrained

        def load(name: str, original: Any = original) -> Any:
            assert name == "HuggingFaceTB/SmolLM2-135M-Instruct"
            return original(needle.FOLDER)

        monkeypatch.setattr(kind, "from_pretrained", load)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("QADA_HOME", str(tmp_path))
    block = block.replace(" cache=cache,", f" {CACHE}=cache,")  # as the comment beside it says
    exec(compile(block, "docs/prefix-store.md", "exec"), {})
    found = capsys.readouterr().out
    (first, second) = (
        {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", line)}
        for line in found.splitlines()
        if "StoreStats" in line
    )
    assert (first["hits"], second["hits"]) == (0, 1)
    assert second["prompt_tokens"] - first["prompt_tokens"] - second["saved_tokens"] < 40  # the second question alone
