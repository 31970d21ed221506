"""Caches that an earlier version of this package has saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, prompt, tiny
from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.sketch import codec, coded
from qada_cache.storage.bulk_sketch import BulkSketch
from qada_cache.versions import pass_cache

PROMPT = 1900
# The first channel has a hundredth of the others' energy, which was raised to 0.03 of their mean.
ENERGIES = torch.tensor([0.01, *[1.0] * 7], dtype=torch.float32).expand(2, 2, 8)
OPTIONS: dict[str, Any] = {**SMALL, "bulk_bits": 8, "threshold": 0.3, "moments": "current"}


def read_records(cache: QAdACache) -> list[torch.Tensor]:
    """Keys and values of each layer's closed segments, as their records say."""
    bulks = [layer.store.bulk for layer in cache.layers]
    return [part for bulk in bulks for part in bulk.read(slice(0, 1), slice(None), 0, bulk.stored[0])]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


@torch.no_grad()
def save_older(model: PreTrainedModel, path: Path, *, named: bool) -> list[torch.Tensor]:
    """Save a cache as it was when energies were raised to 0.03 of their mean: what its records say. Unless `named`, the
    file does not name that number."""
    with pytest.MonkeyPatch.context() as then:
        then.setattr(codec, "MIN_ENERGY", coded.OLDER_MIN_ENERGY)
        then.setattr(coded, "MIN_ENERGY", coded.OLDER_MIN_ENERGY)
        cache = QAdACache(model, **OPTIONS)
        cache._shared.options = replace(cache.options, query_energies=ENERGIES.clone())
        model(prompt(PROMPT)[0], **pass_cache(cache))
        if not named:
            record, absent = BulkSketch.record.fget, {"min_energy"}
            less = property(lambda sketch: {name: part for name, part in record(sketch).items() if name not in absent})
            then.setattr(BulkSketch, "record", less)
        cache.save(path)
        return read_records(cache)


def test_records_say_what_they_said(model: PreTrainedModel, tmp_path: Path) -> None:
    """Their keys are divided by the energies that they were coded with, also after another save."""
    path, again = tmp_path / "older.safetensors", tmp_path / "again.safetensors"
    said = save_older(model, path, named=False)
    loaded = QAdACache.load(path, model)
    loaded.save(again)
    for cache in (loaded, QAdACache.load(again, model)):
        assert cache.layers[0].store.bulk.stored == [1536]
        for found, wanted in zip(read_records(cache), said, strict=True):
            assert torch.equal(found, wanted)


def test_the_number_matters(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test could fail: with the energies as they are, records say other keys."""
    path = tmp_path / "older.safetensors"
    said = save_older(model, path, named=False)
    monkeypatch.setattr(coded, "OLDER_MIN_ENERGY", codec.MIN_ENERGY)
    monkeypatch.setattr("qada_cache.storage.bulk_sketch.OLDER_MIN_ENERGY", codec.MIN_ENERGY)
    keys = [found.equal(wanted) for found, wanted in zip(read_records(QAdACache.load(path, model)), said, strict=True)]
    assert keys == [False, True] * 2  # values have no energies


def test_an_unknown_number_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "older.safetensors"
    with pytest.MonkeyPatch.context() as then:
        then.setattr(coded, "OLDER_MIN_ENERGY", 0.02)
        save_older(model, path, named=True)
    with pytest.raises(ValueError, match=r"its records were coded for query energies of at least 0\.02"):
        QAdACache.load(path, model)
