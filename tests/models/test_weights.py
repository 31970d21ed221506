"""Samples of a model's weights: digested once, and again when weights have changed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import generate, prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.key_moments import defaults
from qada_cache.models import identity
from qada_cache.versions import pass_cache


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights were digested each time, while the test runs."""
    reads: list[int] = []
    original = identity._digest_contents

    def counting(given: list[tuple[bytes, bytes]]) -> list[str]:
        reads.append(len(given))
        return original(given)

    monkeypatch.setattr(identity, "_digest_contents", counting)
    monkeypatch.setattr(defaults, "_remembered", {})
    return reads


def test_read_only_where_they_matter_and_once(read: list[int], tmp_path: Path) -> None:
    model = tiny()
    for _ in range(2):
        QAdACache(model, moments="current", token_threshold=0.0)
        QAdACache(model, criterion="oracle", moments="random-tokens")
        QAdACache(model, moments="current")  # whatever energies are kept of other prompts
    assert read == []
    for _ in range(3):
        QAdACache(model, moments="random-tokens").save(tmp_path / "cache")
        QAdACache.load(tmp_path / "cache", model)
    assert len(read) == 1


def replaced(model: PreTrainedModel) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)


CHANGES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "written to": lambda model: model.lm_head.weight.mul_(2),
    "another tensor": replaced,
    "loaded": lambda model: model.load_state_dict(tiny(seed=1).state_dict()),
    "another storage": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 2),
    "written to, uncounted": lambda model: model.lm_head.weight.data.mul_(2),
    "another dtype": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changed_weights_are_noticed(change: str, read: list[int]) -> None:
    model = tiny()
    before = identity.sample(model)
    assert identity.sample(model) == before
    CHANGES[change](model)
    assert not identity.is_same(identity.sample(model), before)
    assert len(read) == 2


def test_models_made_under_inference_mode(read: list[int]) -> None:
    """Their weights do not count what is written to them."""
    with torch.inference_mode():
        model = tiny()
        before = identity.sample(model)
        model.lm_head.weight.mul_(2)
        assert not identity.is_same(identity.sample(model), before)
    assert before == identity.sample(tiny())
    assert len(read) == 3


def test_models_are_not_kept() -> None:
    gc.collect()
    before = len(identity._samples)
    model = tiny()
    identity.sample(model)
    assert len(identity._samples) == before + 1
    del model
    gc.collect()
    assert len(identity._samples) == before


def test_repr_asks_the_device_for_nothing() -> None:
    """No operation on a tensor at all, so none to wait for."""
    model = tiny()
    cache = QAdACache(model, sink_tokens=4, local_tokens=20)
    generate(model, prompt(90)[0], cache)

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, *_: Any) -> Any:
            raise AssertionError(function)

    with Refuse():
        text = repr(cache)
    assert "113 tokens" in text
    assert "MiB" in text


def test_caches_of_deep_models_can_be_copied() -> None:
    model = tiny(num_hidden_layers=300, hidden_size=16, intermediate_size=8)
    cache = QAdACache(model, sink_tokens=4, local_tokens=20)
    ids = prompt(40)[0]
    with torch.no_grad():
        model(ids, **pass_cache(cache))
        twin = copy.deepcopy(cache)
        outputs = [model(ids[:, :1], **pass_cache(used)).logits for used in (cache, twin)]
    assert torch.equal(*outputs)
    ours = set(map(id, cache.layers))
    for layer in twin.layers:
        assert layer.shared is twin._shared
        assert id(layer) not in ours
