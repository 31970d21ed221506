"""Trained selection: what a model's indexer picks of its latents is read, nothing else is, and every mode gives what
`DynamicCache` gives."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import INDEXED, TOPK, assert_near, check_copies_files_crops_and_rows, make_indexed
from models import dynamic, exact, forced, generate, logits_of, prompt
from stand_in import accelerator
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import KeyMoments, QAdACache, restore_attention
from qada_cache.attention import forward, indexed
from qada_cache.attention.indexed import IndexedLayer
from qada_cache.versions import pass_cache

SPLIT = [100, 30, 3, 1, 1, 40, 1, 1]  # tokens: more at once than the window, fewer, one


@pytest.fixture(params=INDEXED)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_indexed(request.param)


@pytest.mark.parametrize("how", ["absorbed", "expanded"])
@pytest.mark.parametrize("offloaded", [False, True])
def test_turns_of_padded_rows(
    model: PreTrainedModel, offloaded: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of every length, blocks of picked tokens and picks of each row its own."""
    for name, size in {"EXPANDED": 1, "MIN_BLOCK": 7, "PICKED": 5}.items():
        monkeypatch.setattr(indexed, name, size)
    monkeypatch.setattr(indexed.PickedAttention, "_is_cheaper_absorbed", lambda *_: how == "absorbed")
    ids, mask = prompt(sum(SPLIT), 131)
    wanted = forced(model, ids, SPLIT, dynamic(model), mask)
    with accelerator() if offloaded else nullcontext():
        cache = exact(model)
        got = forced(model, ids, SPLIT, cache, mask)
    real = mask.bool()
    assert_near(model, got[real], wanted[real])
    assert all(isinstance(layer, IndexedLayer) for layer in cache.layers)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"prefill_chunk_size": 17}, {"prompt_lookup_num_tokens": 4}])
def test_modes_of_generate(mode: dict[str, Any], attention: str) -> None:
    model = make_indexed("DeepseekV32", attention=attention)
    lookup = "prompt_lookup_num_tokens" in mode
    ids, mask = prompt(90) if lookup else prompt(90, 71)
    wanted, got = (generate(model, ids, each, attention_mask=mask, **mode) for each in (dynamic(model), exact(model)))
    assert torch.equal(got.sequences, wanted.sequences)
    assert_near(model, logits_of(got), logits_of(wanted))


@torch.no_grad()
def test_what_is_picked_is_read_and_nothing_else(model: PreTrainedModel) -> None:
    """Bytes read are those of the tokens that the indexers picked; other tokens may be nan."""
    ids, picked = prompt(200)[0], list[Tensor]()
    cache = exact(model)
    forced(model, ids[:, :198], [150, 1], cache)
    before = cache.stats()
    for layer in model.model.layers:
        attention = layer.self_attn
        if attention.indexer is None:
            attention.register_forward_pre_hook(lambda *_: picked.append(picked[-1]))
        else:
            attention.indexer.register_forward_hook(lambda *found: picked.append(found[2].long().flatten()))
    wanted = model(ids[:, 198:199], **pass_cache(cache)).logits
    after, tokens = cache.stats(), 0
    assert len(picked) == len(cache.layers)
    for layer, found in zip(cache.layers, picked, strict=True):
        assert len(found) == TOPK
        first, last = layer.store.sinks, layer.store.flushed[0]
        tokens += int(((found >= first) & (found < last)).sum())
    assert 0 < tokens < TOPK * len(picked)
    token_bytes = cache.layers[0].store.bulk.token_bytes
    assert after.bulk_read_bytes - before.bulk_read_bytes == tokens * token_bytes
    held = sum(layer.store.bulk.lengths[0] for layer in cache.layers)
    assert after.dense_bulk_bytes - before.dense_bulk_bytes == held * token_bytes
    assert after.streamed_bytes == 0
    assert f"{after.read_share:.1%} of the bulk's bytes read" in str(after)
    cache.crop(-1)
    for layer, found in zip(cache.layers, picked, strict=True):
        store, hidden = layer.store, torch.ones(200, dtype=torch.bool)
        hidden[found] = False
        store.bulk.keys[0, 0, hidden[store.sinks : store.flushed[0]].nonzero().squeeze(-1)] = torch.nan
        store.near_keys[0, 0, : store.sinks][hidden[: store.sinks]] = torch.nan
        recent = slice(store.flushed[0], 198)
        store.near_keys[0, 0, store.sinks : store.sinks + store.end][hidden[recent]] = torch.nan
    assert torch.equal(model(ids[:, 198:199], **pass_cache(cache)).logits, wanted)


def test_copies_files_crops_and_rows(model: PreTrainedModel, tmp_path: Path) -> None:
    check_copies_files_crops_and_rows(model, tmp_path)


def test_forged_keys_of_an_indexer_are_refused() -> None:
    model = make_indexed("DeepseekV32")
    cache = exact(model)
    forced(model, prompt(50)[0], [50], cache)
    layer = cache.layers[0]
    for kept in (torch.zeros(1, 49, 16), torch.zeros(1, 50, 16, dtype=torch.int64), torch.zeros(1, 50)):
        with pytest.raises(ValueError, match=r"cannot hold keys of its indexer .* floating \[1, 50, dim\]"):
            layer.restore_beside({"indexer_keys": kept})
    with pytest.raises(ValueError, match="keeps no others"):
        layer.restore_beside({"others": torch.zeros(1)})
    layer.indexer_keys = layer.indexer_keys[:, :-1]
    with pytest.raises(RuntimeError, match="the indexer has keys of 50 tokens, and 51 are cached"):
        forced(model, prompt(1)[0], [1], cache)


def test_a_refused_first_call_leaves_no_keys_of_an_indexer(model: PreTrainedModel) -> None:
    """Whose rows would bind the next call."""
    cache, ids = exact(model), prompt(50)[0]
    with pytest.raises(NotImplementedError, match="cannot return attention weights"), torch.no_grad():
        model(ids.repeat(2, 1), **pass_cache(cache), output_attentions=True)
    assert_near(model, forced(model, ids, [40, 1], cache), forced(model, ids, [40, 1], dynamic(model)))


@torch.no_grad()
def test_a_refused_call_changes_nothing(model: PreTrainedModel) -> None:
    ids = prompt(60)[0]
    cache = exact(model)
    forced(model, ids[:, :50], [50], cache)
    wanted = model(ids[:, 50:51], **pass_cache(copy.deepcopy(cache))).logits
    biased = torch.zeros(1, 1, 1, 51).index_fill(3, torch.tensor([7]), -0.5)
    with pytest.raises(ValueError, match="adds numbers to scores"):
        model(ids[:, 50:51], attention_mask=biased, **pass_cache(cache))
    assert torch.equal(model(ids[:, 50:51], **pass_cache(cache)).logits, wanted)


def test_other_caches_and_no_trace() -> None:
    model, ids = make_indexed("DeepseekV32"), prompt(60)[0]
    kind = type(model.model.layers[0].self_attn)
    before = [forced(model, ids, [40, 1], each) for each in (dynamic(model), None)]
    cache = exact(model)
    forced(model, ids, [40, 1], cache)
    for wanted, each in zip(before, (dynamic(model), None), strict=True):
        assert torch.equal(forced(model, ids, [40, 1], each), wanted)
    assert hasattr(kind.expand_kv, "_qada_own")
    with pytest.raises(AttributeError, match="no single tensor"):
        cache.layers[0].keys  # noqa: B018  # which has numbers that stand for it in a pass alone
    restore_attention(model)
    assert hasattr(kind.expand_kv, "_qada_own") == bool(forward._switched_on)


def test_heads_decide_nothing() -> None:
    """A criterion that asks for it is refused, in copies as well."""
    model = make_indexed("DeepseekV32")
    with pytest.raises(ValueError, match="no full-attention layers, so there are no key moments"):
        KeyMoments.collect(model)
    assert QAdACache(model).options.criterion == QAdACache(model, criterion="dense").options.criterion == "dense"
    for criterion in ("gaussian", "local"):
        said = f"reads what the indexer picks of latent .* criterion='{criterion}' asks .* leave out criterion, or "
        with pytest.raises(NotImplementedError, match=said):
            QAdACache(model, criterion=criterion)
        with pytest.raises(NotImplementedError, match=said):
            QAdACache(model).fork(criterion=criterion)
