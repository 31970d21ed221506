"""`rope_deltas`: a text's next position minus its number of tokens.

In some models an image's tokens share positions (Qwen2-VL and its kin). The model stores the deltas of the text that it
read last. A cache stores those of its own text, in copies and files, too. So the text goes on at the right positions,
whatever the model has read since.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

NAME = "rope_deltas"  # transformers' word


class RopeDeltas:
    """The deltas of one cache's rows. A cache that was built with a config alone has none: the model's are used."""

    def __init__(self, model: PreTrainedModel | None) -> None:
        parts = () if model is None else model.modules()
        module = next((part for part in parts if NAME in vars(part)), None)
        self._keeper: Any = None if module is None else weakref.ref(module)  # the module that has the attribute
        self.held: Tensor | None = None  # int64 `[rows, 1]`, as the model had it; None: the text has no images
        # Passes that changed them: how many tokens the text had before, and the deltas of these.
        self._changes: list[tuple[int, Tensor | None]] = []

    def note(self, tokens: int, before: int) -> None:
        """Store the model's deltas after it computed positions of `tokens` tokens behind `before` others. A
        decoded token changes none, and by then the model may have another thread's."""
        if (tokens > 1 or not before) and (keeper := self._find_keeper()) is not None:
            if keeper.rope_deltas is not self.held:
                self._changes.append((before, self.held))
            self.held = keeper.rope_deltas

    def put_back(self, before: int) -> None:
        """Give the model this text's deltas, before a pass behind `before` tokens. Behind none they are None, as a
        model that reads a new text without images would use the last text's."""
        self.crop(before)  # of a pass that was refused nothing is left
        if (keeper := self._find_keeper()) is not None:
            keeper.rope_deltas = self.held

    def crop(self, tokens: int) -> None:
        """Go back to the deltas of the first `tokens` tokens. In the middle of a pass that changed them they stay those
        behind it: which of its tokens came before an image is not known."""
        while self._changes and tokens <= self._changes[-1][0]:
            self.held = self._changes.pop()[1]
        self.held = self.held if tokens else None

    def select_rows(self, index: Sequence[int], rows: int) -> None:
        """Row `i` becomes the old row `index[i]`, of `rows`."""

        def select(deltas: Tensor | None) -> Tensor | None:
            return deltas[list(index)] if deltas is not None and len(deltas) == rows else deltas

        self._changes = [(before, select(deltas)) for before, deltas in self._changes]
        self.held = select(self.held)

    def _find_keeper(self) -> Any:
        return None if self._keeper is None else self._keeper()
