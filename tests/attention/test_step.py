"""Layers that follow the first layer of a pass compute, store and count what they would by themselves."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from models import prompt, tiny

from qada_cache import QAdACache
from qada_cache.attention import call, forward, step
from qada_cache.versions import pass_cache

LAYERS, TOKENS = 3, 1500
pytestmark = needs_compiler


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The layers that followed another."""
    seen: list[int] = []

    def follow(lead: Any, layer: Any, *given: Any) -> Any:
        if (out := step.follow(lead, layer, *given)) is not None:
            seen.append(layer.index)
        return out

    monkeypatch.setattr(call, "follow", follow)
    return seen


def decode(model: Any, cache: QAdACache, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    return model(ids, **pass_cache(cache), **given).logits


def make(**options: Any) -> tuple[Any, QAdACache, torch.Tensor]:
    """A cache that has decoded two tokens: the second one's layers could follow already."""
    model = tiny(num_hidden_layers=LAYERS, max_position_embeddings=4096)
    cache, ids = QAdACache(model, moments="current", **options), prompt(TOKENS + 300)[0]
    for first, end in ((0, TOKENS), (TOKENS, TOKENS + 1), (TOKENS + 1, TOKENS + 2)):
        decode(model, cache, ids[:, first:end])
    return model, cache, ids


@pytest.mark.parametrize("options", [{}, {"threshold": 0.0}, {"bulk_bits": 8}, {"threshold": 1.0}], ids=str)
@torch.inference_mode()
def test_as_if_each_layer_did_it_all(
    options: dict[str, Any], followed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past a flush and a crop, bit for bit, with the same counts."""
    found = []
    for follows in (True, False):
        if not follows:
            monkeypatch.setattr(call, "follow", lambda *_: None)
        followed.clear()
        model, cache, ids = make(**options)
        logits = [decode(model, cache, ids[:, place : place + 1]) for place in range(140)]
        cache.crop(-3)
        logits += [decode(model, cache, ids[:, place : place + 1]) for place in range(5)]
        found.append((logits, [layer.counters.record for layer in cache.layers]))
        assert followed.count(1) == followed.count(2) >= 140 * follows
        assert 0 not in followed
    for one, other in zip(*(logits for logits, _ in found), strict=True):
        assert one.equal(other)
    for one, other in zip(*(counted for _, counted in found), strict=True):
        assert {name: str(value) for name, value in one.items()} == {name: str(value) for name, value in other.items()}


@torch.inference_mode()
def test_padded_rows(followed: list[int]) -> None:
    """Rows of several lengths, whose mask the first layer reads; and a padding token, which nobody follows for."""
    model = tiny(num_hidden_layers=LAYERS, max_position_embeddings=4096)
    ids = prompt(TOKENS)[0].expand(2, -1)
    mask = torch.ones(2, TOKENS + 4, dtype=torch.int64)
    mask[1, :90] = mask[0, TOKENS + 3] = 0
    outs = []
    for threshold in (0.95, 1.0):
        followed.clear()
        cache = QAdACache(model, moments="current", threshold=threshold)
        decode(model, cache, ids, attention_mask=mask[:, :TOKENS])
        for end in range(TOKENS + 1, TOKENS + 4):
            last = decode(model, cache, ids[:, :1], attention_mask=mask[:, :end])
        assert followed == [1, 2, 1, 2]
        decode(model, cache, ids[:, :1], attention_mask=mask)
        assert followed == [1, 2, 1, 2]
        outs.append(last)
    assert not outs[0].equal(outs[1])


def observe(model: Any, cache: QAdACache) -> None:
    cache.observer = lambda _: None


def lose(model: Any, cache: QAdACache) -> None:
    """A layer that has fewer tokens than the first."""
    cache.layers[1].crop(-1)
    cache.layers[2].crop(-1)


@pytest.mark.parametrize("change", [observe, lose], ids=lambda change: change.__name__)
@torch.inference_mode()
def test_what_differs_takes_the_long_way(change: Callable[..., None], followed: list[int]) -> None:
    model, cache, ids = make()
    decode(model, cache, ids[:, :1])
    assert followed
    followed.clear()
    change(model, cache)
    decode(model, cache, ids[:, :1])
    assert not followed


@pytest.mark.parametrize("told", [{"sliding_window": 7}, {"softcap": 3.0}, {"s_aux": torch.ones(4)}], ids=str)
@torch.inference_mode()
def test_a_layer_that_is_told_something_else(
    told: dict[str, Any], followed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One module's call with another argument than before is refused, or computed as it asks."""
    model, cache, ids = make()
    module, attend = model.model.layers[1].self_attn, call.attend

    def tell(layer: Any, base: Any, asking: Any, *given: Any) -> Any:
        *tensors, kwargs = given
        return attend(layer, base, asking, *tensors, kwargs | told if asking is module else kwargs)

    monkeypatch.setattr(forward, "_attend", tell)
    followed.clear()
    if "sliding_window" in told:
        with pytest.raises(NotImplementedError, match="sliding window"):
            decode(model, cache, ids[:, :1])
        return
    out = decode(model, cache, ids[:, :1])
    assert followed == [2]
    if "s_aux" in told:  # which "sdpa" does not cap
        other, untold, _ = make()
        assert not out.equal(decode(other, untold, ids[:, :1]))


@torch.inference_mode()
def test_layers_on_another_device_find_their_own_rows(followed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, ids = make()

    def follow(lead: Any, *given: Any) -> Any:
        there = SimpleNamespace(device=torch.device("meta"))
        return step.follow(lead._replace(rows=there), *given)

    monkeypatch.setattr(call, "follow", follow)
    expected = decode(model, cache.fork(), ids[:, :1])
    assert decode(model, cache, ids[:, :1]).equal(expected)


@torch.inference_mode()
def test_a_layer_in_training_is_refused(followed: list[int]) -> None:
    model, cache, ids = make()
    model.model.layers[1].self_attn.train()
    with pytest.raises(RuntimeError, match="inference only"):
        decode(model, cache, ids[:, :1])


@torch.inference_mode()
def test_audits_and_budgets_are_each_layers_own(followed: list[int]) -> None:
    for options in ({"audit_every": 2}, {"device_budget": 0.5}):
        make(**options)
        assert not followed
