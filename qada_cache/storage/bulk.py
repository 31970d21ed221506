"""Storage of a layer's bulk, its older keys and values: preallocated, on the host when offloading."""

import copy
import math
from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..files.private_map import PrivateMap
from . import transfers
from .residents import ROOM, Head, LayerResidents, Residents
from .transfers import AsyncCopy, HostCopy, double_buffer, fetch, reader, send, wait_event

logger = logging.get_logger(__name__)

GRANULE = 256  # tokens; capacities are multiples of it
GROWTH = 1.25  # a store has room for at most this multiple of its tokens when it moves; pinned blocks for more
GOLDEN = 0.618034  # multiples of it, modulo 1, are spread evenly over [0, 1), however many there are
FLAG_COPIES = 8  # a host that runs further ahead of the device forgets the flags of older calls
STREAM_TOKENS = 32768  # tokens of one head in a block that is streamed through the device


class Bulk:
    """Every key and value outside sinks and recent tokens, oldest first, row by row.

    With `offloading` on an accelerator the storage is pinned host memory, and heads may be kept on the device as well
    (`residents.py`). Otherwise it lies on the compute device, and reads are views.
    """

    keys: Tensor  # [batch, kv_heads, capacity, dim]; what follows a row's tokens is not initialised and never read
    values: Tensor  # likewise, of `value_dim`
    lengths: list[int]  # tokens of each row
    source: PrivateMap | None  # the memory that copies share, or the file, under `keys` and `values`
    unwritten: list[int]  # leading tokens of each row that still lie in `source`, the same in every copy

    _reader: Any = None  # stream of the last kernel that read it in place

    def __init__(self, keys: Tensor, values: Tensor, *, offloading: bool, residents: Residents, layer: int) -> None:
        """An empty store for tensors like `keys` `[batch, kv_heads, *, dim]` and `values` (`value_dim`). `residents`
        are the cache's, `layer` is this one's index."""
        self.device = keys.device
        self.offloaded = offloading and self.device.type != "cpu"
        self.residents = LayerResidents(residents, layer, keys.device, *keys.shape[:2])
        self.token_bytes = sum(t.shape[3] * t.element_size() for t in (keys, values))  # of one head
        self.flagged: list[Head] = []  # that the last adaptive call read
        self.prefetched: dict[Head, AsyncCopy] = {}  # started before a call needs them
        # Flags `[batch, kv_heads]` of kernels that read heads in place, not yet counted for residents.
        self.flag_copies: deque[HostCopy] = deque(maxlen=FLAG_COPIES)
        self._written: Any = None  # event of the last copy to the host
        self.adopt(None, self._allocate(keys, 0), self._allocate(values, 0), lengths=[0] * keys.shape[0])

    def __del__(self) -> None:
        # Torch keeps pinned memory until copies of it have ended, not kernels: so one token is copied after them.
        if (stream := self._reader) is not None and not stream.query():
            keys, values = self.keys[:1, :1, :1], self.values[:1, :1, :1]
            transfers.fetch(keys, values, stream.device, after=stream.record_event())

    def _allocate(self, like: Tensor, capacity: int, batch: int | None = None) -> Tensor:
        shape = (like.shape[0] if batch is None else batch, like.shape[1], capacity, like.shape[3])
        with torch.inference_mode(False):  # an inference tensor could not be appended to outside inference mode
            if self.offloaded and self.device.type != "cpu" and capacity > 0:
                try:
                    return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=True)
                except RuntimeError as error:  # the system limits it, or has none left
                    logger.warning_once(
                        f"the bulk lies in host memory that is not pinned, so that copies of it wait: {error}"
                    )
            return transfers.empty(shape, like.dtype, transfers.HOST if self.offloaded else self.device)

    def __deepcopy__(self, memo: dict) -> "Bulk":
        twin = memo[id(self)] = copy.copy(self)
        self.synchronize()
        twin.lengths, twin.unwritten, twin.flagged = list(self.lengths), list(self.unwritten), list(self.flagged)
        twin.prefetched, twin.flag_copies = {}, deque(maxlen=FLAG_COPIES)
        twin.residents, twin.source = copy.deepcopy(self.residents, memo), copy.deepcopy(self.source, memo)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._allocate(old, self.capacity) if twin.source is None else twin.source.same(old)
            for row, (same, length) in enumerate(zip(self.unwritten, self.lengths, strict=True)):
                new[row, :, same:length] = old[row, :, same:length]
            setattr(twin, name, new)
        return twin

    @property
    def mappable(self) -> bool:
        """Whether its storage is plain host memory, perhaps a mapped file."""
        return self.device.type == "cpu" and not self.offloaded

    def adopt(self, source: PrivateMap | None, keys: Tensor, values: Tensor, *, lengths: list[int]) -> None:
        """Hold these, `[batch, kv_heads, capacity, dim]`, of row `r` the first `lengths[r]` tokens; they are part of
        `source`, or nobody else's if that is None."""
        self.source, self.keys, self.values = source, keys, values
        self.unwritten = [0] * len(lengths) if source is None else list(lengths)
        self._set_lengths(list(lengths))

    @property
    def capacity(self) -> int:
        """Tokens a row can hold before the store grows."""
        return self.keys.shape[2]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tokens held."""
        return sum(self.lengths) * self.keys.shape[1] * self.token_bytes

    @property
    def shared_bytes(self) -> int:
        """Of these, bytes still in `source`."""
        return sum(map(min, self.unwritten, self.lengths)) * self.keys.shape[1] * self.token_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that the storage takes, unused capacity included."""
        parts = self.keys, self.values
        return sum(transfers.pinned_bytes(t.nbytes) if self.offloaded and t.is_pinned() else t.nbytes for t in parts)

    def synchronize(self) -> None:
        """Wait for copies to the host that are still under way, before the host itself reads them."""
        if self._written is not None:
            self._written.synchronize()
            self._written = None
        elif self.offloaded and self.device.type not in ("cpu", "cuda"):
            torch.accelerator.synchronize(self.device)

    def in_place(self) -> tuple[Tensor, Tensor]:
        """Keys and values where they lie, for a kernel that reads them there; it is made to wait for their copies."""
        self.prefetched.clear()  # a kernel has no use for early copies
        if self._written is not None and not self._written.query():
            wait_event(self._written, self.device)
        self._reader = reader(self.device) if self.offloaded else None
        return self.keys, self.values

    def _set_lengths(self, lengths: list[int]) -> None:
        """Row `r` holds `lengths[r]` tokens from now on."""
        self.lengths = lengths
        self.prefetched.clear()  # early copies hold another number of tokens
        self.residents.bulk_bytes = int(self.stored_bytes * (1 + ROOM))

    def _wait_for_readers(self) -> None:
        """Before the host writes to the storage, or lets go of it: copies of it, and kernels that read it in place."""
        self.synchronize()
        if self.offloaded and self.capacity:
            torch.accelerator.synchronize(self.device)

    def _rebuild(self, index: Sequence[int], capacity: int) -> None:
        """Move to a new storage whose row `i` is the old row `index[i]`."""
        self._wait_for_readers()
        lengths, moved = [self.lengths[row] for row in index], []
        for old in (self.keys, self.values):
            new = self._allocate(old, capacity, batch=len(index))
            for row, (source, length) in enumerate(zip(index, lengths, strict=True)):
                new[row, :, :length] = old[source, :, :length]
            moved.append(new)
        self.adopt(None, *moved, lengths=lengths)

    def take(self, other: "Bulk") -> None:
        """Take over another one's tokens for this device; the other is not to be used again."""
        other._wait_for_readers()
        self.adopt(None, other.keys, other.values, lengths=other.lengths)
        if not (self.offloaded and other.offloaded):  # host memory serves every device
            self._rebuild(range(len(self.lengths)), self.capacity)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row.

        Layers grow at lengths of their own, which do not depend on how the tokens came: in a long context no step
        copies more than one of them. Pinned blocks double in size, so layers leave theirs before it is full.
        """
        share = self.residents.index * GOLDEN % 1.0
        need = int(tokens * GROWTH**share) if self.offloaded else tokens
        if need <= self.capacity:
            return
        if self.offloaded:
            capacity = -(-(need + 1) // GRANULE) * GRANULE
            sizes = [t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in (self.keys, self.values)]
            room = min(transfers.pinned_bytes(capacity * size) // size for size in sizes)
            capacity = room // GRANULE * GRANULE
        else:
            growths = math.ceil(math.log((tokens + 1) / GRANULE, GROWTH) - share) + share
            capacity = math.ceil(GROWTH**growths) * GRANULE
        self._rebuild(range(len(self.lengths)), capacity)

    def append(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Add `keys` and `values` `[rows, kv_heads, tokens, dim]` to rows of equal length."""
        start, tokens = self.lengths[rows.start], keys.shape[2]
        stop = start + tokens
        self.reserve(stop)
        self.unwritten[rows] = [min(same, start) for same in self.unwritten[rows]]
        if self.offloaded:
            copies = [
                (store[row, head, start:stop], new[row - rows.start, head])
                for store, new in ((self.keys, keys), (self.values, values))
                for row, head in product(range(rows.start, rows.stop), range(new.shape[1]))
            ]
            self._written = send(copies, self.device)
        else:
            self.keys[rows, :, start:stop] = keys
            self.values[rows, :, start:stop] = values
        self._set_lengths([*self.lengths[: rows.start], *[stop] * len(self.lengths[rows]), *self.lengths[rows.stop :]])
        self.residents.append(rows, keys, values)

    def fetch(self, head: Head, start: int, stop: int) -> AsyncCopy:
        """Start to copy tokens `start..stop` of one head of one row from the host to the device."""
        at = (slice(head[0], head[0] + 1), slice(head[1], head[1] + 1), slice(start, stop))
        return fetch(self.keys[at], self.values[at], self.device, after=self._written)

    def gather(self, head: Head, index: Tensor) -> AsyncCopy:
        """Keys and values `[1, 1, tokens, dim]` of some tokens of one head of one row, on their way to the device.
        `index` int64 `[tokens]` lies on the device; reading it on the host waits for it."""
        if not self.offloaded:
            return AsyncCopy((self.keys[head][index][None, None], self.values[head][index][None, None]))
        self.synchronize()
        selected, found = index.cpu(), []
        for store in (self.keys, self.values):
            size, pinned = (len(selected), store.shape[3]), store.is_pinned()
            room = torch.empty(size, dtype=store.dtype, device="cpu", pin_memory=pinned)
            found.append(torch.index_select(store[head], 0, selected, out=room)[None, None])
        return fetch(found[0], found[1], self.device, after=None)

    def read(self, rows: slice, heads: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, heads, stop - start, dim]` on the compute device: a view, or a copy if offloaded."""
        part = self.keys[rows, heads, start:stop], self.values[rows, heads, start:stop]
        if not self.offloaded:
            return part
        each = product(range(*rows.indices(len(self.lengths))), range(*heads.indices(self.keys.shape[1])))
        arrived = double_buffer((head, self.fetch(head, start, stop)) for head in each)
        keys, values = zip(*(pair for _, pair in arrived), strict=True)
        return torch.cat(keys).view_as(part[0]), torch.cat(values).view_as(part[1])

    def spans(self, row: int, start: int = 0, *, heads: int = 1) -> list[tuple[int, int]]:
        """A row's tokens from `start` on, `(first, end)` each, so short that `heads` heads hold `STREAM_TOKENS`."""
        length, step = self.lengths[row], max(1, STREAM_TOKENS // heads)
        return [(first, min(first + step, length)) for first in range(start, length, step)]

    def truncate(self, lengths: list[int]) -> None:
        """Forget the newest tokens: row `r` keeps its first `lengths[r]`."""
        if lengths != self.lengths:
            self._set_lengths(lengths)
            self.residents.truncate(lengths)

    def select_rows(self, index: list[int]) -> None:
        """Keep, repeat or reorder rows: row `i` becomes the old row `index[i]`."""
        lengths = [self.lengths[row] for row in index]
        if any(lengths) and len(index) == len(self.lengths):
            # In place: rows that stay are not copied, as most in a beam search.
            self._wait_for_readers()
            changed = {row: source for row, source in enumerate(index) if row != source}
            for row in changed:
                self.unwritten[row] = 0
            for store in (self.keys, self.values):
                # The old content of rows that are both read and written.
                held = {row: store[row, :, : self.lengths[row]].clone() for row in set(changed.values()) & set(changed)}
                for row, source in changed.items():
                    length = self.lengths[source]
                    store[row, :, :length] = held[source] if source in held else store[source, :, :length]
            self._set_lengths(lengths)
        else:
            self._rebuild(index, self.capacity if any(lengths) else 0)
        self.residents.select_rows(index)
        self.flagged = []
        self.flag_copies.clear()
