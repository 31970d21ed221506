"""Caches of a model's last conversations. A request that begins like one of them goes on with it."""

import logging
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention import forward as attention
from ..cache import QAdACache
from ..forked import renew
from ..models import identity
from ..models.asking import UntoldWeightsError
from ..prefix_store.coded import find_device
from ..said_once import warn_once
from ..stats import count_bytes
from .memory import find_host_memory

logger = logging.getLogger(__name__)

CONVERSATIONS = 4  # kept for each model
MEMORY = 0.25  # share of the host's memory for their caches
SECONDS = 3600.0  # a conversation unused for longer is dropped


@dataclass(frozen=True)
class Limits:
    """Limits of a model's conversations; ValueError, if one is of another type or out of its range."""

    conversations: int = CONVERSATIONS  # the most that are kept, the one under way included
    # Of all caches, on host and devices together: bytes (an int), or a share of `find_host_memory` (a float in [0, 1]).
    memory: int | float = MEMORY
    seconds: float = SECONDS  # since its last use

    def __post_init__(self) -> None:
        if type(self.conversations) is not int or self.conversations < 0:
            raise ValueError(f"conversations must be an int, 0 or more, got {self.conversations!r}")
        share = isinstance(self.memory, float) and 0.0 <= self.memory <= 1.0
        if not share and (type(self.memory) is not int or self.memory < 0):
            raise ValueError(f"conversations_memory must be bytes (an int) or a share in [0, 1], got {self.memory!r}")
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, (int, float)) or not self.seconds >= 0:
            raise ValueError(f"conversations_seconds must be a number, 0 or more, got {self.seconds!r}")

    @property
    def bytes(self) -> int:
        """Bytes of memory for the caches."""
        return self.memory if isinstance(self.memory, int) else int(self.memory * find_host_memory())


@dataclass(eq=False)
class Conversation:
    """A cache and its tokens: kept for the next call, or taken by one call, which alone uses it then."""

    cache: QAdACache
    # Options of the cache, a sample of the weights, the owner's key, autocast's dtype. Calls with equal ones take it.
    terms: tuple
    tokens: Tensor  # token ids [tokens] of the cache, on the host
    continued: bool = False  # whether a second call has taken it; a prompt that is asked once never is
    bytes: int = 0  # of the cache, on host and devices
    host_bytes: int = 0  # those of them in the host's memory
    used: float = 0.0  # time of the last use, by `time.monotonic`

    def count_shared(self, prompt: Tensor) -> int:
        """Leading tokens of `prompt` that this cache would save it from reading; 0 if it should not be taken for it."""
        cached = len(self.tokens)
        longest = min(cached, len(prompt) - 1)
        shared = int((self.tokens[:longest] == prompt[:longest]).cumprod(0).sum())
        reachable = self.cache.find_last_beginning(shared)  # by a crop
        return reachable if shared == cached or 2 * reachable >= cached else 0


def _sample_weights(model: PreTrainedModel) -> Any:
    """A value that is equal for calls with the same weights. If nothing identifies them, it equals no other."""
    try:
        return identity.sample(model)
    except UntoldWeightsError as error:
        warn_once(logger, f"no conversation with this model is continued: {error}")
        return object()


class Conversations:
    """Kept conversations of one model, for any number of threads. One that is taken and never kept again is dropped."""

    def __init__(self) -> None:
        self._kept: list[Conversation] = []
        names = "requests", "continued", "restored", "prompt_tokens", "cached_tokens", "evicted", "expired"
        self._counters = Counter(dict.fromkeys(names, 0))
        self._lock = threading.RLock()

    def counters(self) -> dict[str, int]:
        """See the function `counters`."""
        with self._lock:
            size = sum(conversation.bytes for conversation in self._kept)
            return {**self._counters, "conversations": len(self._kept), "bytes": size}

    def take(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        *,
        options: Mapping[str, Any],
        limits: Limits,
        key: str | None,
        stored: int = 0,
    ) -> Conversation:
        """The conversation whose cache has the longest beginning of `prompt` `[tokens]` (on the host), or a new one.

        Its cache is cropped to that beginning. At least the prompt's last token remains to be read, for the logits of
        the next token. A conversation that shares less than half of its cache's tokens is left for its own next turn.
        Others are dropped to make room for this one. If a store has more of the prompt, `stored` tokens, it is a new
        one.
        """
        kind = model.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None  # of keys and values
        terms = dict(options), _sample_weights(model), key, autocast
        switched_on = attention.is_switched_on(model.config.get_text_config(decoder=True))
        with self._lock:
            usable = [each for each in self._kept if switched_on and each.terms == terms]
            shared = {conversation: conversation.count_shared(prompt) for conversation in usable}
            length = max(shared.values(), default=0)
            length = length if length >= stored else 0
            taken = next(each for each in shared if shared[each] == length) if length else None
            if taken is not None:
                self._kept.remove(taken)
            self._counters.update(requests=1, continued=length > 0, prompt_tokens=len(prompt), cached_tokens=length)
            self._make_room(limits, size=0 if taken is None else taken.bytes)
        if taken is None:
            cache = QAdACache(model, **options)
            cache.keep_snapshots()
            return Conversation(cache, terms, prompt[:0])
        taken.continued = True
        if length < len(taken.tokens):
            taken.cache.crop(length - len(taken.tokens))
        return taken

    def count_restored(self, tokens: int) -> None:
        """Count a new conversation whose cache got `tokens` tokens from a store."""
        with self._lock:
            self._counters.update(restored=1, cached_tokens=tokens)

    def keep(self, taken: Conversation, tokens: Tensor, limits: Limits) -> None:
        """Keep a taken conversation, whose cache now has `tokens` `[tokens]` (on the host), unless it is too large."""
        on_device, on_host = count_bytes(taken.cache)
        taken.tokens, taken.bytes, taken.used = tokens, on_device + on_host, time.monotonic()
        taken.host_bytes = taken.bytes if find_device(taken.cache).type == "cpu" else on_host
        with self._lock:
            if taken.bytes > limits.bytes:
                self._counters["evicted"] += 1
            else:
                self._make_room(limits, size=taken.bytes)
                self._kept.append(taken)
            self._drop_old(limits)

    def count_host_bytes(self) -> int:
        """Bytes of the kept caches in the host's memory."""
        with self._lock:
            return sum(conversation.host_bytes for conversation in self._kept)

    def forget(self) -> None:
        """Drop all conversations."""
        with self._lock:
            self._kept.clear()

    def forget_one(self, most: float = math.inf) -> bool:
        """Drop one: one larger than `most` bytes, else one that was never continued, else the oldest. So prompts that
        are asked once replace one another, and no conversation. Returns whether there was one."""
        with self._lock:
            dropped = min(self._kept, key=lambda each: (each.bytes <= most, each.continued, each.used), default=None)
            if dropped is not None:
                self._kept.remove(dropped)
                self._counters["evicted"] += 1
            return dropped is not None

    def _make_room(self, limits: Limits, *, size: int) -> None:
        """Drop conversations that are too old, then others until the limits allow one more of `size` bytes."""
        self._drop_old(limits)
        most = limits.bytes - size
        while len(self._kept) >= limits.conversations or sum(each.bytes for each in self._kept) > most:
            if not self.forget_one(most):
                return

    def _drop_old(self, limits: Limits) -> None:
        """Drop conversations that are too old: all, if the limit is 0 seconds."""
        oldest = time.monotonic() - limits.seconds
        young = [each for each in self._kept if limits.seconds and each.used >= oldest]
        self._counters["expired"] += len(self._kept) - len(young)
        self._kept = young


_of: "weakref.WeakKeyDictionary[PreTrainedModel, Conversations]" = weakref.WeakKeyDictionary()
_lock = renew(threading.Lock())


def find_conversations(model: PreTrainedModel) -> Conversations:
    """This model's conversations; they are dropped with the model."""
    with _lock:
        return _of.setdefault(model, Conversations())


@dataclass(frozen=True)
class AllConversations:
    """Kept conversations of all models, those of `first` being the first to be dropped."""

    first: Conversations

    def _list(self) -> list[Conversations]:
        with _lock:
            return [self.first, *(each for each in _of.values() if each is not self.first)]

    def forget_one(self) -> bool:
        """Drop one; returns whether there was one."""
        return any(each.forget_one() for each in self._list())

    def count_host_bytes(self) -> int:
        """Bytes of their caches in the host's memory."""
        return sum(each.count_host_bytes() for each in self._list())


def counters(model: PreTrainedModel) -> dict[str, int]:
    """Numbers by name for a server to export: of this model's requests, and of the conversations that are kept now.

    requests: calls with a cache that can be kept; continued: those of them that went on with a conversation; restored:
    those that went on with a stored prompt.
    prompt_tokens: of all these calls; cached_tokens: those of them that were not read again.
    evicted: conversations dropped for lack of room; expired: those dropped because they were unused for too long.
    conversations: how many are kept now; bytes: the size of their caches.
    """
    return find_conversations(model).counters()
