"""The caches that a model's last conversations left, to be gone on with by a request that begins like one of them."""

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..attention import forward as attention
from ..cache import QAdACache
from ..files import weights
from ..state.layer import QAdALayer

CONVERSATIONS = 4  # kept of each model


@dataclass(frozen=True, eq=False)
class _Kept:
    tokens: Tensor  # [tokens] on the host: those that the cache holds, from the first
    cache: QAdACache
    options: dict[str, Any]  # it was built with
    weights: list[str]  # a sample of the model's that filled it


class Conversations:
    """Caches of one model, each with the tokens it holds, the newest last; for any number of threads.

    Whoever takes a cache has it alone, and gives it back when it is whole: one that is never given back is forgotten.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._lock = threading.Lock()

    def take(self, model: PreTrainedModel, prompt: Tensor, *, options: Mapping[str, Any], size: int) -> QAdACache:
        """The cache to read `prompt` with: it holds the longest beginning of it that is kept, and nothing else.

        At least the prompt's last token is left to be read, as the next one's logits come of it. A conversation that
        shares less than half of what its cache holds is left for its own next turn, and a new cache is built.

        Args:
            model: the one all these caches are of.
            prompt: token ids `[tokens]` of one row, on the host.
            options: of `QAdACache`; a cache that was built with others is passed over.
            size: conversations kept, this one included: the oldest make room.

        Raises:
            TypeError, ValueError, FileNotFoundError, NotImplementedError: as `QAdACache`.
        """
        switched_on = attention.is_switched_on(model.config.get_text_config(decoder=True))
        now = weights.sample(model)
        with self._lock:
            shared = [
                _shared(kept, prompt) if switched_on and kept.options == options and kept.weights == now else 0
                for kept in self._kept
            ]
            length = max(shared, default=0)
            taken = self._kept.pop(shared.index(length)) if length else None
            self._make_room(size - 1)
        if taken is None:
            return QAdACache(model, **options)
        if length < len(taken.tokens):
            taken.cache.crop(length - len(taken.tokens))
        return taken.cache

    def keep(
        self, model: PreTrainedModel, tokens: Tensor, cache: QAdACache, *, options: Mapping[str, Any], size: int
    ) -> None:
        """Keep a cache that holds `tokens` `[tokens]`, on the host; arguments as for `take`."""
        kept = _Kept(tokens, cache, dict(options), weights.sample(model))
        with self._lock:
            self._kept.append(kept)
            self._make_room(size)

    def forget(self) -> None:
        """Keep none of them."""
        with self._lock:
            self._kept.clear()

    def _make_room(self, size: int) -> None:
        del self._kept[: max(len(self._kept) - size, 0)]


def _shared(kept: _Kept, prompt: Tensor) -> int:
    """Tokens of `prompt` that need not be read again if this cache is taken for it; 0 if it is not to be."""
    held = len(kept.tokens)
    beginning = min(held, len(prompt) - 1)
    shared = int((kept.tokens[:beginning] == prompt[:beginning]).cumprod(0).sum())
    croppable = all(isinstance(layer, QAdALayer) for layer in kept.cache.layers)  # sliding and linear ones are not
    return shared if shared == held or (croppable and 2 * shared >= held) else 0


_of: "weakref.WeakKeyDictionary[PreTrainedModel, Conversations]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def conversations_of(model: PreTrainedModel) -> Conversations:
    """This model's; they go when it goes."""
    with _lock:
        return _of.setdefault(model, Conversations())
