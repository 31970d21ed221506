"""The sketch of a bulk on the compute device: each token's key in few bits, and the covariance of values and keys."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels.coding import Coder, choose_coder
from ..kernels.correlating import take_in
from ..kernels.cpu import quantizing
from ..kernels.reference import suspend_autocast
from ..key_moments.running import Pair, RunningMoments
from ..selected_rows import SelectedRows
from ..sketch import MIN_TOKENS, SEGMENT_TOKENS, Layout, codec, find_segment_start
from ..sketch.codec import CODES, TOKENS, Codes, Sketch, list_fields, view_span
from ..sketch.coded import OLDER_MIN_ENERGY, find_query_weights, read_energies
from . import transfers
from .versioned import Buffer, Versioned

if TYPE_CHECKING:
    from .bulk import Bulk

# Keys that are coded at once on a CPU: float32 copies of them, and of values, take a few MB. A device takes more, as it
# waits for launches.
CODED_AT_ONCE = 8192


class BulkSketch(Versioned):
    """The sketch of one layer's bulk, by which tokens are selected. Rows with fewer than `MIN_TOKENS` in the bulk have
    none.

    It follows from a row's tokens alone, in whatever calls they came: each segment is coded by its own keys, and the
    open one again as it grows. So a crop leaves the sketch of the remaining tokens. The exception is a segment that
    opens again, and of which only few bits are left (`reopened.py`).
    """

    tensors = Buffer[Sketch]()  # capacity: at least the bulk's tokens
    energies = Buffer[Tensor | None]()
    codes_open = True  # whether the open segment is coded, too, because something reads its codes

    def __init__(
        self, keys: Tensor, values: Tensor, layout: Layout, energies: Tensor | None, kernels: str = "auto"
    ) -> None:
        """An empty sketch for keys like `keys` `[batch, kv_heads, *, dim]` and `values` (`value_dim`). `energies`
        float32 `[kv_heads, dim]` are the query energies, None without any. `kernels` is one of `choice.KINDS`; they may
        code tokens."""
        batch, kv_heads, _, dim = keys.shape
        self.layout, self.kernels, self.dtype = layout, kernels, keys.dtype
        self.lengths = [0] * batch  # sketched tokens of each row: all of its bulk, or 0
        heads, value_dim, device = (batch, kv_heads), values.shape[3], keys.device
        self._query_weights: Tensor | None = None
        # A copy: the argument is a view of a tensor of all layers, and each copy of a cache would copy all of it.
        self.energies = None if energies is None else energies.to(device, non_blocking=keys.is_cuda, copy=True)
        with torch.inference_mode(False):  # an inference tensor could not be written to outside inference mode
            self.mean_key = torch.zeros(*heads, dim, dtype=torch.float32, device=device)
            # Of the bulk's values and keys; the sketch has it rounded, as `slopes`.
            self.covariance = torch.zeros(*heads, value_dim, dim, dtype=torch.float32, device=device)
            fields = list_fields(dim, value_dim, layout.count, capacity=0).items()
            empty = {name: torch.zeros(*heads, *shape, dtype=dtype, device=device) for name, (dtype, shape) in fields}
            self.tensors = Sketch(**empty)
        self.find_coder()  # a new kernel is tried now, while there are no tokens: the host waits for it

    def matches(self, layout: Layout, energies: Tensor | None) -> bool:
        """Whether the sketch has this layout and these energies."""
        if self.energies is None or energies is None:
            return self.layout == layout and self.energies is energies
        return self.layout == layout and torch.equal(self.energies, energies.to(self.energies.device))

    @property
    def in_use(self) -> bool:
        """Whether any row has sketched tokens."""
        return any(self.lengths)

    @property
    def record_energies(self) -> Tensor | None:
        """Weights of channels in the error of a record's key, float32 `[kv_heads or 1, dim]`; None: all are equal."""
        return self.energies

    @property
    def query_weights(self) -> Tensor:
        """`m` of `sketch/coded.py`, float32 `[kv_heads, dim]`, contiguous; computed from `record_energies` once."""
        if self._query_weights is None:
            kv_heads, dim = self.mean_key.shape[1:]
            weights = find_query_weights(self.record_energies, dim, self.mean_key.device)
            self._query_weights = weights.expand(kv_heads, -1).contiguous()
        return self._query_weights

    @property
    def nbytes(self) -> int:
        """Bytes on the device, unused capacity included."""
        tensors = (*self.tensors.to_tensors().values(), self.mean_key, self.covariance, self.energies)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def find_coder(self) -> Coder | None:
        """The kernel that codes tokens; None: torch does."""
        value_dim, device = self.tensors.mean_value.shape[2], self.covariance.device
        return choose_coder(self.kernels, device, self.dtype, self.layout, value_dim, plain=self.energies is None)

    def code_keys(self, keys: Tensor) -> dict[str, Tensor]:
        """`codec.quantize_segments` of `keys` `[rows, kv_heads, tokens, dim]`; on CPUs its C++ kernel."""
        energies = None if self.energies is None else self.energies.expand(*keys.shape[:2], -1)
        quantize_segments = (codec if self.kernels == "torch" else quantizing).quantize_segments
        return quantize_segments(keys, energies, self.layout)

    def append_from(self, bulk: "Bulk", rows: slice, newest: Pair | None = None, *, coded: int = 0) -> None:
        """Append the bulk's tokens that are not in the sketch yet; `rows` have equal length. `newest` are the bulk's
        last keys and values `[rows, kv_heads, tokens, dim]`; they are then not read from the bulk. `bulk.close` gets
        each segment that closes, unless the bulk has coded it already. The first `coded` tokens have their codes."""
        length, sketched = bulk.lengths[rows.start], self.lengths[rows.start]
        if length < MIN_TOKENS or length == sketched:
            return
        coded = bulk.stored[rows.start] if bulk.beside else coded
        self._reserve(bulk)
        last = find_segment_start(length)
        first = find_segment_start(sketched) if sketched else 0  # the open segment is coded again
        older = length if newest is None else length - newest[0].shape[2]
        most = CODED_AT_ONCE if self.mean_key.device.type == "cpu" else 8 * CODED_AT_ONCE
        step = max(1, most // (SEGMENT_TOKENS * self.mean_key.shape[1])) * SEGMENT_TOKENS
        # Few new tokens enter the covariance at once. A prompt's do so block by block, closed segments first, in the
        # order in which those of a stored prompt do.
        few = max(1, step // SEGMENT_TOKENS // 4) * SEGMENT_TOKENS
        together = newest is not None and older <= sketched and length - sketched <= few
        for start, stop in [*((start, min(start + step, last)) for start in range(first, last, step)), (last, length)]:
            if newest is None or start < older:
                # Tokens on their way to the host are not brought back.
                read_stop = stop if newest is None or bulk.beside or not bulk.offloaded else min(stop, older)
                keys, values = bulk.read(rows, slice(None), start, read_stop)
                if newest is not None and read_stop < stop:
                    added = (part[:, :, : stop - older] for part in newest)
                    keys, values = (torch.cat(pair, dim=2) for pair in zip((keys, values), added, strict=True))
            else:
                keys, values = (part[:, :, start - older : stop - older] for part in newest)
            if stop > coded:
                with suspend_autocast(keys.device):
                    codes: Any = self._code(rows, keys, start, stop) if stop <= last or self.codes_open else None
                    (bulk.close if stop <= last else bulk.code_open)(rows, keys, values, codes)
            new = max(0, sketched - start)
            if new < stop - start and not together:
                self._correlate(rows, keys[:, :, new:], values[:, :, new:], start + new)
        if newest is not None and together:
            keys, values = (part[:, :, sketched - older :] for part in newest)
            self._correlate(rows, keys, values, sketched)
        self._derive(rows, length)
        self.lengths[rows] = [length] * len(self.lengths[rows])

    def _code(self, rows: slice, keys: Tensor, start: int, stop: int) -> Codes:
        """Code the rows' tokens `start..stop`, whole segments of the bulk."""
        if (coder := self.find_coder()) is not None:
            coder.code(self.tensors, rows, start // SEGMENT_TOKENS, keys, self.energies)
        else:
            views = self._view_codes(rows, start, stop)
            for name, codes in self.code_keys(keys).items():
                views[name].copy_(codes)
        return partial(self._view_codes, rows, start, stop)

    def _view_codes(self, rows: slice, start: int, stop: int) -> dict[str, Tensor]:
        """Views of the `CODES` of rows' tokens `start..stop`, whole segments of the bulk, by name."""
        tensors = self.tensors.to_tensors()
        return {name: view_span(name, tensors[name][rows], start, stop) for name in CODES}

    def truncate(self, bulk: "Bulk") -> None:
        """Drop the tokens that a crop dropped from the bulk."""
        for row, (sketched, length) in enumerate(zip(self.lengths, bulk.lengths, strict=True)):
            if sketched > length:  # means are computed anew: to subtract would leave rounding errors for good
                self.lengths[row] = 0
                self.append_from(bulk, slice(row, row + 1), coded=find_segment_start(length))

    def find_segment(self, row: int, index: int) -> dict[str, Tensor] | None:
        """The `CODES` of the row's closed segment `index`, `[kv_heads, ...]` by name; None if the segment is open or
        does not exist."""
        start, rows = index * SEGMENT_TOKENS, slice(row, row + 1)
        if not self.lengths[row] or start >= find_segment_start(self.lengths[row]):
            return None
        return {name: view[0] for name, view in self._view_codes(rows, start, start + SEGMENT_TOKENS).items()}

    def adopt(self, bulk: "Bulk", row: int, segments: Sequence[Mapping[str, Tensor]]) -> None:
        """Copy a row's first segments, as `find_segment` returns them, into a row without sketched tokens.
        `append_from` appends the others."""
        tokens, rows = len(segments) * SEGMENT_TOKENS, slice(row, row + 1)
        self._reserve(bulk)
        for index, segment in enumerate(segments):
            start = index * SEGMENT_TOKENS
            for name, view in self._view_codes(rows, start, start + SEGMENT_TOKENS).items():
                view.copy_(segment[name][None])
        for first, end in bulk.cut_spans(row, heads=self.mean_key.shape[1]):
            if first < tokens:
                self._correlate(rows, *bulk.read(rows, slice(None), first, min(end, tokens)), first)
        self.lengths[row] = tokens

    def select_rows(self, index: SelectedRows) -> None:
        """Row `i` becomes the old row `index[i]`."""
        self.lengths = [self.lengths[row] for row in index]
        self._change(index.apply)

    def move(self, device: torch.device) -> None:
        """Move to another device."""
        self.energies = None if self.energies is None else self.energies.to(device)
        self._query_weights = None
        self._change(lambda tensor: tensor.to(device))

    @property
    def record(self) -> dict[str, Any]:
        """The fields of a file, by name."""
        tensors, tokens = self.tensors.to_tensors(), max(map(self.count_coded, self.lengths), default=0)
        return {
            **self._view_codes(slice(None), 0, tokens),
            **{"mean_value": tensors["mean_value"], "mean_key": self.mean_key, "value_key_covariance": self.covariance},
            **{"sketch_lengths": self.lengths, "query_energies": self.energies, "min_energy": codec.MIN_ENERGY},
        }

    def restore(self, record: dict[str, Any], bulk: "Bulk") -> None:
        """The inverse of `record`, for an empty sketch of `bulk`; `record` may have more fields. ValueError, if it is
        another bulk's, or has another layout."""
        wanted = [length if length >= MIN_TOKENS else 0 for length in bulk.lengths]
        if record["sketch_lengths"] != wanted:
            raise ValueError(f"its sketch is of {record['sketch_lengths']} tokens, and should be of {wanted}")
        self.lengths = wanted
        if self.in_use:
            self._reserve(bulk)
        if bulk.beside and record["query_energies"] is None:
            raise ValueError("it lacks the query energies that its records lie behind")
        # The file's energies: key moments may have others by now.
        self.energies = None if record["query_energies"] is None else self.mean_key.new_empty(self.mean_key.shape[1:])
        self._query_weights = None
        for name, part in self.record.items():
            if not isinstance(part, Tensor):
                continue
            if ((saved := record[name]).shape, saved.dtype) != (part.shape, part.dtype):
                raise ValueError(
                    f"its sketch of {wanted} tokens in {self.layout} has {name} {saved.dtype} {list(saved.shape)}"
                )
            weighs = bulk.beside and name in ("query_energies", "error_energies")  # errors of its records
            part.copy_(read_energies(saved, record.get("min_energy", OLDER_MIN_ENERGY)) if weighs else saved)
        for row, length in enumerate(wanted):
            if length:
                rows, start = slice(row, row + 1), find_segment_start(length)
                if not codec.has_whole_order(self._view_codes(rows, 0, self.count_coded(length))["order"]):
                    raise ValueError(f"row {row} of its sketch has an order that lacks channels")
                if bulk.beside and self.codes_open:  # no file has records of the open segment
                    codes = partial(self._view_codes, rows, start, length)
                    with suspend_autocast(self.mean_key.device):
                        bulk.code_open(rows, *bulk.read(rows, slice(None), start, length), codes)
                self._derive(rows, length)

    def follow(self, moments: RunningMoments | None, value_dim: int, bulk: "Bulk") -> None:
        """Nothing to do here; `LatentSketch` overrides it."""

    def take_moments(self, rows: slice) -> None:
        """Nothing to do here; `LatentSketch` overrides it."""

    def count_coded(self, length: int) -> int:
        """Coded tokens of a row with `length` sketched tokens."""
        return length if self.codes_open else find_segment_start(length)

    def _derive(self, rows: slice, length: int) -> None:
        """Compute `noise`, `variances` and `slopes` of rows of equal length anew."""
        if (coder := self.find_coder()) is not None:
            coder.derive(self.tensors, rows, length, self.covariance)
            return
        codes = self._view_codes(rows, 0, length)
        for name, part in (self._find_slopes(rows) | codec.average_channels(codes, self.layout, length)).items():
            self.tensors.to_tensors()[name][rows] = part

    def _find_slopes(self, rows: slice) -> dict[str, Tensor]:
        """`slopes` and `slope_units` of rows."""
        return codec.round_slopes(self.covariance[rows])

    def _correlate(self, rows: slice, keys: Tensor, values: Tensor, before: int) -> None:
        """Update the means and the covariance, of `before` tokens so far, with new tokens."""
        with suspend_autocast(keys.device):
            means = self.tensors.mean_value[rows], self.mean_key[rows]
            take_in(before, means, self.covariance[rows], values, keys, self.kernels)

    @torch.inference_mode(False)  # the new tensors are written to later, perhaps outside inference mode
    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        tensors = self.tensors.map(change)
        self.tensors = self.tensors if tensors.codes is self.tensors.codes else tensors  # or written in place
        self.mean_key, self.covariance = change(self.mean_key), change(self.covariance)

    def _reserve(self, bulk: "Bulk") -> None:
        """Make room for as many tokens a row as the bulk has room for."""
        capacity = bulk.capacity + (bulk.sketched_beside if self.codes_open else 0)
        if capacity > self.tensors.scales.shape[2]:
            bulk.placement.retry(partial(self._grow, capacity), bulk.device)

    @torch.inference_mode(False)  # as in __init__
    def _grow(self, capacity: int) -> None:
        tensors, room = self.tensors.to_tensors(), self.tensors.scales.shape[2]
        used = min(max(self.lengths), room)
        fields = list_fields(self.layout.dim, tensors["mean_value"].shape[2], self.layout.count, capacity)
        for name in CODES:
            old, shape = tensors[name], (*tensors[name].shape[:2], *fields[name][1])
            new = transfers.make_empty(shape, old.dtype, old.device) if name in TOKENS else old.new_zeros(shape)
            if used:
                view_span(name, new, 0, used).copy_(view_span(name, old, 0, used))
            tensors[name] = new
        self.tensors = Sketch(**tensors)
