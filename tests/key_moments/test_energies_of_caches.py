"""A cache takes query energies from its moments, and from nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Inputs, make_shared
from models import prompt, tiny
from test_defaults import forget
from torch import Tensor
from transformers import LlamaForCausalLM

from qada_cache import KeyMoments, QAdACache, StaticHeads
from qada_cache.files import tensor_file
from qada_cache.models.sharding import HeadShard
from qada_cache.state.layer import QAdALayer

pytestmark = pytest.mark.usefixtures("folder")


def of(cache: QAdACache) -> Tensor | None:
    return cache.options.query_energies


def test_a_cache_has_those_of_its_moments() -> None:
    """They are collected with these, if heads decide by them or tokens are coded. "current" has none: what other caches
    of the model left changes nothing."""
    model = tiny()
    static = {"criterion": StaticHeads(torch.ones(2, 4, dtype=torch.bool))}
    using: list[dict[str, Any]] = [{}, static, {"criterion": "dense", "bulk_bits": 8}, {"threshold": 1.0}]
    for options in using:
        assert of(QAdACache(model, moments="current", **options)) is None
    collected = KeyMoments.collect(model, prompt="random-tokens", progress=False).query_energies
    for options in using:
        assert torch.equal(of(QAdACache(model, **options)), collected)
        assert of(QAdACache(model, moments="current", **options)) is None
    assert of(QAdACache(tiny(seed=1), criterion="dense")) is None  # it would not use them


def test_moments_without_them() -> None:
    """Moments that have no query energies, of an unseen model's file, say, leave a cache without."""
    model = tiny()
    made = KeyMoments.collect(model, prompt=prompt(333)[0], progress=False)
    kwargs = {name: value for name, value in vars(made).items() if name not in ("_placed", "query_energies")}
    kept = of(QAdACache(model))
    assert of(QAdACache(model, moments=KeyMoments(**kwargs))) is None
    assert torch.equal(of(QAdACache(model, moments=made)), made.query_energies)
    assert not torch.equal(made.query_energies, kept)


def test_config_finds_what_its_model_left(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the place of a file of another format, which nobody reads."""
    tiny().save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True).eval()
    assert of(QAdACache(config=model.config)) is None
    with monkeypatch.context() as older:
        older.setattr(tensor_file, "FORMAT_VERSION", tensor_file.FORMAT_VERSION - 1)
        QAdACache(model)
    forget(monkeypatch)
    assert of(QAdACache(config=model.config)) is None
    kept = of(QAdACache(model))
    assert len(list(folder.iterdir())) == 1
    forget(monkeypatch)
    assert torch.equal(of(QAdACache(config=model.config)), kept)
    assert of(QAdACache(config=model.config, moments="current")) is None
    assert of(QAdACache(config=tiny().config)) is None  # of no name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_uses_those_of_its_heads(rank: int) -> None:
    """A process with two of four KV heads gives its layers' sketches the energies of these two."""
    energies = torch.rand(2, 4, 16)
    shared = make_shared(query_energies=energies, token_threshold=1.0)
    shared.model = replace(shared.model, shard=HeadShard(rank, 2, None, torch.device("cpu")))
    for index in (0, 1):
        layer = QAdALayer(shared, index)
        layer.lazy_initialization(*Inputs()(5)[:2])
        assert torch.equal(layer.store.sketch.energies, energies[index, 2 * rank : 2 * rank + 2])
