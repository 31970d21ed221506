"""Decode steps of hybrids as replays: a graph reads and writes states of linear layers where they lie, and windows of
sliding layers in places of its own."""

from __future__ import annotations

from functools import partial

import graphed
import pytest
import torch
from models import prompt, tiny, uneven
from recorded_graph import RecordedGraph
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from eval.families import build, make_tiny_config
from qada_cache import QAdACache
from qada_cache.decode_graph import lasting
from qada_cache.decode_graph.lasting import LayerStates
from qada_cache.versions import pass_cache

# LINEAR: states of several kinds, and layers without any beside them. SLIDING: masks by kinds of layers, more inputs,
# eager attention, and a model with a head that transformers takes for the decoder.
LINEAR = ("granitemoehybrid", "lfm2_moe", "nemotron_h", "olmo_hybrid", "qwen3_5_text")
SLIDING = ("gemma3", "gemma4", "gpt_oss", "modernbert-decoder")

make = partial(graphed.make, token_threshold=0.0)


def read(model: PreTrainedModel, cache: QAdACache, ids: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Last logits of calls of so many tokens."""
    parts = ids.to(model.device).split(sizes, dim=1)
    return torch.cat([model(input_ids=part, **pass_cache(cache), use_cache=True).logits[:, -1] for part in parts])


@pytest.mark.parametrize("model_type", LINEAR + SLIDING)
@torch.no_grad()
def test_families(model_type: str, device: str) -> None:
    """Past flushes, and past a second turn."""
    model = build(model_type)[0].to(device)
    model.set_experts_implementation("batched_mm")  # of float32, torch's grouped products wait for a CUDA device
    ids = prompt(130)[0] % 90 + 5
    sizes = 66, *[1] * 27, 5, *[1] * 32
    computed, replayed = (read(model, make(model, cuda_graph=on), ids, *sizes) for on in (False, True))
    assert RecordedGraph.replays > 30
    assert torch.equal(computed, replayed) if device == "cpu" else torch.allclose(computed, replayed, atol=1e-4)


@torch.no_grad()
def test_layers_that_differ_in_their_heads(device: str) -> None:
    """Replays count decisions for each layer, as calls without a graph do, if layers differ in their KV heads."""
    model, ids = uneven({0: 1, 1: 2, 2: 4}).to(device), prompt(90)[0]
    caches = [make(model, cuda_graph=on, threshold=0.12, group_rule="head") for on in (False, True)]
    computed, replayed = (read(model, cache, ids, 60, *[1] * 30) for cache in caches)
    assert RecordedGraph.replays > 15
    torch.testing.assert_close(replayed, computed, rtol=0, atol=1e-5)
    shares = [cache.stats().local_share for cache in caches]
    assert 0 < shares[0].nanmean() < 1
    torch.testing.assert_close(*shares, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_eager_attention_that_does_not_do_without_a_mask(device: str) -> None:
    """ModernBERT's decoder adds one to the scores of its sliding layers, whatever it is."""
    model = build("modernbert-decoder")[0].to(device)
    model.set_attn_implementation("eager")
    ids = prompt(90)[0] % 90 + 5
    caches = [make(model, cuda_graph=on) for on in (False, True)]
    computed, replayed = (read(model, cache, ids, 66, *[1] * 24) for cache in caches)
    assert RecordedGraph.replays > 10
    assert torch.equal(computed, replayed) if device == "cpu" else torch.allclose(computed, replayed, atol=1e-4)


@torch.no_grad()
def test_positions_that_a_decoder_makes_otherwise(device: str) -> None:
    """Bamba's, which are told none, go by a call's own tokens: no replay takes the place of such a step."""
    model = build("bamba")[0].to(device)
    ids = prompt(80)[0] % 90 + 5
    caches = [make(model, cuda_graph=on) for on in (False, True)]
    computed, replayed = (read(model, cache, ids, 60, *[1] * 20) for cache in caches)
    assert torch.allclose(computed, replayed, atol=1e-5)
    graph = caches[1]._decode_graph
    assert graph is not None
    assert "the model goes by numbers" in graph.failed


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3"])
@torch.no_grad()
def test_states_that_were_put_back(family: str, device: str) -> None:
    """A crop goes back to a snapshot: other tensors than a graph knows."""
    model = tiny(family).to(device)
    ids, outputs = prompt(200)[0], []
    for on in (False, True):
        cache = make(model, cuda_graph=on)
        cache.keep_snapshots()
        found = [read(model, cache, ids[:, :120], 60, *[1] * 10, 40, *[1] * 10)]
        assert cache.find_last_beginning(119) == 110
        cache.crop(110 - 120)
        found.append(read(model, cache, ids[:, 150:160], *[1] * 10))
        outputs.append(torch.cat(found))
    assert RecordedGraph.replays > 15
    assert torch.allclose(*outputs, atol=1e-5)


@torch.no_grad()
def test_padding_within_a_window(device: str) -> None:
    """Is hidden from its row's tokens: there is no replay before the window has left it."""
    model, outputs = tiny("gemma3", sliding_window=40).to(device), []
    (ids, mask), steps = prompt(60, 25), 30
    told = torch.cat([mask, torch.ones(2, steps, dtype=mask.dtype)], dim=1).to(device)
    places = (told.cumsum(dim=1) - 1).clamp_min(0)
    for on in (False, True):
        cache, found, seen = make(model, cuda_graph=on), [], 0
        for tokens in (60, *[1] * steps):
            new = slice(seen, seen := seen + tokens)
            given = {"attention_mask": told[:, :seen], "position_ids": places[:, new], **pass_cache(cache)}
            found.append(model(torch.cat([ids, ids], dim=1)[:, new].to(device), **given).logits[:, -1])
            assert not RecordedGraph.replays or seen > 35 + 39
        outputs.append(torch.stack(found))
    assert torch.allclose(*outputs, atol=1e-5)
    assert RecordedGraph.replays > 10


@torch.no_grad()
def test_padding_that_a_mask_of_a_window_alone_does_not_tell_of(device: str) -> None:
    """A model that reads images makes masks of its own without one: a step without padding is refused."""
    model = build("gemma4")[0].to(device)
    ids, mask = prompt(148, 120)
    ids, told, seen = (ids % 90 + 5).to(device), mask.to(device), 140
    cache = make(model, cuda_graph=True)
    model(input_ids=ids[:, :seen], attention_mask=told[:, :seen], **pass_cache(cache), use_cache=True)
    for at in range(seen, 147):
        model(input_ids=ids[:, at : at + 1], attention_mask=told[:, : at + 1], **pass_cache(cache), use_cache=True)
    before = RecordedGraph.replays
    assert before
    with pytest.raises(ValueError, match="does not agree with the tokens already cached"):
        model(input_ids=ids[:, 147:], **pass_cache(cache), use_cache=True)
    assert RecordedGraph.replays == before


@torch.no_grad()
def test_a_step_that_ended_in_a_linear_layer_is_refused(device: str) -> None:
    """Behind the last layer of ours, which would be replayed with one token more than the others hold."""
    model = build("qwen3_5_text")[0].to(device)
    cache, ids = make(model, cuda_graph=True), prompt(80)[0] % 90 + 5
    read(model, cache, ids[:, :66], 60, *[1] * 6)
    before = RecordedGraph.replays
    assert before
    token, told = ids[:, 66:67].to(device), {**pass_cache(cache), "output_hidden_states": True}  # which no graph gives
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache.layers[-1], "update_recurrent_state", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(token, **told)
    with pytest.raises(RuntimeError, match="interrupted"):
        read(model, cache, ids[:, 67:68], 1)
    assert RecordedGraph.replays == before


@torch.no_grad()
def test_layers_whose_keys_grow_have_no_graph(device: str) -> None:
    model = AutoModelForCausalLM.from_config(make_tiny_config(CONFIG_MAPPING["llama4_text"])).to(device)
    assert make(model)._decode_graph is None
    with pytest.raises(NotImplementedError, match="chunks"):
        make(model, cuda_graph=True)


@torch.no_grad()
def test_layers_that_record_the_past_have_no_graph(device: str) -> None:
    for family in ("qwen3_next", "gemma3"):
        model = tiny(family).to(device)
        cache = make(model, cuda_graph=True)
        read(model, cache, prompt(60)[0], 60)
        assert LayerStates(cache.layers).keeps_shapes
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        assert not LayerStates(cache.layers).keeps_shapes
        if family == "qwen3_next":  # older transformers' sliding layers do not get their masks right then
            read(model, cache, prompt(70)[0][:, 60:], *[1] * 10)
    assert not RecordedGraph.replays


@torch.no_grad()
def test_a_capture_that_fails_in_a_sliding_layer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the layer takes in a token: the step is computed without a graph, as are later ones."""
    model = build("gemma3")[0].to(device)
    ids, sizes = prompt(90)[0] % 90 + 5, (66, *[1] * 24)
    computed = read(model, make(model, cuda_graph=False), ids, *sizes)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("not in a graph")

    monkeypatch.setattr(lasting, "_update", fail)
    found = read(model, make(model, cuda_graph=True), ids, *sizes)
    assert torch.equal(computed, found) if device == "cpu" else torch.allclose(computed, found, atol=1e-4)


@torch.no_grad()
def test_replays_end_where_a_long_window_does(device: str) -> None:
    """Layers with a window as long as the model's positions are ours, and refuse a longer text, as a computed step."""
    model, outputs = tiny("phi3", sliding_window=80, max_position_embeddings=80).to(device), []
    for on in (False, True):
        cache = make(model, cuda_graph=on)
        outputs.append(graphed.decode(model, cache, 20))
        with pytest.raises(NotImplementedError, match="this text has 81 tokens"):
            graphed.decode(model, cache, 1, start=20)
        assert cache.get_seq_length() == 80
    assert RecordedGraph.replays > 10
    assert torch.allclose(*outputs, atol=1e-5)
