"""A text that a store keeps, and whether it is answered rightly whatever has happened to the store.

The cache's options here read everything, so that a prompt's tokens are the same however much of it was stored.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from models import SMALL, prompt, tiny
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import PrefixStore, QAdACache, files
from qada_cache.prefix_store import folder as folders
from qada_cache.prefix_store.naming import FILE_TOKENS, Name
from qada_cache.versions import pass_cache

OPTIONS: dict[str, Any] = {"threshold": 1.0, "moments": "current", **SMALL}
TEXT = prompt(2 * FILE_TOKENS + 70)[0]
LENGTH = TEXT.shape[1]


@functools.cache
def model() -> PreTrainedModel:
    return tiny()


@functools.cache
def whole() -> QAdACache:
    """A cache that has read the text."""
    cache = QAdACache(model(), **OPTIONS)
    with torch.no_grad():
        model()(TEXT, **pass_cache(cache))
    return cache


@functools.cache
def wanted() -> Tensor:
    """The next token's logits."""
    with torch.no_grad():
        return model()(TEXT, use_cache=False).logits[0, -1]


def segments(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if Name.parse(file.name))


def check_nothing_is_left(path: Path) -> None:
    """All files there are whole segments, of whole chains."""
    names = [Name.parse(file.name) for file in path.iterdir()]
    assert None not in names
    known = {name.own for name in names if name}
    for name in names:
        assert name is not None
        assert not name.number or name.parent in known
        with files.open_folder_at(path) as descriptor:
            folders.Folder(descriptor, path, {}).read(name)


def check_served(path: Path, held: int | None = None) -> None:
    """The text is answered rightly, of which the store has `held` tokens, and can be kept again."""
    store = PrefixStore(path)
    cache = store.cache(model(), TEXT, **OPTIONS)
    found = cache.get_seq_length()
    assert held in (None, found)
    with torch.no_grad():
        got = model()(TEXT[:, found:], **pass_cache(cache)).logits[0, -1]
    torch.testing.assert_close(got, wanted(), rtol=1e-4, atol=2e-4)
    store.keep(whole(), TEXT)
    assert PrefixStore(path).cache(model(), TEXT, **OPTIONS).get_seq_length() == LENGTH - 1
    check_nothing_is_left(path)
