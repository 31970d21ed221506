"""What changes beneath a graph, or is told beside it, is never replayed as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphed import decode, make
from models import prompt, tiny
from recorded_graph import RecordedGraph
from transformers import OPTConfig, OPTForCausalLM

from qada_cache.versions import pass_cache


def replace_weight(layer: Any) -> None:
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight * 2)


def replace_module(layer: Any) -> None:
    layer.mlp.act_fn = torch.nn.GELU()


def replace_forward(layer: Any) -> None:
    own = layer.mlp.forward
    layer.mlp.forward = lambda states: 2 * own(states)


@pytest.mark.parametrize("change", [replace_weight, replace_module, replace_forward])
@torch.no_grad()
def test_a_model_that_changes_is_not_replayed_as_it_was(change: Callable[[Any], None], device: str) -> None:
    """Nothing of it is written to: another weight, module or function takes the place of the one that was captured."""
    outputs = []
    for on in (False, None):
        model = tiny().to(device)
        cache = make(model, token_threshold=0.0, cuda_graph=on)
        decode(model, cache, 4)
        for layer in model.model.layers:
            change(layer)
        outputs.append(decode(model, cache, 4, start=4))
    assert RecordedGraph.replays >= 2
    assert torch.allclose(*outputs, atol=1e-5)


@torch.no_grad()
def test_a_replayed_cache_is_refused_by_another_model(device: str) -> None:
    model, other = tiny().to(device), tiny(seed=1).to(device)
    cache, _ = make(model, token_threshold=0.0), make(other)
    decode(model, cache, 4)
    with pytest.raises(RuntimeError, match="built for another model"):
        decode(other, cache, 1, start=4)


@torch.no_grad()
def test_a_graph_keeps_no_model(device: str) -> None:
    model = tiny().to(device)
    cache = make(model, token_threshold=0.0)
    decode(model, cache, 4)
    assert RecordedGraph.replays
    weight = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    del model
    gc.collect()
    assert weight() is None
    gone = weakref.ref(cache._decode_graph)
    gc.disable()  # a cache's memory is given back at once
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_what_a_decoder_is_told_beside_is_its_own_to_read(device: str) -> None:
    """Tensors, a mask that is longer, or one of each kind of attention."""
    model = tiny("qwen2").to(device)
    outputs = []
    for on in (False, True):
        cache = make(model, token_threshold=0.0, cuda_graph=on)
        model(prompt(60)[0].to(device), **pass_cache(cache), cache_position=torch.arange(60, device=device))
        masks = [{"full_attention": None}] * 3 + [torch.ones(1, 100, device=device)] * 3
        ids = prompt(90)[0].to(device)
        told = [(ids[:, 60 + at : 61 + at], mask) for at, mask in enumerate(masks)]
        outputs.append(
            torch.cat([model(token, **pass_cache(cache), attention_mask=mask).logits for token, mask in told])
        )
    assert torch.equal(*outputs)


@torch.no_grad()
def test_positions_that_a_decoder_makes_of_padding(device: str) -> None:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, word_embed_proj_dim=32, init_std=0.35,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval().to(device)
    ids, mask = (part.to(device) for part in prompt(70, 40))
    outputs = []
    for on in (False, True):
        cache = make(model, token_threshold=0.0, cuda_graph=on)
        model(ids[:, :60], attention_mask=mask[:, :60], **pass_cache(cache))
        steps = [(ids[:, at : at + 1], mask[:, : at + 1]) for at in range(60, 64)]
        outputs.append(
            torch.cat([model(token, attention_mask=seen, **pass_cache(cache)).logits for token, seen in steps])
        )
    assert torch.allclose(*outputs, atol=1e-5)


@torch.no_grad()
def test_a_turn_that_moves_the_bulk(device: str) -> None:
    """One of drafts, whose mask is not causal: it appends before its tokens are decided about."""
    model, outputs = tiny().to(device), []
    ids = prompt(300)[0].to(device)
    mask = torch.ones(12, 296, dtype=torch.bool, device=device).tril(284)[None, None]
    mask[0, 0, 1, 284] = False
    for on in (False, True):
        cache = make(model, token_threshold=0.0, threshold=1.0, cuda_graph=on)
        model(ids[:, :270], **pass_cache(cache))
        capacity = cache.layers[0].store.bulk.capacity
        for at in range(270, 284):
            model(ids[:, at : at + 1], **pass_cache(cache))
        before = RecordedGraph.replays
        model(ids[:, 284:296], attention_mask=mask, **pass_cache(cache))
        outputs.append(model(ids[:, 296:297], **pass_cache(cache)).logits)
        assert cache.layers[0].store.bulk.capacity > capacity
    assert before >= 4  # with what lay where it was
    assert torch.allclose(*outputs, atol=1e-5)
