"""Sliding windows at least as long as the model's positions (Phi 3, Ministral 8B): they hide nothing, so that their
layers are full attention. A text that outgrows such a window is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from compilers import needs_compiler
from models import assert_same, dynamic, exact, forced, generate, logits_of, prompt, tiny
from transformers import PreTrainedModel

from eval import families
from qada_cache import KeyMoments, PrefixStore, QAdACache
from qada_cache.attention import call, checking, forward, step
from qada_cache.state.layer import QAdALayer

LONG: dict[str, dict[str, Any]] = {  # what else a family needs for a window in all layers
    "phi3": {},
    "mistral": {},
    "ministral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma3": {},
    "phimoe": {},
    "phi4_multimodal": {},
}
LENGTHS = (150, 47, 11)


def long(family: str, window: int | None = 1024, attention: str = "sdpa") -> PreTrainedModel:
    """A tiny model whose window is as long as its positions. None: the same model without a window."""
    if family in ("phimoe", "phi4_multimodal"):  # their windows are twice as long
        model = families.build(family)[0]
        model.generation_config.eos_token_id = None
        return model
    settings = {} if window is None else LONG[family]
    longest = {"max_position_embeddings": window or 1024}
    return tiny(family, attention=attention, sliding_window=window, **longest, **settings)


@pytest.fixture(autouse=True)
def ministral(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.FAMILIES, "ministral", ("Ministral", {"head_dim": 8}))


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that models give to attention over a cache of ours."""
    given: list[Any] = []
    attend = call.attend

    def watch(*arguments: Any) -> Any:
        given.append(arguments[6])
        return attend(*arguments)

    monkeypatch.setattr(forward, "_attend", watch)
    return given


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 40}], ids=str)
@pytest.mark.parametrize("family", LONG)
def test_threshold_one_is_dynamic_cache(family: str, options: dict[str, Any]) -> None:
    model = long(family)
    ids, mask = prompt(*LENGTHS)
    wanted = generate(model, ids % 90, dynamic(model), tokens=12, attention_mask=mask, **options)
    cache = exact(model, moments="current")
    assert {type(layer) for layer in cache.layers} == {QAdALayer}
    assert_same(model, generate(model, ids % 90, cache, tokens=12, attention_mask=mask, **options), wanted)
    assert cache.stats().decisions > 0


def test_eager_attention_over_padding() -> None:
    model = long("phi3", attention="eager")
    ids, mask = prompt(*LENGTHS)
    wanted = generate(model, ids, dynamic(model), tokens=12, attention_mask=mask)
    assert_same(model, generate(model, ids, exact(model), tokens=12, attention_mask=mask), wanted)


@pytest.mark.parametrize("options", [{}, {"bulk_bits": 8}, {"prefill_threshold": 2.0}], ids=str)
@pytest.mark.parametrize("family", ["phi3", "qwen2"])
def test_all_is_as_without_the_window(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Moments, selection of tokens, kernels, files and stored prompts."""
    outputs, caches, ids = [], [], prompt(1500)[0]
    for window in (2048, None):
        model = long(family, window)
        model.config.max_position_embeddings = 2048
        cache = QAdACache(model, threshold=0.2, group_rule="head", **options)
        outputs.append([generate(model, ids, cache)])
        assert 0 < cache.stats().sparsity < 1
        caches.append(cache)
        cache.save(tmp_path / "cache")
        loaded = QAdACache.load(tmp_path / "cache", model)
        outputs[-1].append(generate(model, outputs[-1][0].sequences, loaded))
        if not options:
            store = PrefixStore(tmp_path / f"store {window}")
            store.keep(cache, outputs[-1][0].sequences)
            assert store.cache(model, ids).get_seq_length() > 1000
    for with_window, without in zip(*outputs, strict=True):
        assert torch.equal(with_window.sequences, without.sequences)
        assert torch.equal(logits_of(with_window), logits_of(without))
    assert str(caches[0]) == str(caches[1])


def test_key_moments_of_a_prompt_as_long_as_the_window() -> None:
    """Transformers' layer for windows drops such a prompt's first key."""
    moments = [KeyMoments.collect(long("phi3", window), prompt=prompt(1024)[0][0]) for window in (1024, None)]
    assert torch.equal(moments[0].mean, moments[1].mean)
    assert torch.equal(moments[0].query_energies, moments[1].query_energies)


@pytest.mark.parametrize("calls", [[64], [40, 20, 4], [40, 1, 1, 22]], ids=str)
def test_no_mask_of_all_pairs_is_made(calls: list[int], masks: list[Any]) -> None:
    """Also of a text that is as long as the window, for which transformers makes one."""
    model, ids = long("phi3", 64), prompt(64)[0]
    wanted = forced(model, ids, calls, dynamic(model))
    torch.testing.assert_close(forced(model, ids, calls, exact(model, moments="current")), wanted, rtol=0, atol=1e-4)
    assert masks == [None] * 2 * len(calls)


@needs_compiler
def test_later_layers_follow_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi 3 tells each call of the window, which is no reason to check each layer anew."""
    model, followed, follow = long("phi3", 2048), [], step.follow

    def watch(*arguments: Any) -> Any:
        out = follow(*arguments)
        followed.append(out is not None)
        return out

    monkeypatch.setattr(call, "follow", watch)
    generate(model, prompt(1500)[0], QAdACache(model, moments="current"), tokens=12)
    assert sum(followed) > 8


def test_a_window_that_comes_later_is_looked_at() -> None:
    """An accepted one is the config's; a call with None before has to find None again."""
    assert checking.list_watched({"sliding_window": 64, "softcap": None}) == ("softcap",)
    assert checking.list_watched({"sliding_window": None, "softcap": None}) == ("sliding_window", "softcap")


@torch.no_grad()
def test_a_text_longer_than_the_window_is_refused() -> None:
    """The cache stays as it was, as long as the window, and goes on after a crop."""
    model, ids = long("phi3", 64), prompt(90)[0]
    cache, plain = exact(model, moments="current"), dynamic(model)
    with pytest.raises(NotImplementedError, match="this text has 65 tokens, and phi3 hides those before its newest 64"):
        forced(model, ids[:, :65], [65], cache)
    assert cache.get_seq_length() == 0
    wanted = forced(model, ids[:, :64], [30, 30, 1, 1, 1, 1], plain)
    got = forced(model, ids[:, :64], [30, 30, 1, 1, 1, 1], cache)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    for tokens in (1, 20):
        with pytest.raises(NotImplementedError, match=f"has {64 + tokens} tokens.*use transformers.DynamicCache"):
            forced(model, ids[:, 64 : 64 + tokens], [tokens], cache)
        assert cache.get_seq_length() == 64
    cache.crop(-10)
    wanted = forced(model, ids[:, :60], [60], dynamic(model))[:, 54:]
    torch.testing.assert_close(forced(model, ids[:, 54:60], [6], cache), wanted, rtol=0, atol=1e-4)


def test_a_window_shorter_than_the_positions_stays() -> None:
    """It is one token too short: a text of all positions loses its first token."""
    model = tiny("phi3", sliding_window=63, max_position_embeddings=64)
    assert not any(isinstance(layer, QAdALayer) for layer in exact(model).layers)
    layers = {"layer_types": ["full_attention"] * 2, "max_position_embeddings": 64}
    model = tiny("qwen2", sliding_window=64, use_sliding_window=True, **layers)  # a window that no layer has
    ids = prompt(90)[0]
    wanted = forced(model, ids, [70, 20], dynamic(model))
    torch.testing.assert_close(forced(model, ids, [70, 20], exact(model)), wanted, rtol=0, atol=1e-4)
