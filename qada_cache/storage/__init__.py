"""The tokens of one layer: sinks and recent tokens on the compute device, older ones in the bulk."""

from collections.abc import Iterable
from functools import partial
from operator import add, sub

import torch
from torch import Tensor

from ..key_moments.running import RunningMoments
from ..selected_rows import SelectedRows
from ..sketch import Layout
from ..sketch.coded import RecordLayout
from .bulk import Bulk
from .bulk_sketch import BulkSketch
from .coded_bulk import CodedBulk
from .latent_sketch import LatentSketch
from .near import NearTokens, Pair
from .placement import Placement
from .reading import read_on_host
from .versioned import Buffer

PENDING_TOKENS = 128  # tokens leave the device in chunks of about this many
ROOM_TOKENS = 1024  # recent tokens that have room from the start; more columns come as they are needed


class TokenStore(NearTokens):
    """Keys and values of one layer, every row kept as `sinks | bulk | recent`, oldest first.

    Recent tokens are the sliding window, and pending tokens, which wait to move on in chunks. They are right-aligned:
    the newest tokens of all rows share columns. Padding is never stored, so rows may differ in length. A flush moves
    the oldest recent tokens into the sinks until these are full, then into the bulk and the running moments. Flushed
    tokens precede the window of every query of the next call of at most `window` tokens.
    """

    bulk = Buffer[Bulk]()

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        *,
        sinks: int,
        window: int,
        offloading: bool,
        placement: Placement,
        layer: int,
        bulk_bits: int = 16,
    ) -> None:
        """An empty store for tensors like `keys` `[batch, kv_heads, *, dim]` and `values` (`value_dim`), and no moments
        or sketch. `placement` and `layer` are as for `Bulk`, `bulk_bits` for `RecordLayout.from_bits`."""
        # A call appends at most `window` tokens to at most `window` kept ones; the rest is pending.
        capacity, batch = window + max(window, PENDING_TOKENS), len(keys)
        super().__init__(keys, values, sinks=sinks, capacity=capacity, columns=sinks + min(capacity, ROOM_TOKENS))
        self.window, self.offloading = window, offloading
        self.dtypes = keys.dtype, values.dtype
        self.decoded = False  # whether `append` put anything into the bulk since the last `absorb`
        # Of each row's tokens, the number of oldest ones that were all read by `absorb`; and the number of those read
        # by `absorb` or under the same decisions.
        self.exact, self.alike = [0] * batch, [0] * batch
        self.record_layout = RecordLayout.from_bits(keys.shape[3], values.shape[3], bulk_bits)
        self.bulk = self._make_bulk(placement, layer)
        # Moments of the keys in the bulk; None if not asked for. Frozen ones lack the tokens that `append` put there
        # since the last `absorb`.
        self.moments: RunningMoments | None = None
        self.update_moments = True  # False freezes them in `append`, so that only `absorb` adds to them
        self.selects = False  # whether tokens of the bulk are selected by its sketch
        self.error_energies: Tensor | None = None  # for latents, see `LatentSketch.take_energies`
        self.shared_dim = 0  # above 0: that many first channels of a key are its value, which is not stored

    def _make_bulk(self, placement: Placement, layer: int) -> Bulk:
        make = Bulk if self.record_layout is None else partial(CodedBulk, layout=self.record_layout)
        return make(self.near_keys, self.near_values, offloading=self.offloading, placement=placement, layer=layer)

    @property
    def sketch(self) -> BulkSketch | None:
        """The sketch by which tokens of the bulk are selected; None, if heads read all of them."""
        return self.bulk.sketch if self.selects else None

    def find_values(self, keys: Tensor, values: Tensor) -> Tensor:
        """Values of stored tokens, `[..., value_dim]`; latents have them in the first channels of their keys."""
        return keys[..., : self.shared_dim] if self.shared_dim else values

    @property
    def version(self) -> tuple[int, ...]:
        """Numbers that change when a buffer is replaced or the sketch comes into use, as kernels then read and write
        elsewhere. Tokens written into existing buffers do not change them."""
        bulk, sketch = self.bulk, self.bulk.sketch
        return self.replaced, bulk.replaced, *(() if sketch is None else (sketch.replaced, sketch.in_use))

    def append(self, keys: Tensor, values: Tensor, valid: Tensor | None, *, write: bool = True) -> None:
        """Add at most `window` recent tokens to every row; `valid` `[batch, tokens]` is None without padding. If not
        `write`, tokens without padding are only counted, and the caller has them written into their columns."""
        tokens = keys.shape[2]
        self.flush_for(tokens)
        if valid is None:
            self.reserve(self.end + tokens)
            self.end += tokens
            if write:
                self.write(keys, values)
        else:
            groups = self._list_rows()
            self._set_recent(groups, [self._extend(rows, (keys, values), valid) for rows in groups])
        self.lengthen(tokens, valid, exact=False)

    def flush_for(self, tokens: int) -> None:
        """Flush, if otherwise there is no room for `tokens` recent tokens more."""
        if self.end + tokens > self.capacity:
            groups = self._group_rows(self.lengths, self.flushed)
            self._set_recent(groups, [self._flush(rows, self._view_recent(rows), exact=False) for rows in groups])

    def outgrows(self, tokens: int) -> bool:
        """Whether `absorb` of `tokens` tokens a row would move the bulk to larger buffers."""
        bulk_tokens = max(self.lengths, default=0) + tokens - self.sinks - self.window
        return self.bulk.count_stored(max(0, bulk_tokens)) > self.bulk.capacity

    def advance(self) -> None:
        """Count one more token of every row, which a replayed graph has put into its column."""
        self.end += 1
        before = self.lengths
        self.lengths = [length + 1 for length in before]
        self.alike = list(self.lengths) if self.alike == before else list(map(_grow, self.alike, before, self.lengths))

    def absorb(self, keys: Tensor, values: Tensor, valid: Tensor | None) -> None:
        """Add any number of tokens: each row keeps its window, everything older is flushed at once."""
        self._catch_up(range(self.batch))
        groups = self._group_rows(self.lengths, self.flushed) if valid is None else self._list_rows()
        recents = [self._flush(rows, self._extend(rows, (keys, values), valid), exact=True) for rows in groups]
        self._set_recent(groups, recents)
        self.lengthen(keys.shape[2], valid, exact=True)
        self.decoded = False

    def find_flushed(self, lengths: list[int]) -> list[int]:
        """The `flushed` of rows that are cropped to these lengths."""
        return [min(gone, max(new - self.window, 0)) for gone, new in zip(self.flushed, lengths, strict=True)]

    def crop(self, lengths: list[int]) -> None:
        """Row `r` keeps its first `lengths[r]` tokens; the rest is as if it had never been seen, moments included."""
        flushed = self.find_flushed(lengths)
        removed = [old - new for old, new in zip(self.lengths, lengths, strict=True)]
        if flushed == self.flushed and len(set(removed)) == 1:
            self.end -= removed[0]
        else:  # the window reaches back into flushed tokens, or rows lose different numbers of tokens
            groups = self._group_rows(flushed, lengths, self.flushed, self.lengths)
            kept = [self.copy_tokens(rows, flushed[rows.start], lengths[rows.start]) for rows in groups]
            self._set_recent(groups, kept)
        self.lengths, self.flushed = lengths, flushed
        self.exact, self.alike = (list(map(min, counts, lengths)) for counts in (self.exact, self.alike))
        stored, held = ([max(count - self.sinks, 0) for count in counts] for counts in (flushed, lengths))
        self.bulk.truncate(stored, held)
        if self.bulk.sketch is not None:
            self.bulk.sketch.truncate(self.bulk)
        self.decoded = self.decoded and any(stored)
        if self.moments is not None:
            for row, (count, tokens) in enumerate(zip(self.moments.count, stored, strict=True)):
                if count > tokens:  # collected anew: subtracting leaves rounding errors that later tokens never remove
                    self.moments.clear(slice(row, row + 1))
                    self._catch_up([row])

    def keep_moments(self, *, track: bool, update: bool, kernels: str = "auto") -> None:
        """Keep running moments if `track`, and have `append` update them if `update`, as if it had been so from the
        start. `kernels` is as for `take_in`. ValueError, if they are to be frozen after tokens were decoded: the store
        does not know which ones."""
        frozen = self.moments is not None and not self.update_moments
        if track and not update and not frozen and self.decoded:
            raise ValueError(
                "update_moments=False leaves out tokens that were decoded, and this cache does not know which those "
                "are: build one with update_moments=False and read the prompt again"
            )
        self.update_moments = update
        if not track:
            self.moments = None
        elif self.moments is None:
            batch, kv_heads, _, dim = self.near_keys.shape
            with torch.inference_mode(False):  # as in `NearTokens.__init__`
                self.moments = RunningMoments(batch, kv_heads, dim, self.near_keys.device)
        if self.moments is not None:
            self.moments.kernels = kernels
        if update or not frozen:
            self._catch_up(range(self.batch))

    def keep_sketch(self, bits: float, energies: Tensor | None, *, select: bool, kernels: str = "auto") -> None:
        """Keep a sketch of `bits` a value with these `BulkSketch.energies` and `kernels`, as if from the start: to
        `select` tokens by it, or because records need it (then its code stays). Keys of no whole blocks have none."""
        layout, kept = Layout.from_bits(self.near_keys.shape[3], bits), self.bulk.sketch
        if (coded := self.record_layout is not None) and energies is None:  # not for a sketch kept below
            energies = self.near_keys.new_ones(self.near_keys.shape[1], self.near_keys.shape[3]).float()
        if not self.near_keys.is_cpu and not self.near_values.shape[3]:
            kernels = "torch"  # Triton has no code for tokens without values
        self.selects = select and layout is not None
        if layout is None or not (select or coded):
            self.bulk.sketch = None
        elif kept is None or not (coded or kept.matches(layout, energies)):
            values = self.find_values(self.near_keys, self.near_values)
            kind = BulkSketch if self.near_values.shape[3] else LatentSketch
            self.bulk.sketch = sketch = kind(self.near_keys, values, layout, energies, kernels)
            if isinstance(sketch, LatentSketch):
                sketch.take_energies(self.error_energies)
            self._lead_sketch(sketch)
            for row in self._list_rows():
                sketch.append_from(self.bulk, row)
        else:
            kept.kernels = kernels
            self._lead_sketch(kept)

    def _lead_sketch(self, sketch: BulkSketch) -> None:
        """Have `sketch` follow the running moments, if these always cover all tokens of the bulk."""
        sketch.follow(self.moments if self.update_moments else None, self.shared_dim, self.bulk)

    @torch.inference_mode(False)  # the new buffers are written to later, perhaps outside inference mode
    def select_rows(self, index: SelectedRows) -> None:
        """Row `i` becomes the old row `index[i]`. Buffers stay where they are if there are as many rows as before."""
        self.near_keys, self.near_values = index.apply(self.near_keys), index.apply(self.near_values)
        self.bulk.select_rows(index)
        for known in (self.moments, self.bulk.sketch):
            if known is not None:
                known.select_rows(index)
        counted = self.lengths, self.flushed, self.exact, self.alike
        self.lengths, self.flushed, self.exact, self.alike = ([counts[row] for row in index] for counts in counted)
        if max(map(sub, self.lengths, self.flushed), default=0) < self.end:  # rows with more recent tokens are gone
            rows = self._list_rows()
            self._set_recent(rows, [tuple(part.clone() for part in self._view_recent(row)) for row in rows])

    @torch.inference_mode(False)  # as for `select_rows`
    def move(self, device: torch.device) -> None:
        """Serve keys on another device (a loaded cache does not know where its model lives until it is used)."""
        self.near_keys, self.near_values = self.near_keys.to(device), self.near_values.to(device)
        old, self.bulk = self.bulk, self._make_bulk(self.bulk.placement, self.bulk.layer)
        self.bulk.take(old)
        for known in (self.moments, self.bulk.sketch):
            if known is not None:
                known.move(device)

    def _catch_up(self, rows: Iterable[int]) -> None:
        """Add the bulk's missing tokens to the moments, before an exact call: those decoded under frozen moments."""
        if self.moments is None:
            return
        for row in rows:
            own = slice(row, row + 1)
            for span in self.bulk.cut_spans(row, self.moments.count[row], heads=self.near_keys.shape[1]):
                self._take_into_moments(own, self.bulk.read(own, slice(None), *span)[0])

    def _take_into_moments(self, rows: slice, keys: Tensor) -> None:
        assert self.moments is not None
        self.moments.update(rows, keys)
        if self.bulk.sketch is not None:
            self.bulk.sketch.take_moments(rows)

    def lengthen(self, tokens: int, valid: Tensor | None, *, exact: bool) -> None:
        """Count the new tokens of every row, those that are `valid`. `exact`: `absorb` reads them."""
        before, new = self.lengths, [tokens] * self.batch if valid is None else valid.sum(dim=-1).tolist()
        self.lengths = list(map(add, before, new))
        for counts in (self.exact, self.alike) if exact else (self.alike,):
            counts[:] = map(_grow, counts, before, self.lengths)

    def copy_tokens(self, rows: slice, start: int, stop: int, *, on_host: bool = False) -> Pair:
        """Copies of real tokens `start..stop` of rows alike, on the compute device or `on_host`, wherever they lie."""
        gone = self.flushed[rows.start]
        sinks, recent = slice(start, min(stop, gone, self.sinks)), slice(max(start - gone, 0), max(stop - gone, 0))
        parts = [(self.near_keys[rows, :, sinks], self.near_values[rows, :, sinks])]
        first, last = max(start, self.sinks), min(stop, gone)
        if first < last:
            read = partial(read_on_host, self.bulk, rows) if on_host else partial(self.bulk.read, rows, slice(None))
            parts.append(read(first - self.sinks, last - self.sinks))
        keys, values = self._view_recent(rows)
        parts.append((keys[:, :, recent], values[:, :, recent]))
        if on_host:
            parts = [(keys.cpu(), values.cpu()) for keys, values in parts]
        return tuple(torch.cat(each, dim=2) for each in zip(*parts, strict=True))

    def _flush(self, rows: slice, recent: Pair, *, exact: bool) -> Pair:
        """Return the window that rows alike keep of these recent tokens. Older ones go to the sinks until these are
        full, then to the bulk."""
        keys, values = recent
        older, gone = max(keys.shape[2] - self.window, 0), self.flushed[rows.start]
        missing = min(max(self.sinks - gone, 0), older)
        for near, new in zip((self.near_keys, self.near_values), recent, strict=True) if missing else ():
            near[rows, :, gone : gone + missing] = new[:, :, :missing]
        if older > missing:
            flushed = keys[:, :, missing:older], values[:, :, missing:older]
            # Their columns are overwritten while they are copied to the host. With `beside`, only records go there.
            if not exact and self.bulk.offloading and not self.bulk.beside:
                flushed = flushed[0].clone(), flushed[1].clone()
            self.bulk.append(rows, *flushed)
            if self.bulk.sketch is not None:
                self.bulk.sketch.append_from(self.bulk, rows, flushed)
            self.decoded |= not exact
            if self.moments is not None and (self.update_moments or exact):
                self._take_into_moments(rows, flushed[0])
        self.flushed[rows] = [gone + older] * len(self.flushed[rows])
        # Views, unless these overlap their new columns, or keep all of a row's new tokens until the last row is done.
        if len(self.flushed[rows]) == self.batch and (exact or 2 * older >= keys.shape[2]):
            return keys[:, :, older:], values[:, :, older:]
        return keys[:, :, older:].clone(), values[:, :, older:].clone()


def _grow(count: int, before: int, now: int) -> int:
    """The new value of `count`, a number of a row's oldest tokens, as the row grows from `before` to `now` tokens. It
    grows too if it counted all of them."""
    return now if count == before else count
