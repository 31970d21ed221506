"""Storage of a layer's bulk, its older keys and values: preallocated, on the host when offloading."""

import copy
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..files.private_map import PrivateMap
from ..kernels.copying import find_copier
from ..selected_rows import SelectedRows
from ..sketch.codec import Codes
from ..sketch.coded import Records
from . import pinned, transfers
from .placement import AUTO, Placement
from .row_tensors import RowTensors
from .transfers import AsyncCopy, fetch, find_reader, has_own_memory, limit_reads, send, wait_event, wait_for
from .versioned import Buffer

if TYPE_CHECKING:
    from .bulk_sketch import BulkSketch

STREAM_TOKENS = 32768  # tokens of one head in a block that is streamed through the device
Head = tuple[int, int]  # row, KV head
Tokens = tuple[int, int] | Tensor  # first and end of a span, or an ascending index


class Bulk(RowTensors):
    """Every key and value outside sinks and recent tokens, oldest first, row by row.

    With `offloading` on an accelerator the storage is pinned host memory, unless the device has room within the cache's
    budget (`placement.py`). Otherwise it lies on the compute device, and reads are views.
    """

    beside = Buffer[tuple[Tensor, ...]]()  # on the compute device: tokens that are not in `tensors`
    sketched_beside = 0  # the most tokens of a row in `beside`, if the row has a sketch
    decoding_share = 1  # blocks that are decoded at once are so many times shorter
    reopened: Sequence[tuple[Any, ...]] = ()  # each row's `ReopenedSegment`s, see `CodedBulk`
    sketch: "Buffer[BulkSketch | None]" = Buffer()  # of its keys; `TokenStore` has it follow
    records: Records | None = None  # the coded tokens of rows with a sketch; None: they are stored as keys and values
    _reader: Any = None  # stream of the last kernel that read it in place

    def __init__(self, keys: Tensor, values: Tensor, *, offloading: bool, placement: Placement, layer: int) -> None:
        """An empty store for tensors like `keys` `[batch, kv_heads, *, dim]` and `values` (`value_dim`). `placement`
        is the cache's, `layer` is this one's index."""
        self.device, self.placement, self.layer = keys.device, placement, layer
        self.offloading = offloading and has_own_memory(self.device)
        # A budget in bytes is used from the first flush on, a measured one once a prompt has been read.
        self.offloaded = self.offloading and placement.budget in (0, AUTO)
        self._settled = placement.budget != AUTO or not self.offloading
        self.token_bytes = sum(t.shape[3] * t.element_size() for t in (keys, values))  # of one head, as given
        self.written: Any = None  # event of the last copy to the host
        self.sketch, self.beside = None, ()
        self._start(keys, values)
        placement.bulks.add(self)

    def _start(self, keys: Tensor, values: Tensor) -> None:
        """Start without tokens."""
        self.adopt(None, self._allocate(keys, 0), self._allocate(values, 0), lengths=[0] * keys.shape[0])

    @property
    def _kernels(self) -> str:
        """One of `choice.KINDS`, which may copy tokens."""
        return "torch" if self.sketch is None else self.sketch.kernels

    def __del__(self) -> None:
        # Torch keeps pinned memory until copies of it have ended, not kernels: so one token is copied after them.
        if (stream := self._reader) is not None and not stream.query():
            first = tuple(tensor[:1, :1, :1] for tensor in self.tensors)
            transfers.fetch(first, stream.device, after=stream.record_event())

    def __deepcopy__(self, memo: dict) -> "Bulk":
        twin = memo[id(self)] = copy.copy(self)
        self.synchronize()
        twin.lengths, twin.stored = list(self.lengths), list(self.stored)
        twin.unwritten, twin.source = list(self.unwritten), copy.deepcopy(self.source, memo)
        twin.placement = copy.deepcopy(self.placement, memo)
        twin.placement.bulks.add(twin)
        twin.sketch, twin.beside = copy.deepcopy(self.sketch, memo), copy.deepcopy(self.beside, memo)
        twin.tensors = tuple(old[:, :, :0] for old in self.tensors)
        twin.offloaded = twin._is_to_leave(len(self.stored), self.capacity)
        tensors: tuple[Tensor, ...] = ()
        for old in self.tensors:
            new = twin._allocate(old, self.capacity) if twin.source is None else twin.source.find_same(old)
            for row, (same, length) in enumerate(zip(self.unwritten, self.stored, strict=True)):
                for head in range(old.shape[1]):  # one at a time, as in `_copy_rows`
                    new[row, head, same:length] = old[row, head, same:length]
            tensors += (new,)
        twin.tensors = tensors
        return twin

    def adopt(self, source: PrivateMap | None, *tensors: Tensor, lengths: list[int]) -> None:
        """Use these `tensors` `[batch, kv_heads, capacity, *]` as storage; row `r` has `lengths[r]` tokens. They are
        part of the mapped file `source`; None: nobody else uses them."""
        self.source, self.tensors = source, tensors
        self.unwritten = [0] * len(lengths) if source is None else list(lengths)
        self.equal = {}
        self._set_lengths(list(lengths))

    def fill(self, source: PrivateMap | None, tensors: Sequence[Tensor], lengths: list[int]) -> None:
        """Store the first tokens, by arguments as of `adopt`: without a copy if storage is plain host memory."""
        if self.mappable and any(lengths):
            self.adopt(source, *tensors, lengths=lengths)
            return
        for row, tokens in enumerate(lengths):
            rows = slice(row, row + 1)
            self._store(rows, *(tensor[rows, :, :tokens] for tensor in tensors))

    def synchronize(self) -> None:
        """Wait for copies to the host that are still under way, before the host itself reads them."""
        if self.written is not None:
            self.written.synchronize()
            self.written = None
        elif self.offloaded and self.device.type not in ("cpu", "cuda"):
            wait_for(self.device)

    def find_in_place(self) -> tuple[Tensor, Tensor]:
        """Keys and values in host or device memory, for a kernel that reads them there. The device's stream waits for
        copies to the host that are under way."""
        if self.written is not None and not self.written.query():
            wait_event(self.written, self.device)
        self._reader = find_reader(self.device) if self.offloaded else None
        return self.keys, self.values

    def _wait_for_readers(self) -> None:
        """Wait for copies of the storage, and for kernels that read it in place, before the host writes or frees it."""
        self.synchronize()
        if self.offloaded and self.capacity:
            wait_for(self.device)

    def _rebuild(self, index: Sequence[int], capacity: int, *, offloaded: bool) -> None:
        """Move to a new storage whose row `i` is the old row `index[i]`: in host memory, if the device has no room."""
        self._wait_for_readers()
        try:
            moved = self._copy_rows(index, capacity, offloaded=offloaded)
        except torch.OutOfMemoryError:
            if offloaded or not self.offloading:
                raise
            offloaded = True
            moved = self._copy_rows(index, capacity, offloaded=True)
        self.offloaded = offloaded
        self.adopt(None, *moved, lengths=[self.stored[row] for row in index])

    def settle(self) -> None:
        """Decide where the bulk lies under a measured budget: it moves to the device now, if there is room, or never.
        Called before a query-adaptive call, when a prompt's temporaries are freed."""
        if self._settled or not any(self.stored):
            return
        self._settled, rows = True, len(self.stored)
        capacity = self._find_capacity(max(self.stored), offloaded=False)
        if self.placement.has_room(self, rows * capacity * self.row_token_bytes):
            self._rebuild(range(rows), capacity, offloaded=False)

    def leave_device(self) -> None:
        """Move to host memory, for good."""
        old = self.tensors
        self._rebuild(range(len(self.stored)), self.capacity, offloaded=True)
        for tensor in old:  # operands of the layer's last step still refer to them
            if (storage := tensor.untyped_storage()).resizable():
                storage.resize_(0)

    def take(self, other: "Bulk") -> None:
        """Take over another bulk's tokens, for this bulk's device; the other must not be used again."""
        other._wait_for_readers()
        offloaded = self._is_to_leave(len(other.stored), other.capacity)
        self.adopt(None, *other.tensors, lengths=other.stored)
        self.sketch, self.growth = other.sketch, other.growth
        if offloaded and other.offloaded:  # host memory serves every device
            self.offloaded = True
            pinned.serve(self.device)
        else:
            self._rebuild(range(len(self.stored)), self.capacity, offloaded=offloaded)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row in `tensors`.

        Each layer grows at other lengths, which do not depend on the calls that brought the tokens. So in a long
        context no step copies more than a few layers. Records grow with each segment or two.
        """
        if tokens <= self.capacity:
            return
        offloaded = self._is_to_leave(len(self.stored), self._find_capacity(tokens, offloaded=self.offloaded))
        capacity = self._find_capacity(tokens, offloaded=offloaded)
        self._rebuild(range(len(self.stored)), capacity, offloaded=offloaded)

    def append(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Add `keys` and `values` `[rows, kv_heads, tokens, dim]` to rows of equal length."""
        self._store(rows, keys, values)

    def close(self, rows: slice, keys: Tensor, values: Tensor, codes: Codes) -> None:
        """Closed segments were coded. Here nothing follows from it."""

    def code_open(self, rows: slice, keys: Tensor, values: Tensor, codes: Codes | None) -> None:
        """The open segment was coded; None: it is not coded."""

    def _store(self, rows: slice, *added: Tensor) -> None:
        """Append `added`, of the kinds of `tensors`, `[rows, kv_heads, tokens, *]`, to rows of equal length."""
        start = self.stored[rows.start]
        stop = start + added[0].shape[2]
        self.reserve(stop)
        self.unwritten[rows] = [min(unwritten, start) for unwritten in self.unwritten[rows]]
        if self.offloaded:
            pairs = [(store[rows, :, start:stop], new) for store, new in zip(self.tensors, added, strict=True)]
            if (copier := find_copier(pairs, self.device, self._kernels)) is None:
                pairs = [(to[head], new[head]) for to, new in pairs for head in product(*map(range, new.shape[:2]))]
            self.written = send(pairs, self.device, copier)
        else:
            for store, new in zip(self.tensors, added, strict=True):
                store[rows, :, start:stop] = new
        self._set_lengths([*self.stored[: rows.start], *[stop] * len(self.stored[rows]), *self.stored[rows.stop :]])

    def fetch(self, head: Head, start: int, stop: int) -> AsyncCopy:
        """Start to copy one head's tokens `start..stop`, those that are in `tensors`, from the host to the device.
        `decode` takes the result."""
        at = (slice(head[0], head[0] + 1), slice(head[1], head[1] + 1), self.clip_stored(head[0], start, stop))
        return fetch(tuple(tensor[at] for tensor in self.tensors), self.device, after=self.written)

    def gather(self, head: Head, index: Tensor) -> AsyncCopy:
        """Start to copy one head's tokens `index` of `tensors` to the device, `[1, 1, tokens, *]` each. `index` int64
        `[tokens]`, ascending, lies on the device; offloaded storage waits for it. `decode` takes the result."""
        if not self.offloaded:
            return AsyncCopy(tuple(tensor[head][index][None, None] for tensor in self.tensors))
        self.synchronize()
        selected, gathered = index.cpu(), []
        for store in self.tensors:
            size, pinned_memory = (len(selected), store.shape[3]), store.is_pinned()
            room = torch.empty(size, dtype=store.dtype, device="cpu", pin_memory=pinned_memory)
            gathered.append(torch.index_select(store[head], 0, selected, out=room)[None, None])
        return fetch(tuple(gathered), self.device, after=None)

    def choose_stored(self, row: int, index: Tensor) -> Tensor:
        """Those of a row's tokens `index` (ascending) that are in `tensors`."""
        return index

    def count_beside_bytes(self, row: int, *, coded: bool) -> int:
        """Bytes of one token of one head in `beside`, as `decode` reads them."""
        return self.token_bytes

    def decode(
        self, rows: slice, heads: slice, tokens: Tokens, stored: tuple[Tensor, ...], *, coded: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, heads, tokens, dim]` of rows of equal length. `stored` are parts of `tensors` on the
        compute device: those of `tokens` that lie there. `coded`: as query-adaptive calls read them, in few bits where
        there are records."""
        return stored[0], stored[1]

    def read(self, rows: slice, heads: slice, start: int, stop: int, *, coded: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, heads, stop - start, dim]` on the compute device, of rows of equal length: a view, or
        a copy if offloaded. `coded` as for `decode`."""
        span = self.clip_stored(rows.indices(len(self.stored))[0], start, stop)
        parts = tuple(tensor[rows, heads, span] for tensor in self.tensors)
        if self.offloaded and (span.start < span.stop or not self.beside):
            parts = self._bring(parts)
            limit_reads(parts)
        return self.decode(rows, heads, (start, stop), parts, coded=coded)

    def _bring(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copies on the device of `parts` `[rows, heads, tokens, *]` of `tensors`."""
        if (copier := find_copier([(part, part) for part in parts], self.device, self._kernels)) is not None:
            copies = tuple(torch.empty(part.shape, dtype=part.dtype, device=self.device) for part in parts)
            self.find_in_place()  # the copier is a kernel that reads host memory
            copier(list(zip(copies, parts, strict=True)), self.device)
            return copies
        heads_of = (pair for row in zip(*parts, strict=True) for pair in zip(*row, strict=True))
        bringing = fetch(tuple(part[None, None] for pair in heads_of for part in pair), self.device, after=self.written)
        return tuple(torch.cat(bringing.wait()[i :: len(parts)]).view_as(part) for i, part in enumerate(parts))

    def cut_spans(self, row: int, start: int = 0, *, heads: int = 1) -> list[tuple[int, int]]:
        """Spans `(first, end)` of a row's tokens from `start` on: each at most `STREAM_TOKENS`, over `heads` heads."""
        length, step = self.lengths[row], max(1, STREAM_TOKENS // heads)
        return [(first, min(first + step, length)) for first in range(start, length, step)]

    def truncate(self, lengths: list[int], held: list[int] | None = None) -> None:
        """Drop each row's newest tokens: `lengths[r]` stay. The caller will append those up to `held[r]` again."""
        if lengths != self.stored:
            self.equal = {}  # what is appended next replaces tokens
            self._set_lengths(lengths)

    def select_rows(self, index: SelectedRows) -> None:
        """Keep, repeat or reorder rows: row `i` becomes the old row `index[i]`."""
        kept = any(self.stored[row] for row in index)
        if len(index) == len(self.stored) and kept == any(self.stored):
            self._wait_for_readers()
            self._select_in_place(index)
        else:
            capacity = self.capacity if kept else 0
            self._rebuild(index, capacity, offloaded=self._is_to_leave(len(index), capacity))
