"""What the compute device knows of every token of a bulk: its key in few bits, and what values go with keys."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels.coding import Coder, choose_coder
from ..kernels.correlating import take_in
from ..kernels.cpu import quantizing
from ..kernels.reference import suspend_autocast
from ..key_moments.running import RunningMoments
from ..sketch import MIN_TOKENS, SEGMENT_TOKENS, Layout, codec, find_segment_start
from ..sketch.codec import CODES, TOKENS, Sketch, list_fields, view_span
from ..sketch.coded import find_query_weights
from . import transfers
from .versioned import Buffer, Versioned

if TYPE_CHECKING:
    from .bulk import Bulk

# Keys that are coded at once on a CPU: float32 copies of them, and of values, take a few MB. A device takes more, as it
# waits for launches.
CODED_AT_ONCE = 8192


class BulkSketch(Versioned):
    """Of one layer, for rows that have at least `MIN_TOKENS` in the bulk: what tokens are selected by.

    It follows from a row's tokens alone, however they came: each segment is coded by its own keys, and the last one
    again as it grows. So after a crop it is as if the rest had never been seen, unless few bits are all that is left
    of a segment that opens again (`reopened.py`).
    """

    tensors = Buffer[Sketch]()  # with room for at least as many tokens as the bulk holds
    energies = Buffer[Tensor | None]()
    codes_open = True  # whether the open segment is coded, too: something reads its codes

    def __init__(
        self, keys: Tensor, values: Tensor, layout: Layout, energies: Tensor | None, kernels: str = "auto"
    ) -> None:
        """Empty, for keys like `keys` `[batch, kv_heads, *, dim]` and `values` (`value_dim`); `energies`, float32
        `[kv_heads, dim]`, are of the model's queries, None if they are not known. `kernels`, one of `choice.KINDS`, may
        code its tokens."""
        batch, kv_heads, _, dim = keys.shape
        self.layout, self.kernels = layout, kernels
        self.lengths = [0] * batch  # tokens of each row that are in it: all of the bulk's, or none
        heads, value_dim, device = (batch, kv_heads), values.shape[3], keys.device
        self._query_weights: Tensor | None = None
        # Its own: those given are part of a tensor of all layers, which every copy would copy.
        self.energies = None if energies is None else energies.to(device, non_blocking=keys.is_cuda, copy=True)
        with torch.inference_mode(False):  # an inference tensor could not be written to outside inference mode
            self.mean_key = torch.zeros(*heads, dim, dtype=torch.float32, device=device)
            # Of the bulk's values and keys; the sketch's slopes round it.
            self.covariance = torch.zeros(*heads, value_dim, dim, dtype=torch.float32, device=device)
            fields = list_fields(dim, value_dim, layout.count, capacity=0).items()
            made = {name: torch.zeros(*heads, *shape, dtype=dtype, device=device) for name, (dtype, shape) in fields}
            self.tensors = Sketch(**made)
        self.dtype = keys.dtype
        self.find_coder()  # it is tried before tokens come, as the host waits for that

    def matches(self, layout: Layout, energies: Tensor | None) -> bool:
        """Whether it has this layout and these energies."""
        if self.energies is None or energies is None:
            return self.layout == layout and self.energies is energies
        return self.layout == layout and torch.equal(self.energies, energies.to(self.energies.device))

    @property
    def in_use(self) -> bool:
        """Whether tokens of any row are in it."""
        return any(self.lengths)

    @property
    def record_energies(self) -> Tensor | None:
        """What errors of records count, float32 `[kv_heads or 1, dim]`; None: all channels count alike."""
        return self.energies

    @property
    def query_weights(self) -> Tensor:
        """`m` of records, float32 `[kv_heads, dim]`, contiguous: made of `record_energies` when first needed."""
        if self._query_weights is None:
            kv_heads, dim = self.mean_key.shape[1:]
            weights = find_query_weights(self.record_energies, dim, self.mean_key.device)
            self._query_weights = weights.expand(kv_heads, -1).contiguous()
        return self._query_weights

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the device, unused capacity included."""
        kept = (*self.tensors.to_tensors().values(), self.mean_key, self.covariance, self.energies)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def find_coder(self) -> Coder | None:
        """What codes its tokens, if not torch."""
        value_dim, device = self.tensors.mean_value.shape[2], self.covariance.device
        return choose_coder(self.kernels, device, self.dtype, self.layout, value_dim, plain=self.energies is None)

    def code_keys(self, keys: Tensor) -> dict[str, Tensor]:
        """What `codec.quantize_segments` returns of `keys` `[rows, kv_heads, tokens, dim]`, on a CPU by C++."""
        energies = None if self.energies is None else self.energies.expand(*keys.shape[:2], -1)
        quantize_segments = (codec if self.kernels == "torch" else quantizing).quantize_segments
        return quantize_segments(keys, energies, self.layout)

    def append_from(self, bulk: "Bulk", rows: slice, newest: tuple[Tensor, Tensor] | None = None) -> None:
        """Append the bulk's tokens that rows of equal length lack. `newest` are its last keys and values `[rows,
        kv_heads, tokens, dim]`, which are not read from it then. Segments that close are the bulk's to code; those that
        it has coded stay as they are."""
        length, known = bulk.lengths[rows.start], self.lengths[rows.start]
        if length < MIN_TOKENS or length == known:
            return
        coded = bulk.stored[rows.start] if bulk.beside else 0
        bulk.placement.retry(partial(self._reserve, bulk), bulk.device)
        last = find_segment_start(length)
        # The open segment is coded again.
        first, older = (
            find_segment_start(known) if known else 0,
            length if newest is None else length - newest[0].shape[2],
        )
        most = CODED_AT_ONCE if self.mean_key.device.type == "cpu" else 8 * CODED_AT_ONCE
        step = max(1, most // (SEGMENT_TOKENS * self.mean_key.shape[1])) * SEGMENT_TOKENS
        # Of few tokens, whatever segments have them; of a prompt closed ones first, as those of a stored one are.
        few = max(1, step // SEGMENT_TOKENS // 4) * SEGMENT_TOKENS
        together = newest is not None and older <= known and length - known <= few
        for start, stop in [*((start, min(start + step, last)) for start in range(first, last, step)), (last, length)]:
            if newest is None or start < older:
                # Tokens on their way to the host are not brought back.
                there = stop if newest is None or bulk.beside or not bulk.offloaded else min(stop, older)
                keys, values = bulk.read(rows, slice(None), start, there)
                if newest is not None and there < stop:
                    added = (part[:, :, : stop - older] for part in newest)
                    keys, values = (torch.cat(pair, dim=2) for pair in zip((keys, values), added, strict=True))
            else:
                keys, values = (part[:, :, start - older : stop - older] for part in newest)
            if stop > coded:
                with suspend_autocast(keys.device):
                    made = self._code(rows, keys, start, stop) if stop <= last or self.codes_open else {}
                    (bulk.close if stop <= last else bulk.code_open)(rows, keys, values, made)
            new = max(0, known - start)
            if new < stop - start and not together:
                self._correlate(rows, keys[:, :, new:], values[:, :, new:], start + new)
        if newest is not None and together:
            keys, values = (part[:, :, known - older :] for part in newest)
            self._correlate(rows, keys, values, known)
        self._derive(rows, length)
        self.lengths[rows] = [length] * len(self.lengths[rows])

    def _code(self, rows: slice, keys: Tensor, start: int, stop: int) -> dict[str, Tensor]:
        """Take in what the rows' tokens `start..stop`, whole segments of the bulk, are coded as; views of it."""
        views = self._view_codes(rows, start, stop)
        if (coder := self.find_coder()) is not None:
            coder.code(self.tensors, rows, start // SEGMENT_TOKENS, keys, self.energies)
            return views
        for name, made in self.code_keys(keys).items():
            views[name].copy_(made)
        return views

    def _view_codes(self, rows: slice, start: int, stop: int) -> dict[str, Tensor]:
        """Views of what rows' tokens `start..stop`, whole segments of the bulk, are coded as."""
        kept = self.tensors.to_tensors()
        return {name: view_span(name, kept[name][rows], start, stop) for name in CODES}

    def truncate(self, bulk: "Bulk") -> None:
        """Forget what the bulk has forgotten."""
        for row, (known, length) in enumerate(zip(self.lengths, bulk.lengths, strict=True)):
            if known > length:  # taken anew rather than subtracted, which leaves errors that no later token heals
                self.lengths[row] = 0
                self.append_from(bulk, slice(row, row + 1))

    def find_segment(self, row: int, index: int) -> dict[str, Tensor] | None:
        """What the row's closed segment `index` is coded as, `[kv_heads, ...]` by name; None if it is open, or not
        there."""
        start, own = index * SEGMENT_TOKENS, slice(row, row + 1)
        if not self.lengths[row] or start >= find_segment_start(self.lengths[row]):
            return None
        return {name: held[0] for name, held in self._view_codes(own, start, start + SEGMENT_TOKENS).items()}

    def adopt(self, bulk: "Bulk", row: int, segments: Sequence[Mapping[str, Tensor]]) -> None:
        """Take over a row's first segments, as `find_segment` gives them, while it has none; `append_from` does the
        rest."""
        tokens, own = len(segments) * SEGMENT_TOKENS, slice(row, row + 1)
        bulk.placement.retry(partial(self._reserve, bulk), bulk.device)
        for index, segment in enumerate(segments):
            start = index * SEGMENT_TOKENS
            for name, held in self._view_codes(own, start, start + SEGMENT_TOKENS).items():
                held.copy_(segment[name][None])
        for first, end in bulk.cut_spans(row, heads=self.mean_key.shape[1]):
            if first < tokens:
                self._correlate(own, *bulk.read(own, slice(None), first, min(end, tokens)), first)
        self.lengths[row] = tokens

    def select_rows(self, index: list[int]) -> None:
        """Row `i` becomes the old row `index[i]`."""
        self.lengths = [self.lengths[row] for row in index]
        self._change(lambda tensor: tensor[index])

    def move(self, device: torch.device) -> None:
        """Serve another device."""
        self.energies = None if self.energies is None else self.energies.to(device)
        self._query_weights = None
        self._change(lambda tensor: tensor.to(device))

    @property
    def record(self) -> dict[str, Any]:
        """What a file keeps, by name."""
        kept, tokens = self.tensors.to_tensors(), max(map(self.count_coded, self.lengths))
        return {
            **self._view_codes(slice(None), 0, tokens),
            **{"mean_value": kept["mean_value"], "mean_key": self.mean_key, "value_key_covariance": self.covariance},
            **{"sketch_lengths": self.lengths, "query_energies": self.energies},
        }

    def restore(self, record: dict[str, Any], bulk: "Bulk") -> None:
        """The inverse of `record`, which may hold other things as well, for an empty one of `bulk`; ValueError, if it
        is not of this bulk, or not in these bits."""
        wanted = [length if length >= MIN_TOKENS else 0 for length in bulk.lengths]
        if record["sketch_lengths"] != wanted:
            raise ValueError(f"its sketch is of {record['sketch_lengths']} tokens, and should be of {wanted}")
        self.lengths = wanted
        if self.in_use:
            self._reserve(bulk)
        if bulk.beside and record["query_energies"] is None:
            raise ValueError("it lacks the query energies that its records lie behind")
        # The file's energies: others may be known now.
        self.energies = None if record["query_energies"] is None else torch.empty_like(self.mean_key[0])
        self._query_weights = None
        for name, part in self.record.items():
            if not isinstance(part, Tensor):
                continue
            if ((found := record[name]).shape, found.dtype) != (part.shape, part.dtype):
                raise ValueError(
                    f"its sketch of {wanted} tokens in {self.layout} has {name} {found.dtype} {list(found.shape)}"
                )
            part.copy_(found)
        for row, length in enumerate(wanted):
            if length:
                own, start = slice(row, row + 1), find_segment_start(length)
                if not codec.has_whole_order(self._view_codes(own, 0, self.count_coded(length))["order"]):
                    raise ValueError(f"row {row} of its sketch has an order that lacks channels")
                if bulk.beside and self.codes_open:  # no file keeps records of the open segment
                    made = self._view_codes(own, start, length)
                    with suspend_autocast(self.mean_key.device):
                        bulk.code_open(own, *bulk.read(own, slice(None), start, length), made)
                self._derive(own, length)

    def follow(self, moments: RunningMoments | None, value_dim: int, bulk: "Bulk") -> None:
        """Of latents, go by moments of the keys, and have other values: see `LatentSketch`."""

    def take_moments(self, rows: slice) -> None:
        """Of latents, moments of rows of equal length have changed."""

    def count_coded(self, length: int) -> int:
        """How many of a row's tokens are coded, of so many."""
        return length if self.codes_open else find_segment_start(length)

    def _derive(self, rows: slice, length: int) -> None:
        """What follows from the rest, for rows of equal length."""
        if (coder := self.find_coder()) is not None:
            coder.derive(self.tensors, rows, length, self.covariance)
            return
        kept = self.tensors.to_tensors()
        used = self._view_codes(rows, 0, length)
        for name, part in (self._find_slopes(rows) | codec.average_channels(used, self.layout, length)).items():
            kept[name][rows] = part

    def _find_slopes(self, rows: slice) -> dict[str, Tensor]:
        """What follows from the covariance of rows."""
        return codec.round_slopes(self.covariance[rows])

    def _correlate(self, rows: slice, keys: Tensor, values: Tensor, before: int) -> None:
        """Take tokens into the means and the covariance of `before` others."""
        with suspend_autocast(keys.device):
            means = self.tensors.mean_value[rows], self.mean_key[rows]
            take_in(before, means, self.covariance[rows], values, keys, self.kernels)

    @torch.inference_mode(False)  # the new tensors are written to later, perhaps outside inference mode
    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.tensors = self.tensors.map(change)
        self.mean_key, self.covariance = change(self.mean_key), change(self.covariance)

    @torch.inference_mode(False)  # as in __init__
    def _reserve(self, bulk: "Bulk") -> None:
        """Have room for as many tokens a row as the bulk has."""
        made, room = self.tensors.to_tensors(), self.tensors.scales.shape[2]
        capacity = bulk.capacity + (bulk.sketched_beside if self.codes_open else 0)
        if capacity <= room:
            return
        used = min(max(self.lengths), room)
        fields = list_fields(self.layout.dim, made["mean_value"].shape[2], self.layout.count, capacity)
        for name in CODES:
            old, shape = made[name], (*made[name].shape[:2], *fields[name][1])
            made[name] = transfers.make_empty(shape, old.dtype, old.device) if name in TOKENS else old.new_zeros(shape)
            if used:
                view_span(name, made[name], 0, used).copy_(view_span(name, old, 0, used))
        self.tensors = Sketch(**made)
