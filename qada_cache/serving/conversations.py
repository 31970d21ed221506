"""Caches of a model's last conversations. A request that begins like one of them goes on with it."""

import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..attention import forward as attention
from ..cache import QAdACache
from ..key_moments import identity
from ..state.layer import QAdALayer
from .memory import host_memory

CONVERSATIONS = 4  # kept of each model
MEMORY = 0.25  # of the host's, that their caches may take
SECONDS = 3600.0  # that one is kept unused


@dataclass(frozen=True)
class Limits:
    """Limits of a model's conversations.

    Raises:
        ValueError: a limit of another type, or out of its range.
    """

    conversations: int = CONVERSATIONS  # how many are kept, the one under way included
    # Of their caches, on host and devices together: bytes (an int), or a share of `host_memory` (a float in [0, 1]).
    memory: int | float = MEMORY
    seconds: float = SECONDS  # since one was last used

    def __post_init__(self) -> None:
        count = self.conversations
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"conversations must be an int, 0 or more, got {count!r}")
        share = isinstance(self.memory, float) and 0.0 <= self.memory <= 1.0
        if not share and (type(self.memory) is not int or self.memory < 0):
            raise ValueError(f"conversations_memory must be bytes (an int) or a share in [0, 1], got {self.memory!r}")
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, (int, float)) or not self.seconds >= 0:
            raise ValueError(f"conversations_seconds must be a number, 0 or more, got {self.seconds!r}")

    @property
    def bytes(self) -> int:
        """Bytes of memory for the caches."""
        return self.memory if isinstance(self.memory, int) else int(self.memory * host_memory())


@dataclass
class Counters:
    """Since the process began, for a server to export."""

    requests: int = 0  # calls with a cache that can be kept
    continued: int = 0  # of these, the ones that went on with a conversation
    prompt_tokens: int = 0  # of all these calls
    cached_tokens: int = 0  # of these, the ones that were not read again
    evicted: int = 0  # conversations that went for want of room
    expired: int = 0  # conversations that nobody had gone on with for too long
    conversations: int = 0  # that are kept now
    bytes: int = 0  # that these take


@dataclass(frozen=True, eq=False)
class _Conversation:
    tokens: Tensor  # [tokens] on the host: the cache's tokens, from the first
    cache: QAdACache
    options: dict[str, Any]  # of its cache
    weights: list[str]  # a sample of the model's that filled it
    key: str | None  # whose it is
    continued: bool  # whether anybody has gone on with it, as nobody does with a prompt that is asked once
    bytes: int
    used: float  # when, by `time.monotonic`


class Conversations:
    """Caches of one model, each with the tokens it holds, the newest last; for any number of threads.

    Whoever takes a cache has it alone, and gives it back when it is whole: one that is never given back is forgotten.
    """

    def __init__(self) -> None:
        self._kept: list[_Conversation] = []
        self._taken: weakref.WeakSet[QAdACache] = weakref.WeakSet()  # caches of continued conversations
        self._counters = Counters()
        self._lock = threading.Lock()

    @property
    def counters(self) -> dict[str, int]:
        """`Counters`, by name."""
        with self._lock:
            self._counters.conversations = len(self._kept)
            self._counters.bytes = sum(kept.bytes for kept in self._kept)
            return asdict(self._counters)

    def take(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        *,
        options: Mapping[str, Any],
        limits: Limits,
        key: str | None = None,
    ) -> QAdACache:
        """A cache that holds the longest kept beginning of `prompt`, and nothing else.

        At least the prompt's last token is left to be read, as the next one's logits come of it. A conversation that
        shares less than half of its cache's tokens is left for its own next turn, and a new cache is built.

        Args:
            model: the one all these caches are of.
            prompt: token ids `[tokens]` of one row, on the host.
            options: of `QAdACache`; a cache that was built with others is passed over.
            limits: conversations that exceed them make room.
            key: of the conversation's owner; conversations of other keys are passed over.

        Raises:
            TypeError, ValueError, FileNotFoundError, NotImplementedError: as `QAdACache`.
        """
        switched_on = attention.is_switched_on(model.config.get_text_config(decoder=True))
        wanted = options, identity.sample(model), key
        with self._lock:
            fitting = [switched_on and (kept.options, kept.weights, kept.key) == wanted for kept in self._kept]
            shared = [_shared(kept, prompt) if fits else 0 for kept, fits in zip(self._kept, fitting, strict=True)]
            length = max(shared, default=0)
            taken = self._kept.pop(shared.index(length)) if length else None
            self._counters.requests += 1
            self._counters.continued += taken is not None
            self._counters.prompt_tokens += len(prompt)
            self._counters.cached_tokens += length
            if taken is not None:
                self._taken.add(taken.cache)
            self._make_room(limits, conversations=1, taken=0 if taken is None else taken.bytes)
        if taken is None:
            return QAdACache(model, **options)
        if length < len(taken.tokens):
            taken.cache.crop(length - len(taken.tokens))
        return taken.cache

    def keep(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        cache: QAdACache,
        *,
        options: Mapping[str, Any],
        limits: Limits,
        key: str | None = None,
    ) -> None:
        """Keep a cache that holds `tokens` `[tokens]`, on the host; arguments as for `take`."""
        sample, size = identity.sample(model), sum(map(sum, cache.layer_bytes()))
        with self._lock:
            continued = cache in self._taken
            self._kept.append(
                _Conversation(tokens, cache, dict(options), sample, key, continued, size, time.monotonic())
            )
            self._make_room(limits)

    def forget(self) -> None:
        """Keep none of them."""
        with self._lock:
            self._kept.clear()

    def forget_one(self) -> bool:
        """Keep one less of them; False: there is none."""
        with self._lock:
            if found := bool(self._kept):
                self._kept.remove(min(self._kept, key=lambda kept: (kept.continued, kept.used)))
                self._counters.evicted += 1
            return found

    def _make_room(self, limits: Limits, *, conversations: int = 0, taken: int = 0) -> None:
        """Drop conversations that are too old, then as many as the limits ask for, beside those under way.

        Caches too large by themselves go first, the newest last. Of the others those go first that nobody has gone on
        with, the oldest first: prompts that are asked once make room for one another, and flush no conversation.
        """
        oldest = time.monotonic() - limits.seconds
        young = [kept for kept in self._kept if kept.used >= oldest]
        self._counters.expired += len(self._kept) - len(young)
        self._kept = young
        most, size = limits.bytes - taken, sum(kept.bytes for kept in young)
        while self._kept and (len(self._kept) + conversations > limits.conversations or size > most):
            newest = None if conversations else self._kept[-1]
            gone = min(self._kept, key=lambda kept: (kept.bytes <= most, kept is newest, kept.continued, kept.used))
            self._kept.remove(gone)
            size -= gone.bytes
            self._counters.evicted += 1


def _shared(kept: _Conversation, prompt: Tensor) -> int:
    """Tokens of `prompt` that need not be read again if this cache is taken for it; 0 if it is not to be."""
    held = len(kept.tokens)
    beginning = min(held, len(prompt) - 1)
    shared = int((kept.tokens[:beginning] == prompt[:beginning]).cumprod(0).sum())
    croppable = all(isinstance(layer, QAdALayer) for layer in kept.cache.layers)  # sliding and linear ones are not
    return shared if shared == held or (croppable and 2 * shared >= held) else 0


_of: "weakref.WeakKeyDictionary[PreTrainedModel, Conversations]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def conversations_of(model: PreTrainedModel) -> Conversations:
    """This model's conversations; they are dropped with the model."""
    with _lock:
        return _of.setdefault(model, Conversations())


def counters(model: PreTrainedModel) -> dict[str, int]:
    """The `Counters` of this model's requests, by name, for a server to export."""
    return conversations_of(model).counters
