"""A bulk in few bits: a record for each token (`sketch/coded.py`), and the open segment in the model's dtype too."""

from collections.abc import Iterator
from operator import sub
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ..kernels.cpu.recording import code_records, decode_records
from ..selected_rows import SelectedRows
from ..sketch import LAST_TOKENS, MIN_TOKENS, SEGMENT_TOKENS, count_closed, count_segments
from ..sketch.codec import CODES, TOKENS, Codes
from ..sketch.coded import RecordLayout, Records, code_tokens, decode_keys, decode_values, estimate_keys, fit_records
from . import row_tensors
from .bulk import Bulk, Tokens
from .reopened import ReopenedSegment, cut_segments

STEP = 16  # tokens: `beside` has room for a multiple of these, and is allocated anew at every flush, but:
LEAST = 128  # tokens: a device that replays graphs keeps room for at least these, see `_fit_beside`


class CodedBulk(Bulk):
    """`tensors` holds the records of closed segments, uint8 `[batch, kv_heads, capacity, stride]`. `beside` holds, on
    the compute device, the tokens that follow: keys and values in the model's dtype, and their records. Copies of a
    cache share `beside` until one of them writes to it.

    A record holds the difference between a key and the sketch's estimate of it. So tokens are coded when the sketch
    codes them, and the open segment again as it grows. Query-adaptive calls read its records (`coded`), other calls and
    the next coding its keys and values. A crop into a closed segment opens it: its tokens are decoded, and coded again.
    """

    growth = 1 + 1 / 64  # spare capacity takes memory that records are to save
    sketched_beside = SEGMENT_TOKENS + LAST_TOKENS
    count_stored = staticmethod(count_closed)

    def __init__(self, keys: Tensor, values: Tensor, *, layout: RecordLayout, **options: Any) -> None:
        """As `Bulk`; `layout` is that of records. Tokens may be appended once `sketch` is set."""
        self.layout, self.stride = layout, layout.find_stride(keys.device)
        self._holders: WeakSet[CodedBulk] = WeakSet([self])  # the bulks that share `beside`
        # For each row, the segments after the closed ones that a crop opened again, in order.
        self.reopened: list[tuple[ReopenedSegment, ...]] = [()] * keys.shape[0]
        self.recoded: list[frozenset[int]] = [frozenset()] * keys.shape[0]  # per row, closed segments coded twice
        super().__init__(keys, values, **options)

    def _start(self, keys: Tensor, values: Tensor) -> None:
        batch, kv_heads = keys.shape[:2]
        with torch.inference_mode(False):  # as in `_allocate`
            records = keys.new_empty(batch, kv_heads, 0, self.stride, dtype=torch.uint8)
            self.beside = *(like.new_empty(batch, kv_heads, 0, like.shape[3]) for like in (keys, values)), records
        self.lengths = [0] * batch
        self.adopt(None, self._allocate(records, 0), lengths=[0] * batch)

    def __deepcopy__(self, memo: dict) -> "Bulk":
        memo[id(self.beside)] = self.beside
        twin = super().__deepcopy__(memo)
        assert isinstance(twin, CodedBulk)
        twin.reopened, twin.recoded = list(self.reopened), list(self.recoded)
        self._holders.add(twin)
        return twin

    @property
    def decoding_share(self) -> int:  # type: ignore[override]
        """As `Bulk`: torch's operations, used without a coder, need memory for temporaries."""
        return 16 if self.sketch is None or self.sketch.find_coder() is None else 1

    @property
    def lent_bytes(self) -> int:
        """As `Bulk`."""
        return sum(held.nbytes for held in self.beside) if len(self._holders) > 1 else 0

    @property
    def keys(self) -> Tensor:
        """Keys of tokens after the closed segments, in row `r` from `stored[r]` on: `[batch, kv_heads, room, dim]`."""
        return self.beside[0]

    @property
    def values(self) -> Tensor:
        """As `keys`, `[batch, kv_heads, room, value_dim]`."""
        return self.beside[1]

    @property
    def records(self) -> Records | None:  # type: ignore[override]
        """As `Bulk`."""
        if self.sketch is None or not self.sketch.in_use:
            return None
        return Records(self.tensors[0], self.beside[2], self.sketch.query_weights, self.layout)

    def put_beside(self, keys: Tensor, values: Tensor, lengths: list[int]) -> None:
        """Hold the tokens after the closed segments, without records. Row `r` then has `lengths[r]` tokens in all."""
        self.lengths = list(lengths)
        self._fit_beside()
        for room, held in zip(self.beside[:2], (keys, values), strict=True):
            room[:, :, : held.shape[2]] = held

    def append(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """As `Bulk`. When a segment closes, it is coded, and so are the tokens after it."""
        assert self.sketch is not None
        stored, before = self.stored[rows.start], self.lengths[rows.start]
        length = before + keys.shape[2]
        closed = count_closed(length)
        if closed > stored and before > stored:
            keys, values = (
                torch.cat([held[rows, :, : before - stored], new], dim=2)
                for held, new in zip(self.beside[:2], (keys, values), strict=True)
            )
        self.lengths[rows] = [length] * len(self.lengths[rows])
        if closed > stored:
            self.reserve(closed)
            self.sketch.append_from(self, rows, (keys, values))
            return
        self._fit_beside()
        for held, new in zip(self.beside[:2], (keys, values), strict=True):
            held[rows, :, before - stored : length - stored] = new

    def close(self, rows: slice, keys: Tensor, values: Tensor, codes: Codes) -> None:
        """Append records of segments that close, for rows of equal lengths. `codes` returns their sketch."""
        first, count = self.stored[rows.start] // SEGMENT_TOKENS, keys.shape[2] // SEGMENT_TOKENS
        records, kept = self._code(rows, keys, values, codes)
        self._store(rows, records)
        for place, row in enumerate(range(rows.start, rows.stop)):
            closing, self.reopened[row] = self.reopened[row][:count], self.reopened[row][count:]
            again = {first + i for i, each in enumerate(closing) if each.recoded or (place, i, each) not in kept}
            self.recoded[row] = frozenset(again.union(i for i in self.recoded[row] if i < first))

    def code_open(self, rows: slice, keys: Tensor, values: Tensor, codes: Codes | None) -> None:
        """As `Bulk`. The tokens go into `beside`, with records if there are `codes`, which returns their sketch."""
        parts = (keys, values) if codes is None else (keys, values, self._code(rows, keys, values, codes)[0])
        self._fit_beside()
        for held, part in zip(self.beside, parts, strict=False):
            held[rows, :, : part.shape[2]] = part

    def _code(
        self, rows: slice, keys: Tensor, values: Tensor, codes: Codes
    ) -> tuple[Tensor, list[tuple[int, int, ReopenedSegment]]]:
        """Records of the tokens after the closed segments, as `_record`. Reopened segments whose new tokens fit put
        their old codes into sketch and records: returned too, as `(row, index, segment)`."""
        assert self.sketch is not None
        kept, coding = list[tuple[int, int, ReopenedSegment]](), (self.sketch.energies, self.sketch.layout)
        for row, segments in ((row, each) for row, each in enumerate(self.reopened[rows]) if each):
            own = {name: part[row] for name, part in codes().items()}
            indexed = enumerate(segments[: own["units"].shape[1]])
            kept += [(row, i, each) for i, each in indexed if each.put_sketch(i, keys[row], *coding, own)]
        records = fit_records(self._record(rows, keys, values, codes), self.stride)
        for row, index, segment in kept:
            segment.put_records(index, records[row])
        return records, kept

    def _record(self, rows: slice, keys: Tensor, values: Tensor, codes: Codes) -> Tensor:
        """Records of the tokens after the closed segments, for rows of equal lengths. `codes` returns their sketch."""
        assert self.sketch is not None
        if (coder := self.sketch.find_coder()) is not None:
            places = self.sketch.tensors, rows, self.stored[rows.start] // SEGMENT_TOKENS
            return coder.record(*places, keys, values, self.sketch.query_weights, self.layout)
        weights, sketch = self.sketch.query_weights, self.sketch.tensors.map(lambda held: held[rows])
        coded = self.sketch.count_coded(self.lengths[rows.start])
        span = {"first": self.stored[rows.start], "segments": count_segments(coded)}
        compiles = self.sketch.kernels != "torch"
        if compiles and (records := code_records(keys, values, sketch, weights, self.layout, **span)) is not None:
            return records
        return code_tokens(keys, values, estimate_keys(codes(), self.sketch.layout), weights, self.layout)

    def choose_stored(self, row: int, index: Tensor) -> Tensor:
        """As `Bulk`. Counting them waits for the device."""
        return index[: int((index < self.stored[row]).sum())]

    def count_beside_bytes(self, row: int, *, coded: bool) -> int:
        """As `Bulk`."""
        return self.stride if coded and self.lengths[row] >= MIN_TOKENS else self.token_bytes

    def decode(
        self, rows: slice, heads: slice, tokens: Tokens, stored: tuple[Tensor, ...], *, coded: bool = False
    ) -> tuple[Tensor, Tensor]:
        """As `Bulk`, in the model's dtypes. `stored` has records of tokens in closed segments; others are `beside`."""
        (records,), parts, row = stored, [], rows.indices(len(self.stored))[0]
        count, first_beside = records.shape[2], self.stored[row]
        coded = coded and self.lengths[row] >= MIN_TOKENS
        fields = self.beside if coded else self.beside[:2]  # a shorter bulk has no records yet
        if isinstance(tokens, Tensor):
            beside = [held[rows, heads][:, :, tokens[count:] - first_beside] for held in fields]
        else:
            start, stop = (max(0, edge - first_beside) for edge in tokens)
            beside = [held[rows, heads, start:stop] for held in fields]
        if coded:  # all tokens are decoded from records
            records = torch.cat([records, beside[2]], dim=2) if count else beside[2]
            count, beside = records.shape[2], [held[:, :, :0] for held in beside]
        if count:
            assert self.sketch is not None
            weights, decoded, sketch = self.sketch.query_weights[heads], None, self.sketch.tensors
            if not isinstance(tokens, Tensor):  # the kernels take spans of tokens alone
                span = {"first": tokens[0], "segments": count_segments(self.sketch.count_coded(self.lengths[row]))}
                if (coder := self.sketch.find_coder()) is not None:
                    of_all = sketch, rows, heads, self.sketch.query_weights, self.layout, self.beside[:2]
                    decoded = coder.decode(records, *of_all, **span)
                elif self.sketch.kernels != "torch":
                    own = sketch.map(lambda held: held[rows, heads])
                    decoded = decode_records(records, own, weights, self.layout, **span)
            if decoded is None:
                index = tokens
                if not isinstance(index, Tensor):
                    index = torch.arange(*index, dtype=torch.int64, device=self.device)
                predicted = self._predict(rows, heads, index[:count])
                decoded = decode_keys(records, predicted, weights, self.layout), decode_values(records, self.layout)
            parts.append([part.to(like.dtype) for part, like in zip(decoded, self.beside[:2], strict=True)])
        if beside[0].shape[2] or not count:
            parts.append(beside[:2])
        keys, values = (torch.cat(each, dim=2) if len(each) > 1 else each[0] for each in zip(*parts, strict=True))
        return keys, values

    def truncate(self, lengths: list[int], held: list[int] | None = None) -> None:
        """As `Bulk`. Reopened segments are decoded by the sketch, so this goes before the sketch's own truncation."""
        closed = [min(count_closed(length), stored) for length, stored in zip(lengths, self.stored, strict=True)]
        opened = {
            row: self.read(slice(row, row + 1), slice(None), first, length)
            for row, (first, length) in enumerate(zip(closed, lengths, strict=True))
            if first < self.stored[row]
        }
        self.reopened = [
            cut_segments([*self._reopen(row, first, left), *self.reopened[row]], left - first)
            for row, (first, left) in enumerate(zip(closed, held or lengths, strict=True))
        ]
        super().truncate(closed)
        self.lengths = list(lengths)
        if opened:
            self._fit_beside()
        for row, tokens in opened.items():
            for room, again in zip(self.beside[:2], tokens, strict=True):
                room[row, :, : again.shape[2]] = again[0]

    def _reopen(self, row: int, first: int, stop: int) -> Iterator[ReopenedSegment]:
        """The codes and records of the row's tokens `first..stop` that lie in closed segments, by segment."""
        for start in range(first, min(self.stored[row], stop), SEGMENT_TOKENS):
            self.synchronize()
            assert self.sketch is not None
            held = self.sketch.find_segment(row, start // SEGMENT_TOKENS) or {}  # segments' fields: [kv_heads, 1, ...]
            sketch = {name: part if name in TOKENS else part[:, 0] for name, part in held.items()}
            records = self.tensors[0][row, :, start : start + SEGMENT_TOKENS, : self.layout.size]
            again = start // SEGMENT_TOKENS in self.recoded[row]
            yield ReopenedSegment(sketch, records, again).copy(self.device, stop - start)

    @torch.inference_mode(False)  # as in `_allocate`
    def select_rows(self, index: SelectedRows) -> None:
        """As `Bulk`."""
        lengths = [self.lengths[row] for row in index]
        super().select_rows(index)
        beside = [index.apply(held.clone() if self.lent_bytes else held) for held in self.beside]
        if beside[0] is not self.beside[0]:
            self._hold(*beside)
        self.lengths = lengths
        self.reopened, self.recoded = [self.reopened[row] for row in index], [self.recoded[row] for row in index]

    def take(self, other: Bulk) -> None:
        """As `Bulk`. The sketch is taken after this."""
        assert isinstance(other, CodedBulk)
        other._wait_for_readers()
        other.tensors = (fit_records(other.tensors[0], self.stride),)
        super().take(other)
        keys, values, records = (held.to(self.device, copy=True) for held in other.beside)
        self._hold(keys, values, fit_records(records, self.stride))
        self.lengths, self.recoded = other.lengths, other.recoded
        self.reopened = [tuple(each.copy(self.device) for each in segments) for segments in other.reopened]

    def _set_lengths(self, lengths: list[int]) -> None:
        self.stored = lengths  # and leave `lengths`, which count tokens beside `tensors` too

    def _predict(self, rows: slice, heads: slice, index: Tensor) -> Tensor:
        """The sketch's estimates of keys: float32 `[rows, heads, tokens, dim]`."""
        assert self.sketch is not None
        kept, length = self.sketch.tensors.to_tensors(), self.lengths[rows.indices(len(self.lengths))[0]]
        codes = {name: kept[name][rows, heads] for name in CODES}
        codes |= {name: codes[name][..., index] for name in TOKENS}
        segments = index.div(SEGMENT_TOKENS, rounding_mode="floor")
        segments = segments.clamp_max(count_segments(self.sketch.count_coded(length)) - 1)
        return estimate_keys(codes, self.sketch.layout, of=segments)

    @torch.inference_mode(False)  # as in `_allocate`
    def _fit_beside(self) -> None:
        """Before a write to `beside`: give it room for its tokens, and little more, in tensors that no other bulk has.
        A device that replays graphs, which hold addresses, keeps room for all tokens that can lie there, or doubles."""
        tokens = max(map(sub, self.lengths, self.stored), default=0)
        sketched = max(self.lengths, default=0) >= MIN_TOKENS
        room = -(-tokens // STEP) * STEP
        if self.device.type in row_tensors.REPLAYING and tokens:
            most = SEGMENT_TOKENS + LAST_TOKENS if sketched else LEAST
            room = max(self.beside[0].shape[2], most if tokens <= most else 1 << (tokens - 1).bit_length())
        rooms = room, room, room if sketched and self.sketch is not None and self.sketch.codes_open else 0
        if [held.shape[2] for held in self.beside] == [*rooms] and not self.lent_bytes:
            return
        fitted = []
        for old, room in zip(self.beside, rooms, strict=True):
            new, kept = old.new_empty(*old.shape[:2], room, old.shape[3]), slice(0, min(room, old.shape[2]))
            new[:, :, kept] = old[:, :, kept]
            fitted.append(new)
        self._hold(*fitted)

    def _hold(self, *beside: Tensor) -> None:
        """Make these tensors `beside`, shared with no other bulk."""
        self._holders.discard(self)
        self.beside, self._holders = beside, WeakSet([self])
