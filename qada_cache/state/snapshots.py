"""States of transformers' own layers at earlier lengths of a text. Such layers hold the end of a text alone: sliding
ones its last tokens, linear ones what all tokens came to. They cannot be cropped, and go back to a snapshot instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layer import QAdALayer

EVERY = 512  # tokens between snapshots, at most, near the end of a text
LONG = 32  # tokens: fewer are read again sooner than a snapshot is taken


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The states of all layers but ours after a text's first `tokens`, by the layer's index, on the host; never
    changed."""

    tokens: int
    layers: dict[int, dict[str, Any]]

    def __deepcopy__(self, memo: dict) -> "Snapshot":
        return self

    @staticmethod
    def take(layers: Sequence[Any], tokens: int) -> "Snapshot":
        """A copy of what the layers hold, which is `tokens` of a text."""
        others = {index: layer for index, layer in enumerate(layers) if not isinstance(layer, QAdALayer)}
        return Snapshot(tokens, {index: _copy(vars(layer), {}) for index, layer in others.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(map(_count_bytes, self.layers.values()))

    def restore(self, layer: Any, index: int) -> None:
        """Have the layer at `index` hold this state."""
        with torch.inference_mode(False):  # it may be written to in place later
            vars(layer).update(_copy(self.layers[index], vars(layer)))


class Snapshots:
    """Those of one cache: where long passes ended, the last ones at most `every` tokens apart. The farther from the
    end, the farther apart: whoever goes on from any place reads again at most a quarter of what follows it."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.kept: list[Snapshot] = []  # by their tokens
        self._before = 0  # tokens held when the last pass began

    @property
    def nbytes(self) -> int:
        """Bytes that they take, which copies of a cache have in common."""
        return sum(snapshot.nbytes for snapshot in self.kept)

    def begin_pass(self, layers: Sequence[Any], tokens: int) -> None:
        """A pass begins on layers that hold so many tokens, wholly."""
        read, self._before = tokens - self._before, tokens
        self.forget_behind(tokens)
        if read >= LONG and self.find(tokens) is None:
            self.kept.append(Snapshot.take(layers, tokens))
            self._thin_out()

    def forget_behind(self, tokens: int) -> None:
        """Drop those of longer texts."""
        self.kept = [snapshot for snapshot in self.kept if snapshot.tokens <= tokens]

    def find(self, tokens: int) -> Snapshot | None:
        """That of a text of so many tokens."""
        return next((snapshot for snapshot in self.kept if snapshot.tokens == tokens), None)

    def plan(self, tokens: int, least: int) -> list[int]:
        """How a pass over `tokens` is to be cut so that snapshots are left where they are kept: the pieces' tokens, at
        least `least` each."""
        cuts, distance = list[int](), self.every
        while tokens - distance >= least:
            cuts.append(tokens - distance)
            distance += max(self.every, distance // 4)
        ends = [*reversed(cuts), tokens]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _thin_out(self) -> None:
        newest = self.kept[-1].tokens
        for place in reversed(range(len(self.kept) - 1)):
            before = self.kept[place - 1].tokens if place else 0
            after = self.kept[place + 1].tokens
            if after - before <= max(self.every, (newest - after) // 4):
                del self.kept[place]


def _copy(held: Any, now: Any) -> Any:
    """Tensors as copies of their own, as a layer writes to them or holds a part of a larger one: where those of `now`
    lie, or on the host."""
    if isinstance(held, dict):
        return {name: _copy(each, now.get(name) if isinstance(now, dict) else None) for name, each in held.items()}
    if not isinstance(held, Tensor):
        return held
    return held.clone(memory_format=torch.contiguous_format).to(now.device if isinstance(now, Tensor) else "cpu")


def _count_bytes(held: Any) -> int:
    if isinstance(held, dict):
        return sum(map(_count_bytes, held.values()))
    return held.nbytes if isinstance(held, Tensor) else 0
