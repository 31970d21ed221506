"""A plan, from which steps are computed, is made once, and anew when storage has another version."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import prompt, tiny

from qada_cache import QAdACache, storage
from qada_cache.attention import plan as plans
from qada_cache.sketch import find_segment_start
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.bulk_sketch import BulkSketch
from qada_cache.storage.versioned import Buffer
from qada_cache.versions import pass_cache


def fill(tokens: int = 1500, rows: int = 1, **options: Any) -> tuple[Any, QAdACache, torch.Tensor]:
    """A model, a cache of one layer that has decoded a token by torch, and more tokens."""
    model = tiny(num_hidden_layers=1, max_position_embeddings=8192)
    cache, ids = QAdACache(model, moments="current", kernels="torch", **options), prompt(*[tokens + 400] * rows)[0]
    for first, end in ((0, tokens), (tokens, tokens + 1)):
        model(ids[:, first:end], **pass_cache(cache))
    return model, cache, ids


def flush(model: Any, cache: QAdACache, ids: torch.Tensor) -> None:
    """Decode until tokens have left the near buffer."""
    store = cache.layers[0].store
    before = list(store.flushed)
    while store.flushed == before:
        model(ids[:, :1], **pass_cache(cache))


VERBS: dict[str, tuple[Callable[..., Any], bool]] = {  # and whether any buffer is another one after it
    "a token": (lambda model, cache, ids: model(ids[:, :1], **pass_cache(cache)), False),
    "a turn": (lambda model, cache, ids: model(ids[:, :9], **pass_cache(cache)), False),
    "a flush": (flush, False),
    "a crop": (lambda model, cache, ids: cache.crop(-1), False),
    "a long turn": (lambda model, cache, ids: model(ids[:, :999], **pass_cache(cache)), True),
    "more rows": (lambda model, cache, ids: cache.batch_repeat_interleave(2), True),
    "fewer rows": (lambda model, cache, ids: cache.batch_select_indices(torch.tensor([0])), True),
    "a beam": (lambda model, cache, ids: cache.reorder_cache(torch.tensor([0, 0])), False),
}


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("verb", VERBS)
@torch.inference_mode()
def test_versions_tell_buffers(verb: str, bits: int) -> None:
    model, cache, ids = fill(bulk_bits=bits, rows=2)
    store, (do, replaces) = cache.layers[0].store, VERBS[verb]
    before, tensors = store.version, list_buffers(store)
    if verb == "a flush" and bits == 8:
        replaces = True  # tokens beside records have room of their own number
    do(model, cache, ids)
    same = [one is other for one, other in zip(tensors, list_buffers(store), strict=True)]
    assert (store.version != before) is (not all(same)) is replaces


def list_buffers(store: Any) -> list[Any]:
    sketch = store.bulk.sketch
    return [store.near_keys, store.near_values, store.bulk, store.bulk.tensors, store.bulk.beside, sketch.tensors]


@pytest.mark.parametrize("kind", [storage.TokenStore, Bulk, BulkSketch])
def test_every_replacement_counts(kind: type) -> None:
    """Also those that nobody has thought of yet: the attributes count, not the verbs."""
    owner, names = object.__new__(kind), [name for name in dir(kind) if isinstance(vars_of(kind).get(name), Buffer)]
    assert names
    for count, name in enumerate(names, 1):
        setattr(owner, name, None)
        assert owner.replaced == count


def vars_of(kind: type) -> dict[str, Any]:
    return {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}


@torch.inference_mode()
def test_plans_are_kept_from_token_to_token() -> None:
    """A layer keeps its plan, over turns too; its copy, and a fork with other options, begin without one."""
    model, cache, ids = fill()
    layer = cache.layers[0]
    kept = layer.plan
    model(ids[:, :1], **pass_cache(cache))
    assert layer.plan is kept is not None
    assert copy.deepcopy(cache).layers[0].plan is None
    assert cache.fork(threshold=0.5).layers[0].plan is None
    for tokens in (2, 130):
        model(ids[:, :tokens], **pass_cache(cache))
        assert layer.plan is kept
    assert layer.turn_plan is not None


@torch.inference_mode()
def test_a_plan_is_kept_over_drafts_that_move_nothing() -> None:
    """Behind a bulk that is full but for its pending tokens. Drafts whose mask is not causal are exact."""
    model, cache, ids = fill(bulk_bits=16)
    layer = cache.layers[0]
    bulk, window = layer.store.bulk, layer.options.window
    model(ids[:, : bulk.capacity - bulk.lengths[0] - 1], **pass_cache(cache))  # and the one that is pending
    model(ids[:, :1], **pass_cache(cache))
    assert bulk.lengths[0] == bulk.capacity
    kept, seen = layer.plan, cache.get_seq_length()
    mask = torch.ones(12, seen + 12, dtype=torch.bool).tril(seen)[None, None]
    mask[0, 0, 1, seen] = False
    model(ids[:, :12], attention_mask=mask, **pass_cache(cache))
    assert layer.store.end == window + 13
    assert layer.plan is kept is not None


@pytest.mark.parametrize("tokens", [10, 140, 1500])  # no bulk, one without a sketch, and one with closed segments
@pytest.mark.parametrize("bits", [16, 8])
@torch.inference_mode()
def test_a_plan_is_kept_over_beams(bits: int, tokens: int) -> None:
    """Rows move within the buffers, unless a copy of the cache shares them. They then say what rows do that were copied
    to new buffers."""
    model, cache, ids = fill(tokens, rows=3, bulk_bits=bits)
    layer, kept, other = cache.layers[0], [], copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    other.batch_select_indices(torch.tensor([1, 0, 1, 0]))
    for step in range(6):
        if step:
            cache.reorder_cache(torch.tensor([1, 2, 0]))
        token = ids[:1, step : step + 1]
        got, wanted = (
            model(token.expand(rows, 1), **pass_cache(each)).logits for rows, each in ((3, cache), (4, other))
        )
        assert torch.allclose(got, wanted[[(row + step) % 3 for row in range(3)]], atol=1e-5)
        kept.append(layer.plan)
    assert kept == [layer.plan] * 6


@torch.inference_mode()
def test_a_crop_behind_a_flush_keeps_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan, and codes of closed segments: the open one alone is coded again."""
    model, cache, ids = fill(1900, bulk_bits=16)
    layer, coded = cache.layers[0], []
    store, kept = layer.store, layer.plan
    code, before = store.sketch._code, list(store.flushed)
    monkeypatch.setattr(store.sketch, "_code", lambda *given: coded.append(given[2:]) or code(*given))
    cache.crop(-300)
    assert store.flushed < before
    assert coded == [(find_segment_start(length := store.bulk.lengths[0]), length)]
    assert coded[0][0] > 0
    model(ids[:, :1], **pass_cache(cache))
    assert layer.plan is kept is not None


@torch.inference_mode()
def test_plans_do_not_keep_what_was_replaced() -> None:
    """A bulk that has moved to a larger buffer is freed, whatever calls came before."""
    model, cache, ids = fill(bulk_bits=16)
    layer = cache.layers[0]
    model(ids[:, :2], **pass_cache(cache))
    assert None not in (layer.plan, layer.turn_plan)
    capacity = layer.store.bulk.capacity
    while layer.store.bulk.capacity == capacity:
        old = [weakref.ref(tensor) for tensor in layer.store.bulk.tensors]
        model(ids[:, :1], **pass_cache(cache))
    assert [each() for each in old] == [None, None]


@torch.inference_mode()
def test_an_old_plan_is_noticed() -> None:
    """A buffer that is replaced behind the version's back."""
    model, cache, ids = fill()
    store = cache.layers[0].store
    assert plans.CHECKS
    vars(store)["near_keys"] = store.near_keys.clone()
    with pytest.raises(AssertionError, match=r"is old: .*near_keys"):
        model(ids[:, :1], **pass_cache(cache))
