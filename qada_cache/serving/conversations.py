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

from torch import Tensor
from transformers import PreTrainedModel

from ..attention import forward as attention
from ..cache import QAdACache
from ..models import identity
from ..models.asking import UntoldWeightsError
from ..said_once import warn_once
from ..stats import count_bytes
from .memory import find_host_memory

logger = logging.getLogger(__name__)

CONVERSATIONS = 4  # kept of each model
MEMORY = 0.25  # of the host's, that their caches may take
SECONDS = 3600.0  # that one is kept unused


@dataclass(frozen=True)
class Limits:
    """Limits of a model's conversations; ValueError, if one is of another type or out of its range."""

    conversations: int = CONVERSATIONS  # how many are kept, the one under way included
    # Of caches, on host and devices together: bytes (an int), or a share of `find_host_memory` (a float in [0, 1]).
    memory: int | float = MEMORY
    seconds: float = SECONDS  # since one was last used

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
    """A cache and the tokens that it holds: kept for the next call, or taken by one, which has it alone."""

    cache: QAdACache
    terms: tuple  # a call has to have the same: options of its cache, a sample of the weights, the owner's key
    tokens: Tensor  # [tokens] on the host: the cache's tokens, from the first
    continued: bool = False  # whether anybody has gone on with it, as nobody does with a prompt that is asked once
    bytes: int = 0
    used: float = 0.0  # when, by `time.monotonic`

    def count_shared(self, prompt: Tensor) -> int:
        """Tokens of `prompt` that need not be read again if this cache is taken for it; 0 if it is not to be."""
        held = len(self.tokens)
        beginning = min(held, len(prompt) - 1)
        shared = int((self.tokens[:beginning] == prompt[:beginning]).cumprod(0).sum())
        begun = self.cache.find_last_beginning(shared)
        return begun if shared == held or 2 * begun >= held else 0


def _sample_weights(model: PreTrainedModel) -> Any:
    """What tells this call's weights from another's. A model whose weights cannot be told goes on with nothing."""
    try:
        return identity.sample(model)
    except UntoldWeightsError as error:
        warn_once(logger, f"no conversation with this model is continued: {error}")
        return object()


class Conversations:
    """Kept conversations of one model, for any number of threads; one taken and never given back is forgotten."""

    def __init__(self) -> None:
        self._kept: list[Conversation] = []
        names = "requests", "continued", "restored", "prompt_tokens", "cached_tokens", "evicted", "expired"
        self._counters = Counter(dict.fromkeys(names, 0))
        self._lock = threading.RLock()

    def counters(self) -> dict[str, int]:
        """As `counters` of the model."""
        with self._lock:
            held = sum(kept.bytes for kept in self._kept)
            return {**self._counters, "conversations": len(self._kept), "bytes": held}

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
        """The one whose cache holds the longest kept beginning of `prompt` `[tokens]` (on the host); or a new one.

        The cache holds nothing else then. At least the prompt's last token is left to be read, as the next one's logits
        come of it. A conversation that shares less than half of its cache's tokens is left for its own next turn.
        Others make room for this one. If a store has more tokens of the prompt, `stored`, the cache is a new one.
        """
        terms = dict(options), _sample_weights(model), key
        switched_on = attention.is_switched_on(model.config.get_text_config(decoder=True))
        with self._lock:
            shared = {kept: kept.count_shared(prompt) for kept in self._kept if switched_on and kept.terms == terms}
            length = max(shared.values(), default=0)
            length = length if length >= stored else 0
            taken = next(kept for kept in shared if shared[kept] == length) if length else None
            if taken is not None:
                self._kept.remove(taken)
            self._counters.update(requests=1, continued=length > 0, prompt_tokens=len(prompt), cached_tokens=length)
            self._make_room(limits, beside=0 if taken is None else taken.bytes)
        if taken is None:
            cache = QAdACache(model, **options)
            cache.keep_snapshots()
            return Conversation(cache, terms, prompt[:0])
        taken.continued = True
        if length < len(taken.tokens):
            taken.cache.crop(length - len(taken.tokens))
        return taken

    def count_restored(self, tokens: int) -> None:
        """Count a new one's cache that holds so many tokens from a store."""
        with self._lock:
            self._counters.update(restored=1, cached_tokens=tokens)

    def keep(self, taken: Conversation, tokens: Tensor, limits: Limits) -> None:
        """Keep one that was taken, whose cache holds `tokens` `[tokens]`, on the host, unless it is too large."""
        taken.tokens, taken.bytes, taken.used = tokens, sum(count_bytes(taken.cache)), time.monotonic()
        with self._lock:
            if taken.bytes > limits.bytes:
                self._counters["evicted"] += 1
            else:
                self._make_room(limits, beside=taken.bytes)
                self._kept.append(taken)
            self._drop_old(limits)

    def forget(self) -> None:
        """Keep none of them."""
        with self._lock:
            self._kept.clear()

    def forget_one(self, most: float = math.inf) -> bool:
        """Drop one: larger than `most` bytes by itself, else one that nobody has gone on with, else the oldest. So
        prompts that are asked once make room for one another, and flush no conversation. False: there is none."""
        with self._lock:
            gone = min(self._kept, key=lambda kept: (kept.bytes <= most, kept.continued, kept.used), default=None)
            if gone is not None:
                self._kept.remove(gone)
                self._counters["evicted"] += 1
            return gone is not None

    def _make_room(self, limits: Limits, *, beside: int) -> None:
        """Drop conversations that are too old, then as many as the limits ask for beside one of so many bytes."""
        self._drop_old(limits)
        most = limits.bytes - beside
        while len(self._kept) >= limits.conversations or sum(kept.bytes for kept in self._kept) > most:
            if not self.forget_one(most):
                return

    def _drop_old(self, limits: Limits) -> None:
        """Drop conversations that are too old: at once, if they are to be kept for no time."""
        oldest = time.monotonic() - limits.seconds
        young = [kept for kept in self._kept if limits.seconds and kept.used >= oldest]
        self._counters["expired"] += len(self._kept) - len(young)
        self._kept = young


_of: "weakref.WeakKeyDictionary[PreTrainedModel, Conversations]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def find_conversations(model: PreTrainedModel) -> Conversations:
    """This model's conversations; they are dropped with the model."""
    with _lock:
        return _of.setdefault(model, Conversations())


def counters(model: PreTrainedModel) -> dict[str, int]:
    """Numbers by name for a server to export: of this model's requests, and of what is kept of them now.

    requests: calls with a cache that can be kept; continued: of these, the ones that went on with a conversation;
    restored: the ones that went on with a stored one.
    prompt_tokens: of all these calls; cached_tokens: of these, the ones that were not read again.
    evicted: conversations that went for want of room; expired: those that nobody had gone on with for too long.
    conversations: that are kept now; bytes: that these take.
    """
    return find_conversations(model).counters()
