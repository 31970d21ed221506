"""A fork equals a cache that was built with its options and given the same prefill; what it came from stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, generate, prompt, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from qada_cache import KeyMoments, QAdACache, StaticHeads
from qada_cache.versions import pass_cache

HEADS = StaticHeads(torch.tensor([[True, False, False, True], [False, True, False, False]]))
OPTIONS: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.3},
    "group rule": {"group_rule": "head"},
    "current": {"moments": "current"},
    "another prompt's": {"moments": "random-tokens"},
    "both": {"moments": "current+random-tokens"},
    "frozen": {"moments": "current", "update_moments": False},
    "oracle": {"criterion": "oracle", "threshold": 0.5},
    "static": {"criterion": HEADS},
    "dense": {"criterion": "dense"},
    "audited": {"audit_every": 2},
}
SOURCES: dict[str, dict[str, Any]] = {
    "default": {},
    "current": {"moments": "current"},
    "frozen": {"moments": "current", "update_moments": False},
    "dense": {"criterion": "dense"},
}
COUNTERS = ("steps", "decisions", "tokens", "bulk_read_bytes", "streamed_bytes", "host_bytes")
LONG, PADDED = prompt(150), prompt(150, 61, 9)


@torch.no_grad()
def filled(model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: Any) -> QAdACache:
    cache = QAdACache(model, **{"threshold": 0.12, **SMALL, **options})
    model(ids[:, :-1], attention_mask=mask[:, :-1], **pass_cache(cache))
    return cache


def assert_alike(fork: QAdACache, anew: QAdACache, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> None:
    """Moments to rounding, then the same tokens and counts."""
    for ours, theirs in zip(fork.layers, anew.layers, strict=True):
        moments = [getattr(getattr(layer, "store", None), "moments", None) for layer in (ours, theirs)]
        assert (moments[0] is None) == (moments[1] is None)
        if moments[0] is not None:
            assert moments[0].count == moments[1].count
            torch.testing.assert_close(moments[0].mean, moments[1].mean)
            torch.testing.assert_close(moments[0].covariance, moments[1].covariance)
    texts = [generate(model, ids, cache, tokens=14, attention_mask=mask).sequences for cache in (fork, anew)]
    assert torch.equal(texts[0], texts[1])
    ours, theirs = fork.stats(), anew.stats()
    assert [getattr(ours, name) for name in COUNTERS] == [getattr(theirs, name) for name in COUNTERS]
    assert torch.equal(ours.local_share.nan_to_num(-1), theirs.local_share.nan_to_num(-1))
    assert (ours.audit is None) == (theirs.audit is None)


# Only options that ask for moments depend on those that the first cache had, so they alone get all `SOURCES`.
CASES = [
    (options, source)
    for options, given in OPTIONS.items()
    for source in (SOURCES if "moments" in given else ["default", "dense"])
]


@pytest.mark.parametrize(("options", "source"), CASES)
def test_equals_a_cache_built_anew(options: str, source: str) -> None:
    model, (ids, mask) = tiny(), PADDED
    cache = filled(model, ids, mask, **SOURCES[source])
    before = repr(cache), [layer.store.moments is None for layer in cache.layers]
    asked = SOURCES[source] | OPTIONS[options]
    assert_alike(cache.fork(**OPTIONS[options]), filled(model, ids, mask, **asked), model, ids, mask)
    assert (repr(cache), [layer.store.moments is None for layer in cache.layers]) == before
    assert cache.stats().decisions == 0


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_layers_of_other_kinds(family: str) -> None:
    model, (ids, mask) = tiny(family), LONG
    cache = filled(model, ids, mask, criterion="dense")
    asked = {"criterion": "gaussian", "moments": "current"}
    assert_alike(cache.fork(**asked), filled(model, ids, mask, **asked), model, ids, mask)


@pytest.mark.parametrize("length", [1, 10])
def test_without_a_bulk(length: int) -> None:
    model, (ids, mask) = tiny(), prompt(length + 1)
    cache = filled(model, ids, mask, criterion="local")
    assert_alike(cache.fork(criterion="gaussian"), filled(model, ids, mask), model, ids, mask)
    empty = QAdACache(model, criterion="local", **SMALL).fork(criterion="gaussian", threshold=0.12)
    assert_alike(empty, QAdACache(model, threshold=0.12, **SMALL), model, ids, mask)


def test_a_fork_of_a_fork_counts_for_itself() -> None:
    model, (ids, mask) = tiny(), LONG
    cache = filled(model, ids, mask, audit_every=2)
    text = generate(model, ids, cache, tokens=25).sequences
    counted = cache.stats()
    fork = cache.fork(threshold=0.5).fork(threshold=0.12, audit_every=0)
    assert fork.stats().decisions == fork.stats().bulk_read_bytes == 0
    assert fork.stats().audit is None
    outputs = [generate(model, text, used, tokens=9) for used in (fork, cache)]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert fork.stats().decisions == cache.stats().decisions - counted.decisions


def test_frozen_moments_and_decoded_tokens(tmp_path: Path) -> None:
    """A fork that updates moments takes in the tokens decoded since they were frozen. Then it decides as a cache whose
    moments were never frozen."""
    model, (ids, mask) = tiny(), LONG
    frozen, going = (filled(model, ids, mask, moments="current", update_moments=update) for update in (False, True))
    for cache in (frozen, going):
        for token in torch.arange(160) % 90:  # the same for both
            with torch.no_grad():
                model(token.view(1, 1), **pass_cache(cache))
    fork = frozen.fork(update_moments=True)
    for ours, theirs in zip(fork.layers, going.layers, strict=True):
        assert ours.store.moments.count == theirs.store.moments.count == ours.store.bulk.lengths
    assert frozen.fork(threshold=0.3).layers[0].store.moments.count == frozen.layers[0].store.moments.count
    going.save(tmp_path / "cache")
    loaded = QAdACache.load(tmp_path / "cache", model)
    for cache in (going, going.fork(), loaded, fork, fork.fork(criterion="dense").fork(criterion="gaussian")):
        assert cache.layers[0].store.decoded
        with pytest.raises(ValueError, match="update_moments=False leaves out tokens that were decoded"):
            cache.fork(update_moments=False)
    with pytest.raises(ValueError, match="update_moments=False leaves out tokens that were decoded"):
        frozen.fork(criterion="dense").fork(criterion="gaussian")
    going.fork(update_moments=False, criterion="dense")  # which has no moments
    going.crop(-160)
    with torch.no_grad():
        model(prompt(40)[0], **pass_cache(going))  # an exact call, after which all that is stored was prefilled
    fork = going.fork(update_moments=False)
    assert [layer.store.moments.count for layer in fork.layers] == [layer.store.bulk.lengths for layer in fork.layers]


def test_kept_moments_are_read_once(tmp_path: Path) -> None:
    model, (ids, mask) = tiny(), LONG
    path = tmp_path / "moments"
    KeyMoments.collect(model, prompt=prompt(180, seed=8)[0]).save(path)
    cache = filled(model, ids, mask, moments=("current", path))
    path.unlink()
    assert cache.fork(threshold=0.3).options.other_moments is cache.options.other_moments
    with pytest.raises(FileNotFoundError):
        cache.fork(moments=path)


def test_built_with_a_config(tmp_path: Path) -> None:
    """Moments by name are those that its model left in the cache folder."""
    tiny().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = QAdACache(model, moments="random-tokens").options.other_moments
    cache = QAdACache(config=model.config, criterion="dense", **SMALL)
    assert cache.options.other_moments is None
    found = cache.fork(criterion="gaussian").options  # by the default's name, which was not needed before
    assert torch.equal(found.other_moments.covariance, wanted.covariance)
    assert found.current_moments


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "sinks": ({"sink_tokens": 5}, ValueError, "cannot change sink_tokens from 4 to 5"),
    "window": ({"local_tokens": 21}, ValueError, "cannot change local_tokens from 20 to 21"),
    "offloading": ({"offloading": False}, ValueError, "cannot change offloading from True to False"),
    "budget": ({"device_budget": 0.5}, ValueError, "cannot change device_budget from 0 to 0.5"),
    "name": ({"treshold": 0.5}, TypeError, "fork takes threshold, criterion, .*, not treshold"),
    "model": ({"config": None}, TypeError, "fork takes threshold, criterion, .*, not config"),
    "threshold": ({"threshold": 2.0}, ValueError, r"threshold must be in \[0, 1\]"),
    "criterion": ({"criterion": "qada"}, ValueError, "unknown criterion 'qada'"),
    "moments": ({"moments": 3}, TypeError, "moments must be one of"),
    "heads": ({"criterion": StaticHeads(torch.ones(3, 4, dtype=torch.bool))}, ValueError, "StaticHeads has shape"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_change(wrong: str) -> None:
    options, error, message = WRONG[wrong]
    cache = filled(tiny(), *LONG)
    with pytest.raises(error, match=message):
        cache.fork(**options)
    assert repr(cache.fork(**SMALL)) == repr(cache)  # the sizes that it has


def test_options_can_be_read_and_not_set() -> None:
    cache = filled(tiny(), *LONG)
    twin = cache.fork(threshold=0.25)
    assert (cache.options.threshold, twin.options.threshold) == (0.12, 0.25)
    assert cache.options.window == SMALL["local_tokens"] - SMALL["sink_tokens"]
    with pytest.raises(AttributeError):
        cache.options = twin.options


def test_another_models_moments() -> None:
    other = tiny(num_hidden_layers=3)
    moments = KeyMoments.collect(other, prompt=prompt(50)[0])
    with pytest.raises(ValueError, match="these KeyMoments are of a llama model"):
        filled(tiny(), *LONG).fork(moments=moments)


def test_an_interrupted_pass_is_refused() -> None:
    cache = filled(tiny(), *LONG)
    cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
    with pytest.raises(RuntimeError, match="interrupted"):
        cache.fork()
