"""Saved, loaded, continued equals continued."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, forced, generate, logits_of, prompt, tiny
from torch import Tensor
from transformers import PreTrainedModel

from eval.families import build
from qada_cache import KeyMoments, QAdACache, StaticHeads

FAMILIES = ["llama", "gemma3", "qwen3_next", "mistral_sliding"]
LENGTHS = {"one row": (150,), "padded": (150, 61, 9), "no bulk": (10,)}
TABLES = ("local_share", "kv_local_share")
COUNTERS = ("layers", "steps", "decisions", "tokens", "bulk_read_bytes", "streamed_bytes")


def adaptive(model: PreTrainedModel, **options: Any) -> QAdACache:
    return QAdACache(model, **{"threshold": 0.12, "moments": "current", **SMALL, **options})


def assert_continues_alike(
    model: PreTrainedModel, cache: QAdACache, loaded: QAdACache, ids: Tensor, mask: Tensor
) -> None:
    """Two turns on, one short, one long: the same bits, and the same counts from the beginning."""
    texts, masks = [ids, ids], mask
    for length in (6, 40):
        turn = prompt(*[length] * len(ids), seed=length)[0]
        texts = [torch.cat([text, turn], dim=1) for text in texts]
        masks = torch.cat([masks, torch.ones(len(ids), texts[0].shape[1] - masks.shape[1], dtype=torch.long)], dim=1)
        outputs = [
            generate(model, text, used, tokens=8, attention_mask=masks)
            for text, used in zip(texts, (cache, loaded), strict=True)
        ]
        texts = [output.sequences for output in outputs]
        assert torch.equal(texts[0], texts[1])
        assert torch.equal(logits_of(outputs[0]), logits_of(outputs[1]))
        ours, theirs = cache.stats(), loaded.stats()
        for name in COUNTERS:
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in TABLES:
            assert torch.equal(getattr(ours, name).nan_to_num(-1), getattr(theirs, name).nan_to_num(-1)), name


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_continue(family: str, lengths: str, tmp_path: Path) -> None:
    model, (ids, mask) = tiny(family), prompt(*LENGTHS[lengths])
    cache = adaptive(model)
    text = generate(model, ids, cache, tokens=12, attention_mask=mask).sequences
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
    assert repr(loaded) == repr(cache)
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    assert_continues_alike(model, cache, loaded, text, mask)


OPTIONS: dict[str, dict[str, Any]] = {
    "oracle": {"criterion": "oracle"},
    "dense": {"criterion": "dense", "offloading": False},
    "frozen moments": {"update_moments": False},
    "other sizes": {"threshold": 0.3, "sink_tokens": 0, "local_tokens": 33},
    "group rule": {"group_rule": "head"},
    "two prompts": {"moments": "current+random-tokens"},
    "query heads": {"criterion": StaticHeads(torch.tensor([[True, False, False, True], [False, True, False, False]]))},
    "kv heads": {"criterion": StaticHeads(torch.tensor([[True, False], [False, True]]))},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_continue_with_options(options: str, tmp_path: Path) -> None:
    model, (ids, mask) = tiny(), prompt(150, 61)
    cache = adaptive(model, **OPTIONS[options])
    text = generate(model, ids, cache, tokens=12, attention_mask=mask).sequences
    cache.save(str(tmp_path / "cache"))  # a str, and no suffix
    loaded = QAdACache.load(str(tmp_path / "cache"), config=model.config)
    assert repr(loaded) == repr(cache)
    assert_continues_alike(model, cache, loaded, text, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_continue_with_key_moments(dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = tiny(dtype=dtype), prompt(150)[0]
    KeyMoments.collect(model, prompt=prompt(180, seed=8)[0]).save(tmp_path / "moments.safetensors")
    cache = adaptive(model, moments=tmp_path / "moments.safetensors")
    text = generate(model, ids, cache, tokens=12).sequences
    cache.save(tmp_path / "cache.safetensors")
    (tmp_path / "moments.safetensors").unlink()  # the cache's file holds them
    loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
    assert "moments of custom" in repr(loaded)
    assert 0.0 < cache.stats().sparsity < 1.0
    assert_continues_alike(model, cache, loaded, text, torch.ones_like(ids))


@pytest.mark.parametrize("saving", [True, False])
@pytest.mark.parametrize("loading", [True, False])
def test_inference_mode(saving: bool, loading: bool, tmp_path: Path) -> None:
    model, ids = tiny(), prompt(150)[0]
    cache = adaptive(model)
    with torch.inference_mode(saving):
        text = generate(model, ids, cache, tokens=12).sequences.clone()
        cache.save(tmp_path / "cache.safetensors")
    with torch.inference_mode(loading):
        loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
    assert_continues_alike(model, cache, loaded, text.clone(), torch.ones_like(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_was_reset(family: str, tmp_path: Path) -> None:
    model, (ids, mask) = tiny(family), prompt(150, 61)
    cache = adaptive(model)
    generate(model, ids, cache, tokens=2, attention_mask=mask)
    cache.reset()
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
    got, wanted = (generate(model, ids[:1], used, tokens=4) for used in (loaded, adaptive(model)))
    assert torch.equal(logits_of(got), logits_of(wanted))


def test_what_load_would_refuse_is_not_written(tmp_path: Path) -> None:
    """DeepSeek-V4's own layers count in attributes of their own."""
    model = build("deepseek_v4")[0]
    cache = QAdACache(model)
    forced(model, prompt(150)[0] % 90, [150], cache)
    with pytest.raises(NotImplementedError, match=r"no format for layers of this model: .* entry_count"):
        cache.save(tmp_path / "cache.safetensors")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_no_tensor_is_printed(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of its elements would be waited for."""
    model = tiny(family)
    cache = adaptive(model)
    generate(model, prompt(150)[0], cache, tokens=2)
    monkeypatch.setattr(Tensor, "__repr__", lambda *_, **__: pytest.fail("a tensor was printed"))
    cache.save(tmp_path / "cache.safetensors")
    assert QAdACache.load(tmp_path / "cache.safetensors", model).get_seq_length() == 151


def test_empty_cache(tmp_path: Path) -> None:
    model, ids = tiny(), prompt(150)[0]
    adaptive(model).save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
    assert loaded.get_seq_length() == 0
    assert torch.equal(logits_of(generate(model, ids, loaded)), logits_of(generate(model, ids, adaptive(model))))


def test_loading_switches_a_fresh_model_on(tmp_path: Path) -> None:
    """Another process: the same weights, and no cache built for them before."""
    model, ids = tiny(), prompt(150)[0]
    cache, fresh = adaptive(model), tiny()
    text = generate(model, ids, cache).sequences
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", fresh)
    outputs = [generate(*pair) for pair in ((model, text, cache), (fresh, text, loaded))]
    assert torch.equal(logits_of(outputs[0]), logits_of(outputs[1]))


def test_pickling_is_refused_in_words() -> None:
    cache = adaptive(tiny())
    for attempt in (pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be pickled, .*: use save\(\) and QAdACache\.load"):
            attempt(cache)
    assert copy.copy(cache).layers is cache.layers


def test_a_model_that_was_moved_to_another_dtype(tmp_path: Path) -> None:
    """A file of the new weights beside the old tokens would serve no model. A cache filled afterwards does."""
    model, ids, path = tiny(), prompt(60)[0], tmp_path / "cache"
    cache = adaptive(model)
    forced(model, ids, [60], cache)
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"by its model in torch.float32, and the model is in torch.bfloat16 now"):
        cache.save(path)
    assert not path.exists()
    cache.reset()
    forced(model, ids, [60], cache)
    cache.save(path)
    assert QAdACache.load(path, model).get_seq_length() == 60
