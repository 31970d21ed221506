"""Residents: heads with their bulk on the device as well, within a budget.

A resident is a copy that was made to be read, and kept. The host holds every bulk all the same, so a resident can be
dropped at any time.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import get_max_memory
from torch import Tensor

from .transfers import AsyncCopy

HALF_LIFE = 32  # adaptive calls after which a flag counts half
ROOM = 1 / 8  # of a resident's tokens: so many more fit before it moves, as a copy for every flush would be quadratic
RESERVE_BYTES, RESERVE_SHARE = 2**30, 0.1  # of free memory; "auto" leaves the larger of the two

Head = tuple[int, int]  # row, KV head


def check_budget(budget: int | float | str) -> None:
    """Raise unless `budget` is a `device_budget` of `QAdACache`."""
    way_out = '0 (keep none), a number of bytes (an int), a share of the bulk (a float in [0, 1]) or "auto"'
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise TypeError(f"device_budget must be {way_out}, got {type(budget).__name__}")
    share = isinstance(budget, float) and not 0.0 <= budget <= 1.0  # also nan
    # One byte is of no use, and likely meant as the share.
    count = isinstance(budget, int) and (budget < 0 or budget == 1)
    if share or count or (isinstance(budget, str) and budget != "auto"):
        raise ValueError(f"device_budget must be {way_out}, got {budget!r}")


def free_memory(device: torch.device) -> int:
    """Bytes that are free on `device`."""
    backend = torch.get_device_module(device)
    if hasattr(backend, "mem_get_info"):  # accelerate would ask every device, and so take memory on all of them
        return backend.mem_get_info(device)[0]
    return get_max_memory().get(device.type, 0)  # devices that use the host's memory, of which there is one


@torch.inference_mode(False)  # the room is written to later, perhaps outside inference mode
def _longer(old: AsyncCopy, keys: Tensor, values: Tensor) -> AsyncCopy:
    """One with these tokens as well, in the same memory if they fit; `old` has been waited for."""
    room, known, tokens = old.room, old.tokens, old.tokens + keys.shape[2]
    if not room or room[0].shape[2] < tokens:
        size = int(tokens * (1 + ROOM))
        room = tuple(part.new_empty(1, 1, size, part.shape[3]) for part in old.tensors)
        for part, held in zip(room, old.tensors, strict=True):
            part[:, :, :known] = held
    for part, new in zip(room, (keys, values), strict=True):
        part[:, :, known:tokens] = new
    return AsyncCopy(tuple(part[:, :, :tokens] for part in room), room=room)


class Residents:
    """What one cache keeps on its devices: the layers' `LayerResidents`, and the budget they share.

    Each device with layers has this budget.
    """

    def __init__(self, budget: int | float | str) -> None:
        self.budget = budget
        self.layers: dict[int, LayerResidents] = {}
        self._free: dict[torch.device, int] = {}
        self._weakest: dict[torch.device, float] = {}  # no resident's score is below it, as scores only grow

    def layer(self, index: int, device: torch.device, batch: int, kv_heads: int) -> "LayerResidents":
        """New and empty ones of a layer, instead of any it had."""
        self.layers[index] = LayerResidents(self, index, device, batch, kv_heads)
        return self.layers[index]

    def budget_bytes(self, device: torch.device) -> int:
        """The budget of `device`."""
        if isinstance(self.budget, int):
            return self.budget
        if isinstance(self.budget, float):
            return int(self.budget * sum(layer.bulk_bytes for layer in self._on(device)))
        if device not in self._free:  # measured once, when the first head might stay: after prefill, as a rule
            free = free_memory(device)
            self._free[device] = max(0, free - max(RESERVE_BYTES, int(RESERVE_SHARE * free)))
        return self._free[device]

    def admits(self, nbytes: int, score: float, device: torch.device) -> bool:
        """Whether a head of this score may have `nbytes` more on `device`; if so there is room for them now.

        Residents give way only to a head with a higher score.
        """
        limit = self.budget_bytes(device)
        if nbytes > limit:
            return False
        over, leaving = self._held_on(device) + nbytes - limit, []
        if over > 0:
            if score <= self._weakest.get(device, -math.inf):
                return False
            for found, layer, head in self._ranked(device):
                if over <= 0 or found >= score:
                    break
                leaving.append((layer, head))
                over -= layer.held[head].nbytes
            if over > 0:
                return False
        for layer, head in leaving:
            layer.drop(head)
        self._weakest[device] = min(self._weakest.get(device, math.inf), score)
        return True

    def trim(self, device: torch.device) -> None:
        """Spill the weakest until the budget holds again, after residents have grown."""
        over = self._held_on(device) - self.budget_bytes(device)
        if over > 0:
            for _, layer, head in self._ranked(device):
                over -= layer.held[head].nbytes
                layer.drop(head)
                if over <= 0:
                    break

    def retried(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, done again without residents if device memory runs out."""
        try:
            return work()
        except torch.OutOfMemoryError:
            if not any(layer.held for layer in self.layers.values()):
                raise
            for layer in self.layers.values():
                layer.held.clear()
                layer.nbytes = 0
        return work()  # not in the handler, whose traceback keeps what the first try held

    def _on(self, device: torch.device) -> list["LayerResidents"]:
        return [layer for layer in self.layers.values() if layer.device == device]

    def _held_on(self, device: torch.device) -> int:
        return sum(layer.nbytes for layer in self._on(device))

    def _ranked(self, device: torch.device) -> list[tuple[float, "LayerResidents", Head]]:
        """Residents, the weakest first: the one flagged least often and least recently."""
        ranked = [
            (layer.scores[row][head], layer, (row, head)) for layer in self._on(device) for row, head in layer.held
        ]
        ranked.sort(key=lambda entry: entry[0])
        if ranked:
            self._weakest[device] = ranked[0][0]
        return ranked


class LayerResidents:
    """The residents of one layer, and how often each of its heads was flagged.

    Attributes:
        shared, index, device: of all layers, this layer's, and its own.
        held: by row and KV head.
        nbytes: bytes held.
        bulk_bytes: what the layer's bulk would take if all of it were resident, `ROOM` included.
        scores: of every row and KV head, log2 of the sum of `2 ** (call / HALF_LIFE)` over the calls that flagged it.
            Recent flags weigh more, and a score changes only with a flag.
    """

    def __init__(self, shared: Residents, index: int, device: torch.device, batch: int, kv_heads: int) -> None:
        self.shared, self.index, self.device = shared, index, device
        self.held: dict[Head, AsyncCopy] = {}
        self.nbytes = self.bulk_bytes = self._calls = 0
        self.scores = [[-math.inf] * kv_heads for _ in range(batch)]
        self._addresses: dict[Head, tuple[int, ...]] = {}
        self._resident_pointers: Tensor | None = None

    def flag(self, heads: list[Head]) -> dict[Head, float]:
        """Count one call that flagged `heads`; returns their scores before it.

        A head asks to stay with its score from before this flag. With the flag, always the newest, it would push out
        the head flagged longest ago: the next one needed if heads take turns.
        """
        self._calls += 1
        now, before = self._calls / HALF_LIFE, {}
        for row, head in heads:
            before[row, head] = old = self.scores[row][head]
            self.scores[row][head] = now if old == -math.inf else max(old, now) + math.log2(1 + 2 ** -abs(old - now))
        return before

    def keep(self, head: Head, nbytes: int, score: float, fetch: Callable[[], AsyncCopy]) -> bool:
        """Keep a copy of a head's bulk, of `nbytes` bytes, if the budget, or a weaker resident, has the room for it.

        `fetch` then makes it, or starts to. Returns whether the copy stays.
        """
        if head in self.held:  # with another number of tokens, else it would have been read instead
            self.drop(head)
        if not self.shared.budget or not self.shared.admits(nbytes, score, self.device):
            return False
        try:
            self._hold(head, fetch())
        except torch.OutOfMemoryError:  # then it is read where it lies
            return False
        return True

    def _hold(self, head: Head, resident: AsyncCopy) -> None:
        self.held[head] = resident
        self.nbytes += resident.nbytes

    def get(self, head: Head, tokens: int) -> AsyncCopy | None:
        """The resident that holds all `tokens` of a head's bulk, if there is one."""
        resident = self.held.get(head)
        return resident if resident is not None and resident.tokens == tokens else None

    def resident_pointers(self, lengths: list[int]) -> Tensor:
        """Addresses of resident keys and values, for kernels: int64 `[batch, kv_heads, 2]` on the device.

        A head without a resident of `lengths[row]` tokens has 0. Addresses are valid for work given to the device
        before anything here changes: memory freed later is not used again before that work is done.
        """
        found = {
            head: tuple(tensor.data_ptr() for tensor in resident.wait())
            for head, resident in self.held.items()
            if resident.tokens == lengths[head[0]] and resident.ready()
        }
        if self._resident_pointers is None or self._addresses != found:
            rows, kv_heads = range(len(self.scores)), range(len(self.scores[0]))
            table = [[found.get((row, head), (0, 0)) for head in kv_heads] for row in rows]
            self._addresses, self._resident_pointers = found, torch.tensor(table).to(self.device, non_blocking=True)
        return self._resident_pointers

    def drop(self, head: Head) -> None:
        """Let one go."""
        self.nbytes -= self.held.pop(head).nbytes

    def append(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Tokens `[rows, kv_heads, tokens, dim]` went into the bulk: residents get them too."""

        def longer(old: AsyncCopy, head: Head) -> AsyncCopy:
            return _longer(old, *(part[None, None, head[0] - rows.start, head[1]] for part in (keys, values)))

        self._replace([head for head in self.held if rows.start <= head[0] < rows.stop], longer)

    def truncate(self, lengths: list[int]) -> None:
        """Row `r` of the bulk keeps its first `lengths[r]` tokens."""

        def shorter(old: AsyncCopy, head: Head) -> AsyncCopy:
            return AsyncCopy(tuple(part[:, :, : lengths[head[0]]].clone() for part in old.tensors))

        self._replace([head for head, old in self.held.items() if old.tokens > lengths[head[0]]], shorter)

    def _replace(self, heads: list[Head], change: Callable[[AsyncCopy, Head], AsyncCopy]) -> None:
        """Put `change` of them, once they are there, in the place of these."""
        for head in heads:
            old = self.held[head]
            old.wait()
            self.drop(head)
            with contextlib.suppress(torch.OutOfMemoryError):  # dropped, as the host has it
                self._hold(head, change(old, head))
        self.shared.trim(self.device)

    def select(self, index: list[int]) -> None:
        """Row `i` becomes the old row `index[i]`. If a row is repeated, the first one keeps the residents."""
        held = {(index.index(row), head): resident for (row, head), resident in self.held.items() if row in index}
        self.held, self.nbytes = held, sum(resident.nbytes for resident in held.values())
        self.scores, self._resident_pointers = [list(self.scores[row]) for row in index], None
        self.shared.trim(self.device)
