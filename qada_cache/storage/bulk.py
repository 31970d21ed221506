"""Storage of a layer's bulk, its older keys and values: preallocated, on the host when offloading."""

import copy
import math
from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..files.private_map import PrivateMap
from ..sketch.coded import Records
from . import transfers
from .residents import ROOM, Head, LayerResidents, Residents
from .row_tensors import RowTensors
from .transfers import AsyncCopy, HostCopy, double_buffer, fetch, find_reader, send, wait_event

if TYPE_CHECKING:
    from .bulk_sketch import BulkSketch

GRANULE = 256  # tokens; capacities are multiples of it
GROWTH = 1.25  # a store has room for at most this multiple of its tokens when it moves; pinned blocks for more
GOLDEN = 0.618034  # multiples of it, modulo 1, are spread evenly over [0, 1), however many there are
FLAG_COPIES = 8  # a host that runs further ahead of the device forgets the flags of older calls
STREAM_TOKENS = 32768  # tokens of one head in a block that is streamed through the device
Tokens = tuple[int, int] | Tensor  # first and end of a span, or an ascending index


class Bulk(RowTensors):
    """Every key and value outside sinks and recent tokens, oldest first, row by row.

    With `offloading` on an accelerator the storage is pinned host memory, and heads may be kept on the device as well
    (`residents.py`). Otherwise it lies on the compute device, and reads are views.
    """

    growth = GROWTH
    beside: tuple[Tensor, ...] = ()  # on the compute device, tokens that are not in `tensors`
    sketched_beside = 0  # of these, at most so many of a row that has a sketch
    sketch: "BulkSketch | None" = None  # of its keys; `TokenStore` has it follow
    records: Records | None = None  # what rows with a sketch lie in, if not as keys and values
    _reader: Any = None  # stream of the last kernel that read it in place

    def __init__(self, keys: Tensor, values: Tensor, *, offloading: bool, residents: Residents, layer: int) -> None:
        """An empty store for tensors like `keys` `[batch, kv_heads, *, dim]` and `values` (`value_dim`). `residents`
        are the cache's, `layer` is this one's index."""
        self.device = keys.device
        self.offloaded = offloading and self.device.type != "cpu"
        self.residents = LayerResidents(residents, layer, keys.device, *keys.shape[:2])
        self.token_bytes = sum(t.shape[3] * t.element_size() for t in (keys, values))  # of one head, as given
        self.flagged: list[Head] = []  # that the last adaptive call read
        self.prefetched: dict[Head, AsyncCopy] = {}  # started before a call needs them
        # Flags `[batch, kv_heads]` of kernels that read heads in place, not yet counted for residents.
        self.flag_copies: deque[HostCopy] = deque(maxlen=FLAG_COPIES)
        self._written: Any = None  # event of the last copy to the host
        self._start(keys, values)

    def _start(self, keys: Tensor, values: Tensor) -> None:
        """Hold nothing yet."""
        self.adopt(None, self._allocate(keys, 0), self._allocate(values, 0), lengths=[0] * keys.shape[0])

    @property
    def lent_bytes(self) -> int:
        """Of the tensors `beside`, bytes that copies have as well."""
        return 0

    @property
    def keys(self) -> Tensor:
        """Keys as the model made them, `[batch, kv_heads, *, dim]`."""
        return self.tensors[0]

    @property
    def values(self) -> Tensor:
        """Likewise values."""
        return self.tensors[1]

    def __del__(self) -> None:
        # Torch keeps pinned memory until copies of it have ended, not kernels: so one token is copied after them.
        if (stream := self._reader) is not None and not stream.query():
            first = tuple(tensor[:1, :1, :1] for tensor in self.tensors)
            transfers.fetch(first, stream.device, after=stream.record_event())

    def __deepcopy__(self, memo: dict) -> "Bulk":
        twin = memo[id(self)] = copy.copy(self)
        self.synchronize()
        twin.lengths, twin.stored = list(self.lengths), list(self.stored)
        twin.unwritten, twin.flagged = list(self.unwritten), list(self.flagged)
        twin.prefetched, twin.flag_copies = {}, deque(maxlen=FLAG_COPIES)
        twin.residents, twin.source = copy.deepcopy(self.residents, memo), copy.deepcopy(self.source, memo)
        twin.sketch, twin.beside = copy.deepcopy(self.sketch, memo), copy.deepcopy(self.beside, memo)
        twin.tensors = ()
        for old in self.tensors:
            new = self._allocate(old, self.capacity) if twin.source is None else twin.source.find_same(old)
            for row, (same, length) in enumerate(zip(self.unwritten, self.stored, strict=True)):
                new[row, :, same:length] = old[row, :, same:length]
            twin.tensors += (new,)
        return twin

    def adopt(self, source: PrivateMap | None, *tensors: Tensor, lengths: list[int]) -> None:
        """Hold these, `[batch, kv_heads, capacity, *]`, of row `r` the first `lengths[r]` tokens; they are part of
        `source`, or nobody else's if that is None."""
        self.source, self.tensors = source, tensors
        self.unwritten = [0] * len(lengths) if source is None else list(lengths)
        self._set_lengths(list(lengths))

    def fill(self, source: PrivateMap | None, tensors: Sequence[Tensor], lengths: list[int]) -> None:
        """Start with these, as for `adopt`: in place if storage is plain host memory."""
        if self.mappable and any(lengths):
            self.adopt(source, *tensors, lengths=lengths)
            return
        for row, tokens in enumerate(lengths):
            rows = slice(row, row + 1)
            self._store(rows, *(tensor[rows, :, :tokens] for tensor in tensors))

    def synchronize(self) -> None:
        """Wait for copies to the host that are still under way, before the host itself reads them."""
        if self._written is not None:
            self._written.synchronize()
            self._written = None
        elif self.offloaded and self.device.type not in ("cpu", "cuda"):
            torch.accelerator.synchronize(self.device)

    def find_in_place(self) -> tuple[Tensor, Tensor]:
        """Keys and values where they lie, for a kernel that reads them there; it is made to wait for their copies."""
        self.prefetched.clear()  # a kernel has no use for early copies
        if self._written is not None and not self._written.query():
            wait_event(self._written, self.device)
        self._reader = find_reader(self.device) if self.offloaded else None
        return self.keys, self.values

    def _set_lengths(self, lengths: list[int]) -> None:
        """`tensors` hold `lengths[r]` tokens of row `r` from now on."""
        self.stored = self.lengths = lengths
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
        lengths, moved = [self.stored[row] for row in index], []
        for old in self.tensors:
            new = self._allocate(old, capacity, batch=len(index))
            for row, (source, length) in enumerate(zip(index, lengths, strict=True)):
                new[row, :, :length] = old[source, :, :length]
            moved.append(new)
        self.adopt(None, *moved, lengths=lengths)

    def take(self, other: "Bulk") -> None:
        """Take over another one's tokens for this device; the other is not to be used again."""
        other._wait_for_readers()
        self.adopt(None, *other.tensors, lengths=other.stored)
        self.sketch = other.sketch
        if not (self.offloaded and other.offloaded):  # host memory serves every device
            self._rebuild(range(len(self.stored)), self.capacity)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row in `tensors`.

        Layers grow at lengths of their own, which do not depend on how the tokens came: in a long context no step
        copies more than a few of them, records apart, which grow with each segment or two. Pinned blocks double in
        size, so layers leave theirs before it is full.
        """
        share = self.residents.index * GOLDEN % 1.0
        need = int(tokens * GROWTH**share) if self.offloaded else tokens
        if need <= self.capacity:
            return
        if self.offloaded:
            capacity = -(-(need + 1) // GRANULE) * GRANULE
            sizes = [t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in self.tensors]
            room = min(transfers.count_pinned(capacity * size) // size for size in sizes if size)
            capacity = room // GRANULE * GRANULE
        else:
            growths = math.ceil(math.log(tokens / GRANULE, self.growth) - share) + share
            capacity = max(math.floor(self.growth**growths), -(-tokens // GRANULE)) * GRANULE
        self._rebuild(range(len(self.stored)), capacity)

    def append(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Add `keys` and `values` `[rows, kv_heads, tokens, dim]` to rows of equal length."""
        self._store(rows, keys, values)

    def close(self, rows: slice, keys: Tensor, values: Tensor, made: dict[str, Tensor]) -> None:
        """The sketch has `made` this of segments that will not change any more."""

    def code_open(self, rows: slice, keys: Tensor, values: Tensor, made: dict[str, Tensor]) -> None:
        """The sketch has `made` this of the open segment, all that follows closed ones."""

    def _store(self, rows: slice, *added: Tensor) -> None:
        """Add tokens to `tensors`."""
        start = self.stored[rows.start]
        stop = start + added[0].shape[2]
        self.reserve(stop)
        self.unwritten[rows] = [min(same, start) for same in self.unwritten[rows]]
        if self.offloaded:
            copies = [
                (store[row, head, start:stop], new[row - rows.start, head])
                for store, new in zip(self.tensors, added, strict=True)
                for row, head in product(range(rows.start, rows.stop), range(new.shape[1]))
            ]
            self._written = send(copies, self.device)
        else:
            for store, new in zip(self.tensors, added, strict=True):
                store[rows, :, start:stop] = new
        self._set_lengths([*self.stored[: rows.start], *[stop] * len(self.stored[rows]), *self.stored[rows.stop :]])
        self.residents.append(rows, *added)

    def fetch(self, head: Head, start: int, stop: int) -> AsyncCopy:
        """Start to copy tokens `start..stop` of one head of one row from the host to the device, as far as `tensors`
        have them; for `decode`, as what `gather` returns."""
        at = (slice(head[0], head[0] + 1), slice(head[1], head[1] + 1), self.clip_stored(head[0], start, stop))
        return fetch(tuple(tensor[at] for tensor in self.tensors), self.device, after=self._written)

    def gather(self, head: Head, index: Tensor) -> AsyncCopy:
        """`tensors` `[1, 1, tokens, *]` of some tokens of one head of one row, on their way to the device. `index`
        int64 `[tokens]`, ascending, lies on the device; reading it on the host waits for it."""
        if not self.offloaded:
            return AsyncCopy(tuple(tensor[head][index][None, None] for tensor in self.tensors))
        self.synchronize()
        selected, found = index.cpu(), []
        for store in self.tensors:
            size, pinned = (len(selected), store.shape[3]), store.is_pinned()
            room = torch.empty(size, dtype=store.dtype, device="cpu", pin_memory=pinned)
            found.append(torch.index_select(store[head], 0, selected, out=room)[None, None])
        return fetch(tuple(found), self.device, after=None)

    def clip_stored(self, row: int, start: int, stop: int) -> slice:
        """Of a row's tokens `start..stop` those in `tensors`."""
        return slice(min(start, self.stored[row]), min(stop, self.stored[row]))

    def choose_stored(self, row: int, index: Tensor) -> Tensor:
        """Of a row's tokens `index`, ascending, those in `tensors`."""
        return index

    def find_resident(self, head: Head) -> AsyncCopy | None:
        """What the device has of a head in `tensors`, if that is up to date."""
        return self.residents.get(head, self.stored)

    def count_beside_bytes(self, row: int, *, coded: bool) -> int:
        """Bytes of one head of a token `beside`, as read by `decode`."""
        return self.token_bytes

    def decode(
        self, rows: slice, heads: slice, tokens: Tokens, stored: tuple[Tensor, ...], *, coded: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, heads, tokens, dim]` of rows of equal length; `stored` is what `tensors` have of
        these, on the compute device. `coded`: as query-adaptive calls read them, in few bits where there are records.
        """
        return stored[0], stored[1]

    def read(self, rows: slice, heads: slice, start: int, stop: int, *, coded: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, heads, stop - start, dim]` on the compute device, of rows of equal length: a view, or
        a copy if offloaded. `coded` as for `decode`."""
        here = self.clip_stored(rows.indices(len(self.stored))[0], start, stop)
        parts = tuple(tensor[rows, heads, here] for tensor in self.tensors)
        if self.offloaded and (here.start < here.stop or not self.beside):
            each = product(range(*rows.indices(len(self.stored))), range(*heads.indices(self.tensors[0].shape[1])))
            arrived = double_buffer((head, self.fetch(head, start, stop)) for head in each)
            copies = zip(*(pair for _, pair in arrived), strict=True)
            parts = tuple(torch.cat(copy).view_as(part) for copy, part in zip(copies, parts, strict=True))
        return self.decode(rows, heads, (start, stop), parts, coded=coded)

    def cut_spans(self, row: int, start: int = 0, *, heads: int = 1) -> list[tuple[int, int]]:
        """A row's tokens from `start` on, `(first, end)` each, so short that `heads` heads hold `STREAM_TOKENS`."""
        length, step = self.lengths[row], max(1, STREAM_TOKENS // heads)
        return [(first, min(first + step, length)) for first in range(start, length, step)]

    def truncate(self, lengths: list[int]) -> None:
        """Forget the newest tokens: row `r` keeps its first `lengths[r]`."""
        if lengths != self.stored:
            self._set_lengths(lengths)
            self.residents.truncate(lengths)

    def select_rows(self, index: list[int]) -> None:
        """Keep, repeat or reorder rows: row `i` becomes the old row `index[i]`."""
        lengths = [self.stored[row] for row in index]
        if any(lengths) and len(index) == len(self.stored):
            # In place: rows that stay are not copied, as most in a beam search.
            self._wait_for_readers()
            changed = {row: source for row, source in enumerate(index) if row != source}
            for row in changed:
                self.unwritten[row] = 0
            for store in self.tensors:
                # The old content of rows that are both read and written.
                held = {row: store[row, :, : self.stored[row]].clone() for row in set(changed.values()) & set(changed)}
                for row, source in changed.items():
                    length = self.stored[source]
                    store[row, :, :length] = held[source] if source in held else store[source, :, :length]
            self._set_lengths(lengths)
        else:
            self._rebuild(index, self.capacity if any(lengths) else 0)
        self.residents.select_rows(index)
        self.flagged = []
        self.flag_copies.clear()
