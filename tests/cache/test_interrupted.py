"""Forward passes and changes that were interrupted or refused: undone, or said by every use from there on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import exact, forced, generate, logits_of, prompt, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qada_cache import QAdACache
from qada_cache.attention import call


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("place", ["first mlp", "in last attention"])
def test_interrupted_forward(
    family: str, tokens: int, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An exception between two layers (out of memory, Ctrl-C) leaves them at different lengths."""
    model, text = tiny(family), prompt(150 + 2 * tokens)[0]
    cache = exact(model)
    forced(model, text[:, :150], [150], cache)

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "in last attention":
            patch.setattr(call, "attend_adaptively" if tokens <= 16 else "attend_exactly", interrupt)
        else:
            patch.setattr(model.model.layers[0].mlp, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forced(model, text[:, 150 : 150 + tokens], [tokens], cache)

    unusable = pytest.raises(RuntimeError, match=r"interrupted.*reset\(\)")
    with unusable:
        forced(model, text[:, 150 + tokens :], [tokens], cache)
    with unusable:
        cache.save(tmp_path / "half.safetensors")
    if family == "llama":  # transformers' other layers refuse these verbs for reasons of their own
        with unusable:
            cache.crop(-1)
        with unusable:
            cache.batch_repeat_interleave(2)
    cache.reset()
    wanted = generate(model, text, DynamicCache(config=model.config))
    got = generate(model, text, cache)
    assert torch.equal(got.sequences, wanted.sequences)
    assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-3


@pytest.mark.parametrize("held", [0, 150])
def test_interrupted_in_a_sliding_first_layer(held: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It counts tokens before it stores them, and the last layer was the one that the cache had reached."""
    model, text = tiny("gemma3"), prompt(180)[0]
    cache = exact(model)
    if held:
        forced(model, text[:, :held], [held], cache)

    def run_out(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", run_out)
        with pytest.raises(torch.OutOfMemoryError):
            cache.update(*torch.zeros(2, 1, 2, 20, 8), 0)
    assert cache.layers[0].get_seq_length() == held + 20
    unusable = pytest.raises(RuntimeError, match=r"^a forward pass was interrupted, .*call reset\(\)")
    with unusable:
        forced(model, text[:, held:], [20], cache)
    with unusable:
        cache.save(tmp_path / "half.safetensors")
    cache.reset()
    got, wanted = (forced(model, text, [150, 20], used) for used in (cache, DynamicCache(config=model.config)))
    assert (got - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_a_pass_that_a_reset_interrupts(family: str) -> None:
    """Later layers would take in its tokens alone."""
    model, text = tiny(family), prompt(160)[0]
    cache = exact(model)
    forced(model, text[:, :150], [150], cache)
    for _ in range(2):
        hook = model.model.layers[0].register_forward_hook(lambda *_: cache.reset())
        with pytest.raises(RuntimeError, match=r"reset\(\) interrupted a forward pass"):
            forced(model, text[:, 150:], [10], cache)
        hook.remove()
        assert cache.get_seq_length() == 0
        got, wanted = (forced(model, text, [150, 1], used) for used in (cache, DynamicCache(config=model.config)))
        assert (got - wanted).abs().max() < 1e-3


def filled(model: PreTrainedModel, text: Tensor) -> DynamicCache:
    """A `DynamicCache` that has read `text`."""
    cache = DynamicCache(config=model.config)
    forced(model, text, [text.shape[1]], cache)
    return cache


def test_interrupted_before_tokens_are_taken_in(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is interrupted before the first layer stores its tokens leaves the cache as it was."""
    text = prompt(160)[0]
    cache, plain = exact(model), filled(model, text[:, :150])
    forced(model, text[:, :150], [150], cache)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "view_as", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forced(model, text[:, 150:], [10], cache)
    assert cache.get_seq_length() == 150
    got, wanted = (forced(model, text[:, 150:], [10], used) for used in (cache, plain))
    assert (got - wanted).abs().max() < 1e-3


CHANGES: dict[str, Callable[[QAdACache], None]] = {
    "crop": lambda cache: cache.crop(-30),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("place", ["first layer", "second layer"])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("verb", CHANGES)
def test_interrupted_change(
    verb: str, loaded: bool, place: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some layers have other rows or tokens than the others, or half of one layer: every use says so."""
    text, cache = prompt(150, 150)[0], exact(model)
    forced(model, text[:, :140], [140], cache)
    cache.save(tmp_path / "whole.safetensors")
    if loaded:
        cache = QAdACache.load(tmp_path / "whole.safetensors", model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "second layer" or verb == "reset":
            method = verb if verb in ("crop", "reset") else "select_rows"
            patch.setattr(cache.layers[place == "second layer"], method, interrupt)
        else:  # sinks and window have been changed, or are about to be
            inner = "truncate" if verb == "crop" else "select_rows"
            patch.setattr(cache.layers[0].store.bulk, inner, interrupt)
        with pytest.raises(KeyboardInterrupt):
            CHANGES[verb](cache)
    for use in (
        lambda: forced(model, text[:, 140:], [10], copy.deepcopy(cache)),
        lambda: forced(model, text[:1, 140:], [10], cache),
        lambda: cache.save(tmp_path / "half.safetensors"),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
    ):
        with pytest.raises(RuntimeError, match=rf"^{verb} was interrupted, .*call reset\(\)"):
            use()
    cache.reset()
    got, wanted = (forced(model, text, [140, 10], used) for used in (cache, DynamicCache(config=model.config)))
    assert (got - wanted).abs().max() < 1e-3
