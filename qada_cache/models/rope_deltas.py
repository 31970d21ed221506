"""How far positions of a text are ahead of its tokens. Models in which an image's tokens share positions (Qwen2-VL and
its kin) keep it themselves, of the text that they read last. A cache keeps that of its own text, in copies and files
too: so it goes on from there, whatever the model has read since."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

NAME = "rope_deltas"  # transformers' word


class RopeDeltas:
    """Those of one cache's rows. Of a cache that was built with a config alone, the model's own count."""

    def __init__(self, model: PreTrainedModel | None) -> None:
        parts = () if model is None else model.modules()
        found = next((part for part in parts if NAME in vars(part)), None)
        self._keeper: Any = None if found is None else weakref.ref(found)
        self.held: Tensor | None = None  # int64 `[rows, 1]`, as the model had it; None: the text has no images

    def note(self, tokens: int, before: int) -> None:
        """So many tokens come behind those `before`, and the model has found their positions. A decoded one is no
        image, and the last text that the model began may be another thread's by then."""
        if (tokens > 1 or not before) and (keeper := self._find_keeper()) is not None:
            self.held = keeper.rope_deltas

    def put_back(self, before: int) -> None:
        """The model is about to go on with this text, behind so many tokens. Behind none it finds new ones, but not if
        it is called on words alone: then it would go on by the last text's."""
        self.held = self.held if before else None
        if (keeper := self._find_keeper()) is not None:
            keeper.rope_deltas = self.held

    def select_rows(self, index: Sequence[int], rows: int) -> None:
        """Row `i` becomes the old row `index[i]`, of `rows`."""
        if self.held is not None and len(self.held) == rows:
            self.held = self.held[list(index)]

    def _find_keeper(self) -> Any:
        return None if self._keeper is None else self._keeper()
