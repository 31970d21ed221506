"""Which cache a prompt is read with, and how many there are at a time."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from models import SMALL, prompt, tiny
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.serving.conversations import Conversations, conversations_of

OPTIONS = {"threshold": 1.0, "moments": "current", **SMALL}


class Kept:
    """The conversations of a model, and how a call takes and keeps their caches."""

    def __init__(self, model: PreTrainedModel, size: int) -> None:
        self.model, self.size, self.conversations = model, size, Conversations()

    def take(self, tokens: Tensor) -> QAdACache:
        return self.conversations.take(self.model, tokens, options=OPTIONS, size=self.size)

    @torch.no_grad()
    def keep(self, tokens: Tensor, cache: QAdACache) -> None:
        self.model(tokens[None, cache.get_seq_length() :], past_key_values=cache)
        self.conversations.keep(self.model, tokens, cache, options=OPTIONS, size=self.size)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


def tokens(length: int, seed: int) -> Tensor:
    return prompt(length, seed=seed)[0][0]


def test_the_longest_beginning_is_taken(model: PreTrainedModel) -> None:
    kept, text = Kept(model, 3), tokens(100, seed=1)
    beginnings = [torch.cat([text[:length], tokens(20, seed=length)]) for length in (50, 80, 60)]
    taken = [kept.take(each) for each in beginnings]  # at once: else the next would go on with the one before
    for each, cache in zip(beginnings, taken, strict=True):
        kept.keep(each, cache)
    assert kept.take(text) is taken[1]
    assert taken[1].get_seq_length() == 80
    assert kept.take(text) is taken[2]  # the other is in use
    assert kept.take(text) is taken[0]
    assert kept.take(text) not in taken


def test_room_is_made_before_and_after(model: PreTrainedModel) -> None:
    """No more caches than asked for are there while a new one is filled, and none are left of calls that overlapped."""
    kept, texts = Kept(model, 2), [tokens(60, seed) for seed in range(7)]

    def filled(*places: int) -> list[weakref.ref[QAdACache]]:
        """New caches for these texts, taken at once and kept one after the other."""
        taken = [kept.take(texts[place]) for place in places]
        for place, cache in zip(places, taken, strict=True):
            kept.keep(texts[place], cache)
        return [weakref.ref(cache) for cache in taken]

    def gone(caches: list[weakref.ref[QAdACache]]) -> list[bool]:
        gc.collect()
        return [cache() is None for cache in caches]

    caches = [*filled(0), *filled(1), *filled(2)]
    assert gone(caches) == [True, False, False]
    kept.take(texts[3])
    assert gone(caches) == [True, True, False]
    assert gone(filled(4, 5, 6)) == [True, False, False]


def test_conversations_are_a_models_own(model: PreTrainedModel) -> None:
    assert conversations_of(model) is conversations_of(model)
    assert conversations_of(tiny()) is not conversations_of(model)
