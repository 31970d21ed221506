"""Caches that `generate(custom_generate=FOLDER)` keeps: when they serve again, are passed over, and go."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from calling import DECIDING, EXACT, Reads, Stop, StoppingStreamer, ours, said, stock
from models import VOCABULARY, prompt, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qada_cache import QAdACache, restore_attention


@pytest.mark.parametrize(("tokens", "kept"), [(0, True), (5, True), (-1, False)])
def test_a_client_that_goes_leaves_the_prompt(model: PreTrainedModel, reads: Reads, tokens: int, kept: bool) -> None:
    """Between two tokens the cache is whole; before the first there is none."""
    ids = said(120)
    wanted = stock(model, ids, DynamicCache(config=model.config))
    with pytest.raises(Stop):
        ours(model, ids, streamer=StoppingStreamer(tokens))
    reads.clear()
    assert torch.equal(ours(model, ids), wanted)
    assert reads.first() == (1 if kept else 120)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_client_that_goes_at_the_first_token_leaves_a_hybrid_s_prompt(family: str) -> None:
    """Whose other layers cannot be cropped, and have nothing to be cropped of."""
    model, ids = tiny(family), said(120)
    reads = Reads(model)
    with pytest.raises(Stop):
        ours(model, ids, streamer=StoppingStreamer(0))
    reads.clear()
    turn = said(120, 4)
    assert torch.equal(ours(model, turn), stock(model, turn, DynamicCache(config=model.config)))
    assert reads.first() == 4


@pytest.mark.parametrize("call", [0, 4], ids=["prefill", "decoding"])
@pytest.mark.parametrize("place", ["before attention", "after attention"])
def test_a_forward_pass_that_fails_leaves_nothing(model: PreTrainedModel, reads: Reads, call: int, place: str) -> None:
    ids, failing = said(120), model.model.layers[-1 if place == "before attention" else 0]

    def fail(*_: Any) -> None:
        if len(reads) > call:
            raise Stop

    ours(model, ids)
    reads.clear()
    module = failing if place == "before attention" else failing.mlp
    hook = module.register_forward_pre_hook(fail)
    with pytest.raises(Stop):
        ours(model, said(120, 4))
    hook.remove()
    reads.clear()
    assert torch.equal(ours(model, ids), stock(model, ids, DynamicCache(config=model.config)))
    assert reads[0] == 120


def test_a_cache_of_other_weights_is_passed_over(model: PreTrainedModel, reads: Reads) -> None:
    ids = said(120)
    ours(model, ids)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    reads.clear()
    assert torch.equal(ours(model, ids), stock(model, ids, DynamicCache(config=model.config)))
    assert reads[0] == 120


def test_a_cache_under_other_options_is_passed_over(model: PreTrainedModel, reads: Reads) -> None:
    ids = said(120)
    ours(model, ids, EXACT)
    wanted = stock(model, ids, QAdACache(model, **DECIDING))
    reads.clear()
    assert torch.equal(ours(model, ids, DECIDING), wanted)
    assert reads.first() == 120
    ours(model, said(wanted, 3), dict(DECIDING))
    assert reads.first() == 4


def test_attention_that_was_restored(model: PreTrainedModel) -> None:
    ids = said(120)
    first = ours(model, ids)
    restore_attention(model)
    assert torch.equal(ours(model, ids), first)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_layers_without_a_way_back(family: str) -> None:
    """A text is gone on with; one that differs is read again from the end of an earlier prompt, if that was long."""
    model = tiny(family)
    reads, carried, ids = Reads(model), QAdACache(model, **EXACT), said(60)
    for _ in range(2):
        wanted = stock(model, ids, carried)
        new = reads.first()
        assert torch.equal(ours(model, ids), wanted)
        assert reads.first() == new
        ids = said(wanted, 9)
    other = said(wanted[:, :70], (wanted[:, 70:71] + 1) % VOCABULARY)
    assert torch.equal(ours(model, other), stock(model, other, QAdACache(model, **EXACT)))
    assert reads[0] == 11
    with pytest.raises(Stop):
        ours(model, other, streamer=StoppingStreamer(3))
    reads.clear()
    ours(model, other)
    assert reads.first() == 71


def test_threads(model: PreTrainedModel) -> None:
    """Conversations at the same time, each of which has its cache alone. As many are kept: of fewer one might go
    between two of its turns, and be read again, exactly."""

    def talk(seed: int) -> Tensor:
        ids = prompt(60 + 10 * seed, seed=seed)[0]
        for _ in range(3):
            ids = said(ours(model, ids, DECIDING, conversations=4), 5)
        return ids

    alone = [talk(seed) for seed in range(4)]
    ours(model, said(20), conversations=0)
    with ThreadPoolExecutor(4) as pool:
        for got, wanted in zip(pool.map(talk, range(4)), alone, strict=True):
            assert torch.equal(got, wanted)


def test_inference_mode_comes_and_goes(model: PreTrainedModel) -> None:
    ids = said(120)
    with torch.inference_mode():
        answered = ours(model, ids)
    ids = said(answered.clone(), 5)
    wanted = stock(model, ids, DynamicCache(config=model.config))
    assert torch.equal(ours(model, ids), wanted)
    with torch.inference_mode():
        ours(model, said(wanted, 60))


def test_caches_go_with_their_model() -> None:
    model = tiny()
    ours(model, said(60))
    gone = weakref.ref(model), weakref.ref(model.config)
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
