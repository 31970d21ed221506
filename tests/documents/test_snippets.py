"""Every block of Python in the documents runs as it stands, after those before it on its page."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from documents import DOCUMENTS, FENCED
from readable import readable_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from qada_cache import KeyMoments, PrefixStore, QAdACache
from qada_cache.key_moments.prompts import ARTICLE
from qada_cache.versions import CACHE

PAGES = {
    name: found
    for name, text in DOCUMENTS.items()
    if (found := [block for language, block in FENCED.findall(text) if language == "python"])
}


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small model in the place of the named one, and what a page speaks of before its first block."""
    model, tokenizer = readable_model(tmp_path, num_hidden_layers=1), AutoTokenizer.from_pretrained(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, **options: model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    monkeypatch.setitem(sys.modules, "openai", MagicMock())  # servers are tested in tests/serving
    (tmp_path / "docs").mkdir()
    for name, text in DOCUMENTS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QADA_HOME", str(tmp_path))
    long_prompt = " ".join(ARTICLE.read_text().split()[:200])
    inputs = tokenizer(long_prompt, return_tensors="pt")
    longer = tokenizer(f"{long_prompt} {long_prompt}", return_tensors="pt")
    names: dict[str, Any] = {
        "KeyMoments": KeyMoments, "PrefixStore": Store, "QAdACache": QAdACache, "cache": QAdACache(model),
        "documents_with_questions": [longer], "inputs": inputs, "long_prompt": long_prompt, "model": model,
        "tokenizer": tokenizer,
    }  # fmt: skip
    for block in PAGES[page]:
        exec(compile(block.replace(" cache=", f" {CACHE}="), page, "exec"), names)
    assert isinstance(names["cache"], QAdACache)


def Store(folder: str | None = None, **options: Any) -> PrefixStore:  # noqa: N802  # in a class's place
    """Folders of the documents are nobody's here."""
    return PrefixStore(f"{os.environ['QADA_HOME']}/{Path(folder or 'store').name}", **options)


def test_pages_are_found() -> None:
    assert {"README.md", "docs/cache-files.md", "docs/prefix-store.md"} <= {*PAGES}
