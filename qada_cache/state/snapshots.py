"""States of transformers' own layers at earlier lengths of a text. A sliding layer has the last tokens alone, and a
linear layer one state of all tokens. So they cannot be cropped, and go back to a snapshot instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layer import QAdALayer

EVERY = 512  # most tokens between two snapshots near the end of a text
LONG = 32  # tokens of a pass: to read fewer again is faster than to take a snapshot


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The states of all layers but ours after a text's first `tokens`, by layer index, on the host. Immutable."""

    tokens: int
    layers: dict[int, dict[str, Any]]

    def __deepcopy__(self, memo: dict) -> "Snapshot":
        return self

    @staticmethod
    def take(layers: Sequence[Any], tokens: int) -> "Snapshot":
        """Copy the states of layers that have read `tokens` tokens of a text."""
        others = {index: layer for index, layer in enumerate(layers) if not isinstance(layer, QAdALayer)}
        return Snapshot(tokens, {index: _copy(vars(layer), {}) for index, layer in others.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(map(_count_bytes, self.layers.values()))

    def restore(self, layer: Any, index: int) -> None:
        """Set the state of the layer at `index` to a copy of its snapshot."""
        with torch.inference_mode(False):  # it may be written to in place later
            vars(layer).update(_copy(self.layers[index], vars(layer)))


class Snapshots:
    """The snapshots of one cache, taken where long passes ended: the last ones at most `every` tokens apart, others
    farther. A crop to any length has to read again at most a quarter of the tokens behind it."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.kept: list[Snapshot] = []  # ascending by `tokens`
        self._before = 0  # the cache's tokens when the last pass began

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots; copies of a cache share them."""
        return sum(snapshot.nbytes for snapshot in self.kept)

    def begin_pass(self, layers: Sequence[Any], tokens: int) -> None:
        """Take a snapshot, if the last pass was long. Called before a pass, while all layers have `tokens` tokens."""
        read, self._before = tokens - self._before, tokens
        self.forget_behind(tokens)
        if read >= LONG and self.find(tokens) is None:
            self.kept.append(Snapshot.take(layers, tokens))
            self._thin_out()

    def forget_behind(self, tokens: int) -> None:
        """Drop snapshots of more than `tokens` tokens."""
        self.kept = [snapshot for snapshot in self.kept if snapshot.tokens <= tokens]

    def find(self, tokens: int) -> Snapshot | None:
        """The snapshot of exactly `tokens` tokens; None without one."""
        return next((snapshot for snapshot in self.kept if snapshot.tokens == tokens), None)

    def plan(self, tokens: int, least: int) -> list[int]:
        """The sizes in tokens of pieces into which a pass over `tokens` is cut, so that `_thin_out` keeps a snapshot of
        each: at least `least` each."""
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


def _copy(state: Any, like: Any) -> Any:
    """A copy of a tensor, or of a dict of tensors, on the device of the same tensor in `like`, else on the host: a
    layer writes to its own, or has a view of a larger one."""
    if isinstance(state, dict):
        return {name: _copy(each, like.get(name) if isinstance(like, dict) else None) for name, each in state.items()}
    if not isinstance(state, Tensor):
        return state
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    return state.to(device, copy=True, memory_format=torch.contiguous_format)


def _count_bytes(state: Any) -> int:
    if isinstance(state, dict):
        return sum(map(_count_bytes, state.values()))
    return state.nbytes if isinstance(state, Tensor) else 0
