"""A graph is not replayed after a change of the tensors or arguments that it was captured with."""

from __future__ import annotations

import copy
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

from qada_cache import QAdACache
from qada_cache.attention import generation
from qada_cache.decode_graph import step
from qada_cache.decode_graph.step import Step
from qada_cache.kernels import choice
from qada_cache.storage import TokenStore, row_tensors
from qada_cache.storage.padding import Padding
from qada_cache.versions import pass_cache


def replace_weight(layer: Any) -> None:
    layer.mlp.up_proj.weight = torch.nn.Parameter(layer.mlp.up_proj.weight * 2)


def replace_module(layer: Any) -> None:
    layer.mlp.act_fn = torch.nn.GELU()


def replace_forward(layer: Any) -> None:
    own = layer.mlp.forward
    layer.mlp.forward = lambda states: 2 * own(states)


def move_weight(layer: Any) -> None:
    layer.self_attn.q_proj.weight.data = 2 * layer.self_attn.q_proj.weight


def add_hook(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda _module, _given, found: 2 * found)


@pytest.mark.parametrize("change", [replace_weight, replace_module, replace_forward, move_weight, add_hook])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
@torch.no_grad()
def test_a_model_that_changes_is_not_replayed_as_it_was(kind: str, change: Callable[[Any], None], device: str) -> None:
    """Nothing of it is written to: another weight, module or function takes the place of the one that was captured. A
    replay that was under way is undone; where linear states cannot be, none was."""
    outputs, counts = [], []
    for on in (False, None):
        model = tiny(kind).to(device)
        cache = make(model, token_threshold=0.0, threshold=0.4, group_rule="head", cuda_graph=on)
        decode(model, cache, 8)
        for layer in model.model.layers:
            if change is not move_weight or hasattr(layer, "self_attn"):
                change(layer)
        outputs.append(decode(model, cache, 4, start=8))
        stats = cache.stats()
        counts.append((stats.decisions, stats.bulk_read_bytes, stats.kv_local_share.tolist()))
    assert RecordedGraph.replays >= 6
    assert torch.allclose(*outputs, atol=1e-5)
    assert counts[0] == counts[1]


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
def test_a_turn_that_moves_the_bulk(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of drafts, whose mask is not causal: it appends before its tokens are decided about."""
    monkeypatch.setattr(row_tensors, "REPLAYING", ())  # a prompt leaves room for no answer, on a GPU either
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


@torch.no_grad()
def test_each_row_has_moments_for_its_own_bulk(device: str) -> None:
    """Behind some steps one row of three takes those for more tokens, which another row takes already."""
    model, taken = tiny().to(device), []
    for on in (False, True):
        cache = make(model, token_threshold=0.0, moments="random-tokens", cuda_graph=on)
        ids, mask = (part.to(device) for part in prompt(50, 75, 120))
        model(ids, attention_mask=mask, **pass_cache(cache))
        for _ in range(16):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            position = mask.cumsum(dim=1)[:, -1:] - 1
            model(ids[:, -1:], attention_mask=mask, position_ids=position, **pass_cache(cache))
            taken.append([layer.kept_moments._lengths for layer in cache.layers])
    assert RecordedGraph.replays > 8
    assert taken[:16] == taken[16:]
    assert taken[0] == [(64, 64, 128)] * 2
    assert taken[-1] == [(64, 128, 128)] * 2


@torch.no_grad()
def test_moments_of_fewer_rows_are_others_even_in_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator may give the memory of freed ones again."""
    cache, memory = make(model := tiny(), token_threshold=0.0), torch.zeros(4, 1, 8)
    decode(model, cache, 1)
    taken = []
    for rows in (4, 2):
        monkeypatch.setattr(step, "find_other_moments", lambda *_, rows=rows: (memory[:rows], memory[:rows]))
        taken.append(Step(cache.layers, {}).find_moments())
    assert taken[0] != taken[1]


@torch.no_grad()
def test_a_flush_keeps_no_plan_of_buffers_that_it_has_replaced(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's old bulk is freed before the second layer's moves: both of them, old and new, may not fit."""
    monkeypatch.setattr(row_tensors, "REPLAYING", (device,))
    monkeypatch.setattr(row_tensors, "GRANULE", 1)
    model, flush_for, versions = tiny().to(device), TokenStore.flush_for, []
    cache = make(model, token_threshold=0.0, cuda_graph=True)
    decode(model, cache, 1)
    first, second = cache.layers

    def flush(own: TokenStore, tokens: int) -> None:
        if own is second.store and cache._shared.progress.changing:
            versions.append((first.store.version, None if first.plan is None else first.plan.version))
        flush_for(own, tokens)

    monkeypatch.setattr(TokenStore, "flush_for", flush)
    decode(model, cache, 29, start=1)
    assert RecordedGraph.replays > 8
    assert None in dict(versions).values()  # a flush has moved the bulk
    assert all(planned in (None, current) for current, planned in versions)


@torch.no_grad()
def test_a_prompt_read_token_by_token_goes_on_alike(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind pending tokens its single tokens are decoded ones, also where a flush moves the bulk."""
    monkeypatch.setattr(row_tensors, "GRANULE", 16)
    model, counts = tiny().to(device), []
    for on in (False, True):
        cache = make(model, token_threshold=0.0, cuda_graph=on)
        decode(model, cache, 16)
        assert not cache.layers[0].store.has_room
        with monkeypatch.context() as patch:  # as `generate` with `prefill_chunk_size=1`
            patch.setattr(generation, "find_prompt", lambda: generation.Prompt(True, 0))
            decode(model, cache, 14, start=16)
        counts.append((cache.stats().decisions, cache.layers[0].store.exact))
    assert RecordedGraph.replays > 8
    assert counts[0] == counts[1]


@torch.no_grad()
def test_no_rows_are_refused_as_without_a_graph(device: str) -> None:
    model = tiny().to(device)
    cache = make(model, token_threshold=0.0)
    decode(model, cache, 6)
    cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
    with pytest.raises(RuntimeError):
        model(torch.zeros(0, 1, dtype=torch.int64, device=device), **pass_cache(cache))


def take_another_token(cache: QAdACache) -> None:
    store = cache.layers[1].store
    store.append(store.near_keys[:, :, :1], store.near_values[:, :, :1], None)


def keep_another_sketch(cache: QAdACache) -> None:
    cache.layers[1].store.bulk.sketch = object()


def replace_layer(cache: QAdACache) -> None:
    cache.layers[1] = copy.deepcopy(cache.layers[1])


def replace_store(cache: QAdACache) -> None:
    cache.layers[1].store = copy.deepcopy(cache.layers[1].store)


CHANGES: dict[str, Callable[[QAdACache], Any]] = {
    "crop": lambda cache: cache.crop(-1),
    "crop far": lambda cache: cache.crop(-40),
    "crop and count again": lambda cache: (cache.crop(-1), setattr(cache.layers[1], "seen", cache.layers[1].seen + 1)),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([0, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0, 0, 0])),
    "reset": lambda cache: cache.reset(),
    "reset of a layer": lambda cache: cache.layers[1].reset(),
    "append": take_another_token,
    "absorb": lambda cache: cache.layers[1].store.absorb(*[torch.zeros(1, 2, 60, 8)] * 2, None),
    "advance": lambda cache: cache.layers[1].store.advance(),
    "reserve": lambda cache: cache.layers[1].store.reserve(cache.layers[1].store.end + 1000),
    "move": lambda cache: cache.layers[1].store.move(torch.device("cpu")),
    "leave the device": lambda cache: cache.layers[1].store.bulk.leave_device(),
    "grow": lambda cache: cache.layers[1].store.bulk.reserve(10_000),
    "sketch": keep_another_sketch,
    "update": lambda cache: cache.layers[1].update(*[torch.zeros(1, 2, 1, 8)] * 2),
    "padding": lambda cache: setattr(cache.layers[1], "padding", Padding(torch.tensor([[False, True]]))),
    "layer": replace_layer,
    "store": replace_store,
    "layers": lambda cache: cache.layers.pop(),
    "options": lambda cache: setattr(cache._shared, "options", cache.fork(threshold=0.5).options),
    "config": lambda cache: setattr(cache._shared.model.config, "output_hidden_states", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_whatever_changes_a_cache_shows_before_a_replay(change: Callable[[QAdACache], Any]) -> None:
    model = tiny()
    cache = make(model, token_threshold=0.0)
    decode(model, cache, 1)
    last = Step(cache.layers, {})
    last.advance()
    assert last.is_followed_by(cache.layers)
    change(cache)
    assert not last.is_followed_by(cache.layers)


@torch.no_grad()
def test_steps_that_torch_computes_have_none_and_it_is_said(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, told = tiny().to(device), "which no CUDA graph holds"
    decode(model, make(model, token_threshold=0.0, cuda_graph=True), 6)
    assert RecordedGraph.replays
    monkeypatch.setattr(choice, "choose_kernel", lambda *_, **__: None)
    decode(model, make(model, token_threshold=0.0), 6)
    assert told not in caplog.text
    decode(model, make(model, token_threshold=0.0, cuda_graph=True), 6)
    assert caplog.text.count(told) == 1
