"""Limits of a store: bytes and age, the least recently used first; and the commands that show and drop what it has."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, prompt
from transformers import PreTrainedModel

from qada_cache import PrefixStore, QAdACache, files
from qada_cache.__main__ import main
from qada_cache.prefix_store.naming import FILE_TOKENS
from qada_cache.versions import pass_cache

OPTIONS: dict[str, Any] = {"threshold": 1.0, "moments": "current", **SMALL}


def keep(store: PrefixStore, model: PreTrainedModel, seed: int, tokens: int = 2 * FILE_TOKENS, **key: str) -> int:
    text, cache = prompt(tokens, seed=seed)[0], QAdACache(model, **OPTIONS)
    with torch.no_grad():
        model(text, **pass_cache(cache))
    return store.keep(cache, text, **key)


def found(store: PrefixStore, model: PreTrainedModel, seed: int, tokens: int = 2 * FILE_TOKENS) -> int:
    return store.cache(model, prompt(tokens, seed=seed)[0], **OPTIONS).get_seq_length()


def limited(store: PrefixStore, segments: float, **more: Any) -> PrefixStore:
    """A store of the same folder with room for `segments` files of the size of those that are there."""
    (size,) = {file.stat().st_size for file in Path(str(store.folder)).iterdir()}
    return PrefixStore(store.folder, max_bytes=int(size * segments), **more)


def test_what_was_not_used_for_longest_goes(store: PrefixStore, model: PreTrainedModel) -> None:
    for seed in (1, 2):
        keep(store, model, seed)
    small = limited(store, 5.5)
    assert found(small, model, 1) == 511  # which is used by that
    keep(small, model, 3)
    assert small.stats().segments == 5
    assert found(small, model, 2) == FILE_TOKENS  # the end goes first
    assert found(small, model, 3) == found(small, model, 1) == 511
    keep(small, model, 4)
    keep(small, model, 5)
    assert [found(small, model, seed) for seed in (1, 2, 3, 4, 5)] == [256, 0, 0, 511, 511]
    assert small.stats().bytes <= small.max_bytes
    assert len(small._headers) <= small.stats().segments == 5  # those of files that went are forgotten


def test_headers_that_another_thread_forgets_meanwhile(store: PrefixStore, model: PreTrainedModel) -> None:
    """As one does that listed the folder before a file was there."""

    class Forgotten(dict[Any, Any]):
        def __setitem__(self, name: Any, header: Any) -> None:
            pass

    keep(store, model, 1)
    other = PrefixStore(store.folder)
    other._headers = Forgotten()
    assert found(other, model, 1) == 511


def test_a_prompt_that_is_too_large(
    store: PrefixStore, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    keep(store, model, 1)
    small = limited(store, 2.5)
    assert keep(small, model, 2, tokens=3 * FILE_TOKENS + 8) == 2 * FILE_TOKENS
    assert "of a prompt of 776 tokens 512 are kept" in caplog.text
    assert small.stats().bytes <= small.max_bytes
    assert found(small, model, 2, tokens=3 * FILE_TOKENS) == 2 * FILE_TOKENS
    assert keep(PrefixStore(store.folder, max_bytes=0), model, 3) == 0
    assert store.stats().segments == 0


def test_age(store: PrefixStore, model: PreTrainedModel) -> None:
    keep(store, model, 1)
    keep(store, model, 2)
    for file in Path(str(store.folder)).iterdir():
        os.utime(file, (time.time() - 100,) * 2)
    assert found(store, model, 1) == 511
    young = PrefixStore(store.folder, max_age=50)
    assert found(young, model, 2) == 0
    assert found(young, model, 1) == 511
    assert store.stats().segments == 2
    for file in Path(str(store.folder)).iterdir():
        os.utime(file, (time.time() - 1e9,) * 2)
    assert found(PrefixStore(store.folder, max_age=None), model, 1) == 511
    assert found(PrefixStore(store.folder, max_age=0), model, 1) == 0


def test_commands(store: PrefixStore, model: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--folder", str(store.folder)]
    for action in (["list"], ["verify"], ["drop", "--all"]):
        assert main(["store", *action, *where]) == 0
        assert capsys.readouterr().out == f"no stored prompts: there is no folder {store.folder}\n"
    assert main(["store", "list"]) == 0
    assert capsys.readouterr().out == f"no stored prompts: there is no folder {files.find_home() / 'prompts'}\n"
    keep(store, model, 1)
    keep(store, model, 1, key="tenant")
    keep(store, model, 2, tokens=FILE_TOKENS + 9)
    assert main(["store", "list", *where]) == 0
    title, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert title == ["id", "model", "dtype", "key", "tokens", "MiB", "used"]
    assert sorted(row[1:5] for row in rows) == [["llama", "float32", "no", "777"], ["llama", "float32", "yes", "512"]]
    keyed = next(row[0] for row in rows if row[3] == "yes")
    assert main(["store", "verify", *where]) == 0
    assert capsys.readouterr().out == "6 files are whole, 0 were not\n"
    assert main(["store", "drop", *where, keyed]) == 0
    assert capsys.readouterr().out == "removed 2 files\n"
    assert [each.keyed for each in store.prompts()] == [False]
    assert found(store, model, 1) == 511
    first = min(file for file in Path(str(store.folder)).iterdir() if "-000000-" in file.name)
    first.write_bytes(b"no such file")
    assert main(["store", "verify", *where]) == 1
    assert re.search(r"not a safetensors file.*\n[23] files are whole, 1 were not\n", capsys.readouterr().out)
    assert main(["store", "verify", *where]) == 0
    assert main(["store", "drop", "--all", *where]) == 0
    assert store.stats().segments == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drop"], "takes the IDs that"),
        (["drop", "a", "--all"], "takes the IDs that"),
        (["drop", "nothing"], "no stored prompts nothing"),
        (["list", "a"], "list is of all stored prompts"),
        (["verify", "--all"], "verify is of all stored prompts"),
    ],
)
def test_wrong_commands(
    store: PrefixStore,
    model: PreTrainedModel,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    keep(store, model, 1)
    assert main(["store", *arguments, "--folder", str(store.folder)]) == 1
    assert message in capsys.readouterr().err
    assert store.stats().segments == 2


def test_files_that_cannot_be_removed_are_no_success(
    store: PrefixStore, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may want private text to be gone."""
    keep(store, model, 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(OSError, match=r"2 of 2 files of .* could not be removed"):
            store.drop()
    assert len(store.prompts()) == 1
    assert store.drop() == 2
