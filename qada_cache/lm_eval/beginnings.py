"""Takes beginnings of a task's prompts (few-shot examples, a document) from a PrefixStore, if read before."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import PrefixStore, QAdACache


class Beginnings:
    """The beginnings of one model's prompts. A beginning that two prompts in a row have in common is kept for those
    that follow, in this run and later ones."""

    def __init__(self, folder: str, model: PreTrainedModel, options: Mapping[str, Any]) -> None:
        """`options` are the caches'. A NotImplementedError as by `PrefixStore.cache`."""
        self._store, self._model, self._options = PrefixStore(Path(folder)), model, options
        self._store.count(model, [0], **options)  # what is refused is refused before any request
        managed = (cache := QAdACache(model, **options))._shared.model
        if len(managed.layers) < len(cache.layers):
            raise NotImplementedError(
                f"no beginnings of {managed.model_type} are kept, whose sliding or linear layers cannot be cropped"
            )
        self._before: Sequence[int] = ()  # the last prompt

    def make_cache(self, ids: Tensor, mask: Tensor) -> tuple[QAdACache, int]:
        """A cache that holds as much as is stored of all rows `[rows, tokens]`, padded on the left, and how many real
        tokens that is. The rest is empty, or so long that it is read exactly."""
        cache = QAdACache(self._model, **self._options)
        least = cache.options.window + 1
        if ids.shape[1] <= least:
            return cache, 0
        columns = ids.shape[1]
        begun = self._store.begin(self._model, _list_rows(ids, mask), columns, most=columns, **self._options)
        cached = begun.get_seq_length()
        if columns - least < cached < columns:
            begun.crop(columns - least - cached)
        return begun, int(mask[:, : begun.get_seq_length()].sum())

    def keep(self, cache: QAdACache, ids: Tensor, mask: Tensor, saved: int) -> None:
        """Keep what the first row's prompt, which `cache` has read, has in common with another row's or the last one's,
        if that is more than was stored."""
        first, *others = _list_rows(ids, mask)
        common = max((_count_shared(first, other) for other in [*others, self._before]), default=0)
        self._before = first
        if common > saved / len(ids):
            self._store.keep_rows(cache, {0: first[:common]})


def _list_rows(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]


def _count_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
