"""The choice of the cache that a prompt is read with, and the number of caches at a time."""

from __future__ import annotations

import gc
import resource
import time
import weakref
from typing import Any

import pytest
import torch
from models import SMALL, prompt, tiny
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.serving import conversations as module
from qada_cache.serving import memory
from qada_cache.serving.conversations import (
    AllConversations,
    Conversation,
    Conversations,
    Limits,
    find_conversations,
)
from qada_cache.versions import pass_cache

OPTIONS = {"threshold": 1.0, "moments": "current", **SMALL}


class Kept:
    """The conversations of a model, and how a call takes and keeps their caches."""

    def __init__(self, model: PreTrainedModel, size: int = 4, **limits: Any) -> None:
        self.model, self.conversations = model, Conversations()
        self.limits = Limits(size, **limits)

    def take(self, tokens: Tensor, key: str | None = None) -> Conversation:
        return self.conversations.take(self.model, tokens, options=OPTIONS, limits=self.limits, key=key)

    @torch.no_grad()
    def keep(self, tokens: Tensor, taken: Conversation) -> None:
        self.model(tokens[None, taken.cache.get_seq_length() :], **pass_cache(taken.cache))
        self.conversations.keep(taken, tokens, self.limits)

    def ask(self, tokens: Tensor, key: str | None = None) -> int:
        """A request; the tokens of it that were kept."""
        taken = self.take(tokens, key)
        known = taken.cache.get_seq_length()
        self.keep(tokens, taken)
        return known

    def counters(self) -> dict[str, int]:
        return self.conversations.counters()


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


def tokens(length: int, seed: int) -> Tensor:
    return prompt(length, seed=seed)[0][0]


def test_the_longest_beginning_is_taken(model: PreTrainedModel) -> None:
    kept, text = Kept(model, 3), tokens(100, seed=1)
    beginnings = [torch.cat([text[:length], tokens(20, seed=length)]) for length in (50, 80, 60)]
    taken = [kept.take(each) for each in beginnings]  # at once: else the next would go on with the one before
    for each, conversation in zip(beginnings, taken, strict=True):
        kept.keep(each, conversation)
    assert kept.take(text) is taken[1]
    assert taken[1].cache.get_seq_length() == 80
    assert kept.take(text) is taken[2]  # the other is in use
    assert kept.take(text) is taken[0]
    assert kept.take(text) not in taken


def test_room_is_made_before_and_after(model: PreTrainedModel) -> None:
    """No more caches than asked for are there while a new one is filled, and none are left of calls that overlapped."""
    kept, texts = Kept(model, 2), [tokens(60, seed) for seed in range(7)]

    def filled(*places: int) -> list[weakref.ref[QAdACache]]:
        """New caches for these texts, taken at once and kept one after the other."""
        taken = [kept.take(texts[place]) for place in places]
        for place, conversation in zip(places, taken, strict=True):
            kept.keep(texts[place], conversation)
        return [weakref.ref(conversation.cache) for conversation in taken]

    def gone(caches: list[weakref.ref[QAdACache]]) -> list[bool]:
        gc.collect()
        return [cache() is None for cache in caches]

    caches = [*filled(0), *filled(1), *filled(2)]
    assert gone(caches) == [True, False, False]
    kept.take(texts[3])
    assert gone(caches) == [True, True, False]
    assert gone(filled(4, 5, 6)) == [True, False, False]


def test_conversations_are_a_models_own(model: PreTrainedModel) -> None:
    assert find_conversations(model) is find_conversations(model)
    assert find_conversations(tiny()) is not find_conversations(model)


def test_conversations_are_found_by_their_key(model: PreTrainedModel) -> None:
    """Nobody's answer says what another has asked."""
    kept, text = Kept(model), tokens(90, seed=1)
    assert [kept.ask(text, key) for key in (None, "mine", "yours")] == [0, 0, 0]
    assert [kept.ask(text, key) for key in (None, "mine", "yours", "another's")] == [89, 89, 89, 0]


def test_conversations_under_autocast_are_of_another_dtype(model: PreTrainedModel) -> None:
    """Their keys and values are, and a cache takes no others."""
    kept, text = Kept(model), tokens(90, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert [kept.ask(text), kept.ask(text)] == [0, 89]
    assert [kept.ask(text), kept.ask(text)] == [0, 89]


def test_memory_is_freed_of_another_models_conversations_too(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own go first."""
    monkeypatch.setattr(module, "_of", weakref.WeakKeyDictionary())
    own, other = Kept(model), Kept(tiny(seed=1))
    for each in (other, own):
        each.conversations = find_conversations(each.model)
    own.ask(tokens(90, seed=1))
    other.ask(tokens(90, seed=2))
    every = AllConversations(find_conversations(model))
    both = every.count_host_bytes()
    assert both >= own.counters()["bytes"] + other.counters()["bytes"]
    assert every.forget_one()
    assert [kept.counters()["conversations"] for kept in (own, other)] == [0, 1]
    assert every.forget_one()
    assert other.counters()["conversations"] == 0


def test_prompts_that_are_asked_once_flush_no_conversation(model: PreTrainedModel) -> None:
    kept, texts = Kept(model), [tokens(90, seed) for seed in range(12)]
    assert [kept.ask(texts[0][:length]) for length in (60, 70)] == [0, 60]
    for junk in texts[1:9]:
        assert kept.ask(junk) == 0
    assert kept.ask(texts[0][:80]) == 70
    assert kept.counters()["conversations"] == 4
    for other in texts[9:12]:  # conversations make room for one another, the oldest first
        assert [kept.ask(other[:length]) for length in (60, 70)] == [0, 60]
    assert kept.ask(tokens(90, seed=99)) == 0
    assert kept.ask(texts[0]) == 0


def test_what_is_forgotten_first_when_memory_ends(model: PreTrainedModel) -> None:
    kept, texts = Kept(model), [tokens(90, seed) for seed in range(4)]
    for text in texts[:2]:
        assert [kept.ask(text[:length]) for length in (60, 70)] == [0, 60]
    kept.ask(texts[2][:60])
    kept.ask(texts[3][:60])
    for left in (3, 2, 1):  # those that nobody went on with, then the others, the oldest first
        assert kept.conversations.forget_one()
        assert kept.counters()["conversations"] == left
    assert kept.ask(texts[1][:80]) == 70
    assert [kept.conversations.forget_one() for _ in range(2)] == [True, False]


def test_a_limit_in_bytes(model: PreTrainedModel) -> None:
    kept, texts = Kept(model, 100), [tokens(300, seed) for seed in range(6)]
    for text in texts[:2]:
        kept.ask(text)
    each = kept.counters()["bytes"] // 2
    assert each > 300 * 2 * 2 * 2 * 8 * 4 // 2  # half of two layers' keys and values
    kept = Kept(model, 100, memory=int(2.9 * each))
    for text in texts:
        kept.ask(text)
        assert kept.counters()["bytes"] <= 2.9 * each
    assert kept.counters()["evicted"] == 4
    assert [kept.ask(text) for text in texts[4:]] == [299, 299]
    kept.ask(tokens(1300, seed=9))  # which makes all others go
    assert kept.counters()["conversations"] == 1
    kept = Kept(model, 100, memory=each)
    kept.ask(texts[0])
    kept.ask(tokens(1300, seed=9))  # too large to be kept, and no reason to forget the other
    assert kept.ask(texts[0]) == 299


def test_the_limit_is_a_share_of_what_this_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = memory.find_host_memory()
    assert machine > 2**28
    assert Limits(memory=1.0).bytes == machine
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_AS: (2**27, resource.RLIM_INFINITY)}.get)
    assert Limits(memory=1.0).bytes == 2**27


def test_a_conversation_is_forgotten_in_time(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, now = Kept(model, seconds=100.0), time.monotonic()
    old, young = tokens(60, seed=1), tokens(60, seed=2)
    for seconds, text in ((0, old), (60, young)):
        monkeypatch.setattr(module.time, "monotonic", lambda seconds=seconds: now + seconds)
        kept.ask(text)
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 120)
    kept.ask(tokens(60, seed=3))
    assert kept.counters()["expired"] == 1
    assert [kept.ask(text) for text in (young, old)] == [59, 0]


def test_nothing_is_kept_for_no_time(model: PreTrainedModel) -> None:
    kept, text = Kept(model, seconds=0), tokens(60, seed=1)
    assert [kept.ask(text[:length]) for length in (40, 60)] == [0, 0]
    assert (kept.counters()["expired"], kept.counters()["bytes"]) == (2, 0)


def test_counters(model: PreTrainedModel) -> None:
    kept, text = Kept(model, 1), tokens(60, seed=1)
    assert [kept.ask(each) for each in (text[:40], text, tokens(30, seed=2))] == [0, 40, 0]
    found = kept.counters()
    assert found.pop("bytes") > 0
    assert found == {
        **{"requests": 3, "continued": 1, "prompt_tokens": 130, "cached_tokens": 40},
        **{"evicted": 1, "expired": 0, "restored": 0, "conversations": 1},
    }


@pytest.mark.parametrize("limits", [{"memory": 1.5}, {"memory": -1}, {"memory": True}, {"seconds": -1}])
def test_no_limits(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"conversations_{next(iter(limits))} must be"):
        Limits(**limits)
