"""Layers that read another layer's keys ask its store: all is as if they had keys of their own, and nothing is stored
twice.

The models have the layers of those that are published, at widths that a test can compute: of Gemma 3n and of Gemma 4
that share keys, and of one that shares none and has fewer KV heads where attention is full.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import SMALL, VOCABULARY, dynamic, exact, forced, generate, logits_of, prompt, tiny
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from qada_cache import PrefixStore, QAdACache, StaticHeads, restore_attention
from qada_cache.state.layer import QAdALayer
from qada_cache.versions import pass_cache

# Family, layers, of these sharing, sliding ones between two of full attention, query heads, KV heads.
SIZES = {
    "gemma3n-e2b": ("gemma3n", 30, 10, 4, 8, 2),
    "gemma3n-e4b": ("gemma3n", 35, 15, 4, 8, 2),
    "gemma4-e2b": ("gemma4", 35, 20, 4, 8, 1),
    "gemma4-e4b": ("gemma4", 42, 18, 5, 8, 2),
    "gemma4-12b": ("gemma4_unified", 12, 0, 5, 8, 4),  # of the layers of this and those below, some
    "gemma4-26b-a4b": ("gemma4", 12, 0, 5, 8, 4),
    "gemma4-31b": ("gemma4", 12, 0, 5, 8, 4),
}
FEW = [pytest.param(name, marks=() if name.endswith("e2b") else pytest.mark.slow) for name in SIZES]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "padded": {"rows": (60, 41, 9)},
    "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 17, "rows": (60, 41)},
    "lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
}


def build(name: str = "gemma4-e2b", **changes: Any) -> PreTrainedModel:
    family, layers, shared, sliding, heads, kv_heads = SIZES[name]
    types = (["sliding_attention"] * sliding + ["full_attention"]) * (layers // (sliding + 1))
    told: dict[str, Any] = {"num_hidden_layers": layers, "num_kv_shared_layers": shared, "layer_types": types}
    told |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
    if family == "gemma3n":
        told |= {"intermediate_size": [48] * layers, "activation_sparsity_pattern": [0.0] * layers}
    elif not shared:
        told |= {"attention_k_eq_v": True, "num_global_key_value_heads": kv_heads // 4, "use_double_wide_mlp": False}
    if name == "gemma4-26b-a4b":
        told |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    if family != "gemma4_unified":
        return tiny(family, **told, **changes)
    like, kind = tiny("gemma4", **told, **changes).config.to_dict(), transformers.Gemma4UnifiedTextConfig
    told = {each: like[each] for each in like.keys() & vars(kind()).keys() - {"model_type", "architectures"}}
    config = kind(**told, global_head_dim=16, num_global_key_value_heads=kv_heads // 4)
    torch.manual_seed(0)
    return transformers.Gemma4UnifiedForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def assert_close(got: Tensor, wanted: Tensor) -> None:
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build()


@pytest.mark.parametrize("name", FEW)
def test_modes(name: str) -> None:
    """Modes of `generate`, and a cropped text that goes on, give DynamicCache's tokens and logits."""
    model = build(name)
    for mode, given in MODES.items():
        options = {"tokens": 12, **given}
        ids, options["attention_mask"] = prompt(*options.pop("rows", (60,)))
        wanted, cache = generate(model, ids, dynamic(model), **options), exact(model, moments="current")
        got = generate(model, ids, cache, **options)
        assert torch.equal(got.sequences, wanted.sequences), mode
        assert_close(logits_of(got), logits_of(wanted))
        stats = cache.stats()
        assert stats.layers == tuple(range(SIZES[name][3], model.config.num_hidden_layers, SIZES[name][3] + 1))
        assert (stats.local_share == 0).all()

    model, ids = build(name, sliding_window=200), prompt(120)[0]  # sliding layers can go back as far

    def read(cache: Cache) -> Tensor:
        """A prompt, a token, a short and a long turn, and back."""
        before = forced(model, ids, [80, 1, 9, 30], cache)
        cache.crop(-25)
        return torch.cat((before, forced(model, ids[:, 95:], [1, 3, 21], cache)), dim=1)

    assert_close(read(exact(model, moments="current")), read(dynamic(model)))


@pytest.mark.parametrize("name", ["gemma3n-e2b", "gemma4-e2b"])
def test_bytes_are_those_of_layers_with_keys_of_their_own(name: str) -> None:
    model = build(name)
    cache = QAdACache(model, threshold=0.5, moments="current", **SMALL)
    generate(model, prompt(150)[0], cache)
    filled = {layer.index: layer for layer in cache.layers if isinstance(layer, QAdALayer)}
    *owners, last = filled.values()
    assert [*filled, *last.readers] == [*range(4, SIZES[name][1], 5)]
    assert not any(layer.readers for layer in owners)
    tokens = last.store.near_keys.nbytes + last.store.bulk.nbytes
    beside = sum(reader.counters.nbytes for reader in last.readers.values())
    assert beside < 0.05 * tokens
    held = [sum(each) for each in cache.layer_bytes()]
    assert abs(held[last.index] - held[4] - beside) <= 0.05 * held[4]
    assert not any(held[SIZES[name][1] - SIZES[name][2] :])


def test_readers_decide_for_themselves(model: PreTrainedModel) -> None:
    """Layers that read another layer's keys decide by their own row of a table of heads, or by their own queries."""
    ids = prompt(150)[0]
    table = torch.ones(35, 8, dtype=torch.bool)
    table[[14, 24]] = False
    cache = QAdACache(model, criterion=StaticHeads(table), token_threshold=0, moments="current", **SMALL)
    generate(model, ids, cache)
    stats = cache.stats()
    assert stats.layers == (4, 9, 14, 19, 24, 29, 34)
    assert stats.local_share.mean(dim=1).tolist() == [0, 0, 1, 0, 1, 0, 0]

    seen: dict[int, list[Tensor]] = {}
    cache = QAdACache(model, threshold=0.02, group_rule="head", audit_every=1, **SMALL)
    cache.observer = lambda each: seen.setdefault(each.layer, []).append(each.flags.clone())
    generate(model, ids, cache)
    stats = cache.stats()
    assert {layer: len(calls) for layer, calls in seen.items()} == dict.fromkeys(stats.layers, stats.steps)
    local = [1 - torch.stack(seen[layer]).float().mean(dim=(0, 1, 4)).flatten() for layer in stats.layers]
    torch.testing.assert_close(stats.local_share, torch.stack(local))
    assert 0 < stats.local_share[3:].mean() < 1
    assert len({tuple(row) for row in stats.local_share[2:].tolist()}) > 1
    assert stats.audit is not None
    assert stats.bulk_read_bytes <= stats.dense_bulk_bytes


def test_copies_files_and_changes_of_rows(model: PreTrainedModel, tmp_path: Path) -> None:
    """All go on as the cache itself does, by counters of their own."""
    ids, following = prompt(90, 90)[0], prompt(20, 20, seed=3)[0]
    cache = QAdACache(model, threshold=0.5, token_threshold=0, **SMALL)
    with torch.no_grad():
        model(ids, **pass_cache(cache))
        model(following[:, :1], **pass_cache(cache))
        cache.save(tmp_path / "cache")
        loaded = QAdACache.load(tmp_path / "cache", model)
        twins = [copy.deepcopy(cache), loaded, cache.fork(), copy.deepcopy(cache)]
        twins[3].reorder_cache(torch.tensor([1, 0]))
        twins[3].reorder_cache(torch.tensor([1, 0]))
        wanted = forced(model, following[:, 1:], [1, 2, 1], cache)
        for place, twin in enumerate(twins):
            assert torch.equal(forced(model, following[:, 1:], [1, 2, 1], twin), wanted)
            assert twin.stats().steps == cache.stats().steps - (place == 2)
            if place != 2:
                torch.testing.assert_close(twin.stats().local_share, cache.stats().local_share)
        swapped = copy.deepcopy(cache)
        swapped.reorder_cache(torch.tensor([1, 0]))
        rows = [forced(model, part, [1], each) for part, each in ((ids[:, :5], cache), (ids[:, :5].flip(0), swapped))]
        assert_close(rows[1].flip(0), rows[0])
    cache.reset()
    assert cache.stats().steps == 0
    assert torch.equal(cache.stats().local_share.isnan(), torch.ones(7, 1, dtype=torch.bool))
    assert "7 of 35 layers" in repr(cache)


def test_a_broken_pass_is_noticed(model: PreTrainedModel) -> None:
    """Even between two readers, where the tokens are there but are not stored yet."""
    ids, cache = prompt(60)[0], exact(model, moments="current")
    layer = model.model.layers[24]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for before in ((), (40,)):
        cache.reset()
        with torch.no_grad():
            for tokens in before:
                model(ids[:, :tokens], **pass_cache(cache))
            hook = layer.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, sum(before) :], **pass_cache(cache))
            hook.remove()
            for use in (lambda: model(ids[:, :1], **pass_cache(cache)), lambda: cache.crop(-1)):
                with pytest.raises(RuntimeError, match="a forward pass was interrupted after layer 19"):
                    use()
    wanted = generate(model, ids, dynamic(model))  # of the same thread
    cache.reset()
    assert torch.equal(generate(model, ids, cache).sequences, wanted.sequences)


def test_copied_keys_are_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model on several devices makes them: they do not say whose they are, and are the last tokens' alone."""
    reader = model.model.layers[24].self_attn
    forward = type(reader).forward

    def on_another_device(self: Any, *given: Any, shared_kv_states: Any, **kwargs: Any) -> Any:
        if self is reader:
            shared_kv_states = {name: tuple(part.clone() for part in pair) for name, pair in shared_kv_states.items()}
        return forward(self, *given, shared_kv_states=shared_kv_states, **kwargs)

    monkeypatch.setattr(type(reader), "forward", on_another_device)
    with pytest.raises(RuntimeError, match=r"layer 24 reads the keys of layer 14, .* got a copy of them"):
        generate(model, prompt(60)[0], exact(model, moments="current"))
    assert generate(model, prompt(60)[0], dynamic(model)).sequences.shape[1] > 60


def test_queries_of_readers_are_in_the_metric_of_the_sketch(model: PreTrainedModel) -> None:
    """All that ask a layer's keys count alike, though transformers computes a prompt's last queries alone."""
    energies = QAdACache(model).options.query_energies
    assert energies is not None
    norms = [model.model.layers[index].self_attn.q_norm.weight.data for index in (19, 24, 29, 34)]
    for norm in norms:
        norm.mul_(2)
    raised = QAdACache(model).options.query_energies
    for norm in norms:
        norm.div_(2)
    assert raised is not None
    assert abs((raised[14] / energies[14]).mean() - (1 + 4 * 4) / 5) < 0.2
    assert torch.equal(raised[9], energies[9])


@torch.no_grad()
def test_prompts_are_stored(model: PreTrainedModel, tmp_path: Path) -> None:
    """With the states of sliding layers, which a pass in pieces leaves; it returns what one pass does."""
    store = PrefixStore(tmp_path, snapshot_tokens=64)
    ids, told = torch.randint(1, VOCABULARY, (1, 400), generator=torch.Generator().manual_seed(0)), {**SMALL}
    wanted = model(ids, **pass_cache(dynamic(model)), logits_to_keep=1).logits
    for held, tokens in ((0, 400), (0, 400), (200, 300)):
        text = torch.cat((ids[:, :tokens], ids[:, : 400 - tokens]), dim=1)
        cache = store.cache(model, text, threshold=1.0, moments="current", **told)
        assert (cache.get_seq_length() > held) is bool(store.stats().hits)
        logits = model(text[:, cache.get_seq_length() :], **pass_cache(cache), logits_to_keep=1).logits
        assert logits.shape == wanted.shape
        assert_close(logits, wanted if tokens == 400 else model(text, **pass_cache(dynamic(model))).logits[:, -1:])
        store.keep(cache, text)
    assert store.stats().hits == 2


def test_another_function_in_the_table_leads_back(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a library that calls what it found there. It is called for the prompts of layers that read others' keys."""
    ids = prompt(60)[0]
    wanted = generate(model, ids, dynamic(model), tokens=4)
    exact(model, moments="current")
    ours = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", lambda *given, **named: ours(*given, **named))
    got = generate(model, ids, exact(model, moments="current", prefill_threshold=0.0, kernels="torch"), tokens=4)
    assert torch.equal(got.sequences, wanted.sequences)
    restore_attention(model)
