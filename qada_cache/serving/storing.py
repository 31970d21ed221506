"""Conversations in a PrefixStore: written when a turn ends, read when no conversation in memory is as long.

So none is lost when the server ends, in whatever way, or drops a conversation from memory.
"""

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..cache import QAdACache
from ..prefix_store import PrefixStore
from ..said_once import warn_once
from .memory import Kept, estimate_bytes, reserve_memory

logger = logging.getLogger(__name__)

Store = bool | str | os.PathLike | PrefixStore


def find_store(store: Store) -> PrefixStore | None:
    """The store that `conversations_store` names, the same one in every call; None: nothing is stored. A TypeError if
    it names none."""
    if isinstance(store, PrefixStore):
        return store
    if not isinstance(store, (bool, str, os.PathLike)):
        raise TypeError(f"conversations_store must be a bool, a folder or a PrefixStore, got {type(store).__name__}")
    return _make(None if store is True else os.path.abspath(store)) if store else None


@functools.lru_cache(maxsize=16)
def _make(folder: str | None) -> PrefixStore:
    return PrefixStore(folder)


def _warn_not_stored(error: NotImplementedError) -> None:
    warn_once(logger, f"conversations are not stored: {error}")


class Stored:
    """One call's prompt in a store, if there is one."""

    def __init__(
        self,
        store: PrefixStore | None,
        model: PreTrainedModel,
        prompt: Tensor,
        *,
        options: Mapping[str, Any],
        key: str | None,
    ) -> None:
        self._store, self._model, self._prompt, self._options, self._key = store, model, prompt.tolist(), options, key
        self.tokens = 0  # number of the prompt's first tokens that are stored
        if store is not None:
            try:
                self.tokens = store.count(model, self._prompt, key=key, **options)
            except NotImplementedError as error:  # its layers cannot be cropped, for example
                _warn_not_stored(error)
                self._store = None

    def restore(self, kept: Kept) -> QAdACache:
        """A cache with the stored tokens; `kept` is as for `reserve_memory`."""
        assert self._store is not None
        laid_out = {name: self._options[name] for name in ("offloading", "device_budget") if name in self._options}
        held = estimate_bytes(self._model, self.tokens, 0, **laid_out)
        # The files' contents lie on the host meanwhile.
        with reserve_memory(self.tokens, estimate_bytes(self._model, self.tokens, 0) + held, kept):
            return self._store.cache(self._model, self._prompt, key=self._key, **self._options)

    def keep(self, cache: QAdACache, tokens: Tensor) -> None:
        """Store the cache, which holds `tokens` `[tokens]`."""
        if self._store is not None:
            try:
                self._store.keep(cache, tokens, key=self._key)
            except NotImplementedError as error:  # by a compiled model, an indexer's cache does not know its mask
                _warn_not_stored(error)
