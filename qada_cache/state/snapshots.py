"""States of transformers' own layers at earlier lengths of a text. A sliding layer has the last tokens alone, and a
linear layer one state of all tokens. So they cannot be cropped, and go back to a snapshot instead."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from .layer import QAdALayer

EVERY = 512  # most tokens between two snapshots near the end of a text
LONG = 32  # tokens of a pass: to read fewer again is faster than to take a snapshot


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The states of all layers but ours after a text's first `tokens`, by layer index, on the host. Immutable. Keys and
    values of sliding layers are lists of parts: snapshots of a text share those of tokens that lie in both windows."""

    tokens: int
    layers: dict[int, dict[str, Any]]

    def __deepcopy__(self, memo: dict) -> "Snapshot":
        return self

    @staticmethod
    def take(layers: Sequence[Any], tokens: int, earlier: Sequence["Snapshot"] = ()) -> "Snapshot":
        """Copy the states of layers that have read `tokens` tokens of a text, but for tokens that the last of `earlier`
        snapshots has, which are of fewer tokens of the text."""
        others = {index: layer for index, layer in enumerate(layers) if not isinstance(layer, QAdALayer)}
        before = earlier[-1] if earlier else Snapshot(0, {})
        fresh = tokens - before.tokens
        return Snapshot(
            tokens, {index: _take_states(layer, before.layers.get(index, {}), fresh) for index, layer in others.items()}
        )

    def read(self, index: int, like: dict[str, Any]) -> dict[str, Any]:
        """A copy of the states of the layer at `index`, on the devices of those in `like`, else on the host."""
        return _copy(self.layers[index], like)

    def restore(self, layer: Any, index: int) -> None:
        """Set the state of the layer at `index` to a copy of its snapshot."""
        with torch.inference_mode(False):  # it may be written to in place later
            vars(layer).update(self.read(index, vars(layer)))


class Snapshots:
    """The snapshots of one cache, taken where long passes ended: the last ones at most `every` tokens apart, others
    farther. A crop to any length has to read again at most a quarter of the tokens behind it."""

    def __init__(self, every: int) -> None:
        self.every = max(every, LONG)  # a pass over fewer leaves no snapshot
        self.kept: list[Snapshot] = []  # ascending by `tokens`
        self._before = 0  # the cache's tokens when the last pass began

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots, with what they share counted once; copies of a cache share them."""
        storages = (each.untyped_storage() for snapshot in self.kept for each in _list_tensors(snapshot.layers))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def begin_pass(self, layers: Sequence[Any], tokens: int) -> None:
        """Take a snapshot, if the last pass was long. Called before a pass, while all layers have `tokens` tokens."""
        read, self._before = tokens - self._before, tokens
        self.forget_behind(tokens)
        if read >= LONG and self.find(tokens) is None:
            self.kept.append(Snapshot.take(layers, tokens, self.kept))
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


def _take_states(layer: Any, before: dict[str, Any], fresh: int) -> dict[str, Any]:
    """The states of a layer whose `fresh` newest tokens are not in those of `before`."""
    parts = dict[str, Any]()
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None and layer.keys.dim() == 4:
        parts = {name: _split_parts(getattr(layer, name), before.get(name) or [], fresh) for name in ("keys", "values")}
    return _copy({name: state for name, state in vars(layer).items() if name not in parts}, {}) | parts


def _split_parts(state: Tensor, before: list[Tensor], fresh: int) -> list[Tensor]:
    """Keys or values `[rows, heads, tokens, dim]` as parts: a copy of the `fresh` newest, behind parts of `before`."""
    shared, older = list[Tensor](), state.shape[2] - fresh
    if older <= 0 or sum(part.shape[2] for part in before) < older:
        return [_copy(state, None)]
    for part in reversed(before):
        if kept := min(older, part.shape[2]):
            shared.insert(0, part[:, :, part.shape[2] - kept :])
            older -= kept
    return [*shared, _copy(state[:, :, -fresh:], None)]


def _copy(state: Any, like: Any) -> Any:
    """A copy of a tensor, whole or in parts, or of a dict of them, on the device of the same tensor in `like`, else on
    the host: a layer writes to its own, or has a view of a larger one."""
    if isinstance(state, list):
        return _copy(torch.cat(state, dim=2), like)
    if isinstance(state, dict):
        return {name: _copy(each, like.get(name) if isinstance(like, dict) else None) for name, each in state.items()}
    if not isinstance(state, Tensor):
        return state
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    return state.to(device, copy=True, memory_format=torch.contiguous_format)


def _list_tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    for each in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from _list_tensors(each)
