"""Residents: heads with their bulk on the device as well, within a budget.

A resident is a copy that was made to be read, and kept. As the host holds every bulk, it can be dropped at any time.
"""

import contextlib
import math
from collections.abc import Callable
from operator import itemgetter
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
    share = isinstance(budget, float) and 0.0 <= budget <= 1.0
    count = isinstance(budget, int) and budget >= 0 and budget != 1  # a byte of no use: likely meant as the share
    if not (share or count or budget == "auto"):
        raise ValueError(f"device_budget must be {way_out}, got {budget!r}")


@torch.inference_mode(False)  # the room is written to later, perhaps outside inference mode
def _lengthen(old: AsyncCopy, *added: Tensor) -> AsyncCopy:
    """One with these tokens as well, in the same memory if they fit."""
    there, room, known, tokens = old.wait(), old.room, old.tokens, old.tokens + added[0].shape[2]
    if not room or room[0].shape[2] < tokens:
        size = int(tokens * (1 + ROOM))
        room = tuple(part.new_empty(1, 1, size, part.shape[3]) for part in there)
        for part, held in zip(room, there, strict=True):
            part[:, :, :known] = held
    for part, new in zip(room, added, strict=True):
        part[:, :, known:tokens] = new
    return AsyncCopy(tuple(part[:, :, :tokens] for part in room), room=room)


class Residents:
    """What one cache keeps on its devices: the layers' `LayerResidents`, and the budget that each device has."""

    def __init__(self, budget: int | float | str) -> None:
        self.budget = budget
        self.layers: dict[int, LayerResidents] = {}
        self._auto: dict[torch.device, int] = {}
        self._weakest: dict[torch.device, float] = {}  # no resident's score is below it, as scores only grow

    def find_budget(self, device: torch.device) -> int:
        """The budget of `device`."""
        if isinstance(self.budget, int):
            return self.budget
        if isinstance(self.budget, float):
            return int(self.budget * sum(layer.bulk_bytes for layer in self._list_layers(device)))
        if device not in self._auto:  # measured once, when the first head might stay: after prefill, as a rule
            backend = torch.get_device_module(device)
            if hasattr(backend, "mem_get_info"):  # accelerate would ask every device, and so take memory on all of them
                free = backend.mem_get_info(device)[0]
                if hasattr(backend, "memory_reserved"):  # by torch, some of it for nothing yet
                    free += backend.memory_reserved(device) - backend.memory_allocated(device)
            else:
                free = get_max_memory().get(device.type, 0)  # the host's memory
            self._auto[device] = max(0, free - max(RESERVE_BYTES, int(RESERVE_SHARE * free)))
        return self._auto[device]

    def make_room(self, device: torch.device, nbytes: int = 0, score: float = math.inf) -> bool:
        """Let go of residents on `device` until its budget has room for `nbytes` more, of a head of this score: the
        weakest first, flagged least often and least recently. Returns whether there is room; all of them stay if those
        with lower scores do not hold enough."""
        layers = self._list_layers(device)
        over = sum(layer.nbytes for layer in layers) + nbytes - self.find_budget(device)
        if over > 0:
            if score <= self._weakest.get(device, -math.inf):
                return False
            ranked = [(layer.scores[row][head], layer, (row, head)) for layer in layers for row, head in layer.held]
            ranked.sort(key=itemgetter(0))
            self._weakest[device] = ranked[0][0] if ranked else math.inf
            leaving = []
            for found, layer, head in ranked:
                if over <= 0 or found >= score:
                    break
                leaving.append((layer, head))
                over -= layer.held[head].nbytes
            if over > 0:
                return False
            for layer, head in leaving:
                layer.put(head, None)
        self._weakest[device] = min(self._weakest.get(device, math.inf), score)
        return True

    def retry(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, done again without residents if device memory runs out."""
        try:
            return work()
        except torch.OutOfMemoryError:
            every = [(layer, head) for layer in self.layers.values() for head in layer.held]
            if not every:
                raise
            for layer, head in every:
                layer.put(head, None)
        return work()  # not in the handler, whose traceback keeps what the first try held

    def _list_layers(self, device: torch.device) -> list["LayerResidents"]:
        return [layer for layer in self.layers.values() if layer.device == device]


class LayerResidents:
    """The residents of one layer, and how often each of its heads was flagged."""

    def __init__(self, shared: Residents, index: int, device: torch.device, batch: int, kv_heads: int) -> None:
        self.shared, self.index, self.device = shared, index, device
        shared.layers[index] = self  # instead of any the layer had
        self.held: dict[Head, AsyncCopy] = {}  # changed by `put` alone
        self.nbytes = 0  # of these
        self.bulk_bytes = 0  # what the layer's bulk would take if all of it were resident, `ROOM` included
        self._calls = 0
        # Of every row and KV head, log2 of the sum of `2 ** (call / HALF_LIFE)` over the calls that flagged it. Recent
        # flags weigh more, and a score changes only with a flag.
        self.scores = [[-math.inf] * kv_heads for _ in range(batch)]
        self._pointers: tuple[dict[Head, tuple[int, ...]], Tensor] | None = None  # by head, and as a tensor

    def put(self, head: Head, resident: AsyncCopy | None) -> None:
        """Hold this one, or none, in the place of a head's resident."""
        old = self.held.pop(head, None)
        self.nbytes -= 0 if old is None else old.nbytes
        if resident is not None:
            self.held[head] = resident
            self.nbytes += resident.nbytes

    def flag(self, heads: list[Head]) -> dict[Head, float]:
        """Count one call that flagged `heads`; returns their scores before it, with which they ask to stay. With this
        flag, the newest of all, one would push out the next one needed, if heads take turns."""
        self._calls += 1
        now, before = self._calls / HALF_LIFE, {}
        for row, head in heads:
            before[row, head] = old = self.scores[row][head]
            self.scores[row][head] = max(old, now) + math.log2(1 + 2 ** -abs(old - now))
        return before

    def keep(self, head: Head, nbytes: int, score: float, fetch: Callable[[], AsyncCopy]) -> bool:
        """Keep the copy of a head's bulk that `fetch` makes, or starts to make, if there is room for its `nbytes`.
        Returns whether it stays."""
        self.put(head, None)  # of another number of tokens, else it would have been read instead
        if self.shared.budget and self.shared.make_room(self.device, nbytes, score):
            with contextlib.suppress(torch.OutOfMemoryError):  # then it is read where it lies
                self.put(head, fetch())
        return head in self.held

    def get(self, head: Head, lengths: list[int]) -> AsyncCopy | None:
        """The resident that holds all `lengths[row]` tokens of a head's bulk, if there is one."""
        resident = self.held.get(head)
        return resident if resident is not None and resident.tokens == lengths[head[0]] else None

    def find_pointers(self, lengths: list[int]) -> Tensor:
        """Addresses of resident keys and values, or of records and 0, for kernels: int64 `[batch, kv_heads, 2]` on the
        device, 0 for a head without a resident of `lengths[row]` tokens. They are valid for work given to the device
        before anything here changes: memory freed later is used again after that work."""
        found = {
            head: (*(tensor.data_ptr() for tensor in resident.wait()), 0)[:2]
            for head, resident in self.held.items()
            if 0 < resident.tokens == lengths[head[0]] and resident.is_ready()
        }
        if self._pointers is None or self._pointers[0] != found:
            rows, kv_heads = range(len(self.scores)), range(len(self.scores[0]))
            table = [[found.get((row, head), (0, 0)) for head in kv_heads] for row in rows]
            pointers = torch.tensor(table, dtype=torch.int64, device="cpu")
            self._pointers = found, pointers.to(self.device, non_blocking=True)
        return self._pointers[1]

    def append(self, rows: slice, *added: Tensor) -> None:
        """Tokens `[rows, kv_heads, tokens, *]` went into the bulk's tensors: residents get them too."""
        for row, head in list(self.held):  # not the copies as well, so that one at a time takes its memory twice
            if rows.start <= row < rows.stop:
                old = self.held[row, head]
                self.put((row, head), None)
                with contextlib.suppress(torch.OutOfMemoryError):  # dropped, as the host has it
                    new = (part[None, None, row - rows.start, head] for part in added)
                    self.put((row, head), _lengthen(old, *new))
        self.shared.make_room(self.device)

    def truncate(self, lengths: list[int]) -> None:
        """Row `r` of the bulk keeps its first `lengths[r]` tokens."""
        for head in list(self.held):  # as in append
            if (old := self.held[head]).tokens > (tokens := lengths[head[0]]):
                self.put(head, None)
                with contextlib.suppress(torch.OutOfMemoryError):  # as in append
                    self.put(head, AsyncCopy(tuple(part[:, :, :tokens].clone() for part in old.wait())))
        self.shared.make_room(self.device)

    def select_rows(self, index: list[int]) -> None:
        """Row `i` becomes the old row `index[i]`. If a row is repeated, the first one keeps the residents."""
        old = self.held.items()
        self.held, self.nbytes = {}, 0
        for (row, head), kept in old:
            if row in index:
                self.put((index.index(row), head), kept)
        self.scores, self._pointers = [list(self.scores[row]) for row in index], None
        self.shared.make_room(self.device)
