"""What the compute device knows of every token of a bulk: its key in few bits, and the mean of all values."""

from typing import Any

import torch
from torch import Tensor

from ..kernels import sketch
from ..kernels.autocast import without_autocast
from . import pages
from .bulk import Bulk


class BulkSketch:
    """Of one layer, for rows that have at least `sketch.MIN_TOKENS` in the bulk: what tokens are chosen by.

    What is known of a row follows from its tokens alone, however they came: keys are coded around the mean of the first
    ones. So after a crop it is as if the rest had never been seen.

    Attributes:
        bits: of a coded value.
        codes: uint8 `[batch, kv_heads, capacity, dim * bits / 8]`, at least as long as the bulk.
        scales: bfloat16 `[batch, kv_heads, capacity]`.
        centre: float32 `[batch, kv_heads, dim]`.
        mean_square: float32 `[batch, kv_heads]`, of the scales.
        mean_value: float32 `[batch, kv_heads, value_dim]`.
        lengths: tokens of each row that are in it: all of the bulk's, or none.
    """

    def __init__(self, keys: Tensor, values: Tensor, bits: int) -> None:
        """Empty, for keys like `keys` `[batch, kv_heads, *, dim]` and `values` (`value_dim`)."""
        batch, kv_heads, _, dim = keys.shape
        self.bits, self.lengths = bits, [0] * batch
        with torch.inference_mode(False):  # an inference tensor could not be written to outside inference mode
            self.codes = _empty(keys.device, (batch, kv_heads, 0, sketch.code_bytes(dim, bits)), torch.uint8)
            self.scales = _empty(keys.device, (batch, kv_heads, 0), torch.bfloat16)
            kept: dict[str, Any] = {"dtype": torch.float32, "device": keys.device}
            self.centre = torch.zeros(batch, kv_heads, dim, **kept)
            self.mean_square = torch.zeros(batch, kv_heads, **kept)
            self.mean_value = torch.zeros(batch, kv_heads, values.shape[3], **kept)

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, bits: int | None) -> "BulkSketch | None":
        """One for such tokens; None if none is asked for, or codes would not fill whole bytes (then all is read)."""
        return None if bits is None or keys.shape[3] * bits % 8 else cls(keys, values, bits)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head."""
        return self.codes.shape[3] + self.scales.element_size()

    @property
    def in_use(self) -> bool:
        """Whether tokens of any row are in it."""
        return any(self.lengths)

    def follow(self, bulk: Bulk, rows: slice, newest: tuple[Tensor, Tensor] | None = None) -> None:
        """Take in what rows of equal length lack of the bulk.

        `newest` are keys and values that were appended to it last `[rows, kv_heads, tokens, dim]`: if they are all that
        is lacking, nothing is read.
        """
        length, known = bulk.lengths[rows.start], self.lengths[rows.start]
        if length < sketch.MIN_TOKENS or length == known:
            return
        self._reserve(bulk.capacity)
        older = length if newest is None else length - newest[0].shape[2]

        def read(start: int, stop: int) -> tuple[Tensor, Tensor]:
            if newest is None or start < older:
                return bulk.read(rows, slice(None), start, stop)
            keys, values = (part[:, :, start - older : stop - older] for part in newest)
            return keys, values

        if not known:
            first = min(sketch.CENTRE_TOKENS, sketch.MIN_TOKENS)
            self.centre[rows] = read(0, first)[0].float().mean(dim=2)
            self.mean_value[rows] = 0.0
        for start, stop in bulk.spans(rows.start, known, heads=self.codes.shape[1]):
            keys, values = read(start, stop)
            at = rows, slice(None), slice(start, stop)
            with without_autocast(keys.device):
                self.codes[at], self.scales[at] = sketch.encode(keys, self.centre[rows], self.bits)
            self._average(rows, values, stop)
        self.lengths[rows] = [length] * len(self.lengths[rows])
        self._measure(rows)

    def truncate(self, bulk: Bulk) -> None:
        """Forget what the bulk has forgotten."""
        for row, (known, length) in enumerate(zip(self.lengths, bulk.lengths, strict=True)):
            if known > length:
                self.lengths[row] = length if length >= sketch.MIN_TOKENS else 0
                rows, count = slice(row, row + 1), 0
                self.mean_value[rows] = 0.0
                for _, values in bulk.blocks(rows) if self.lengths[row] else ():
                    count += values.shape[2]
                    self._average(rows, values, count)
                self._measure(rows)

    def select(self, index: list[int]) -> None:
        """Row `i` becomes the old row `index[i]`."""
        self.lengths = [self.lengths[row] for row in index]
        self.codes, self.scales = self.codes[index], self.scales[index]
        self.centre, self.mean_value = self.centre[index], self.mean_value[index]
        self.mean_square = self.mean_square[index]

    def move(self, device: torch.device) -> None:
        """Serve another device."""
        self.codes, self.scales = self.codes.to(device), self.scales.to(device)
        self.centre, self.mean_value = self.centre.to(device), self.mean_value.to(device)
        self.mean_square = self.mean_square.to(device)

    @property
    def record(self) -> dict[str, Any]:
        """What a file keeps, by name."""
        used = slice(0, max(self.lengths))
        kept = {"codes": self.codes[:, :, used], "scales": self.scales[:, :, used]}
        return kept | {"centre": self.centre, "mean_value": self.mean_value, "sketched": self.lengths}

    def restore(self, record: dict[str, Any], bulk: Bulk) -> None:
        """The inverse of `record`, which may hold other things as well, for an empty one of `bulk`.

        Raises:
            ValueError: it is not of this bulk, or not in these bits.
        """
        wanted = [length if length >= sketch.MIN_TOKENS else 0 for length in bulk.lengths]
        for name, empty in self.record.items():
            if isinstance(empty, Tensor):  # where an empty one has no tokens, this one has those of the longest row
                fits = [size or max(wanted) for size in empty.shape] == list(record[name].shape)
                if not fits or record[name].dtype != empty.dtype:
                    found = f"{record[name].dtype} {list(record[name].shape)}"
                    raise ValueError(f"its sketch of {wanted} tokens in {self.bits} bits has {name} {found}")
        if record["sketched"] != wanted:
            raise ValueError(f"its sketch is of {record['sketched']} tokens, and should be of {wanted}")
        self.lengths = wanted
        if self.in_use:
            self._reserve(bulk.capacity)
        used = slice(0, max(self.lengths))
        self.codes[:, :, used], self.scales[:, :, used] = record["codes"], record["scales"]
        self.centre.copy_(record["centre"])
        self.mean_value.copy_(record["mean_value"])
        for row in range(len(self.lengths)):
            self._measure(slice(row, row + 1))

    def _measure(self, rows: slice) -> None:
        """Find the mean squared scale of rows of equal length, as if all of them had come at once."""
        scales = self.scales[rows, :, : self.lengths[rows.start]].float()
        self.mean_square[rows] = scales.square().sum(dim=2) / max(1, scales.shape[2])

    def _average(self, rows: slice, values: Tensor, count: int) -> None:
        """Take values `[rows, kv_heads, tokens, value_dim]` into the mean, which is of `count` with them."""
        new = values.float().mean(dim=2) - self.mean_value[rows]
        self.mean_value[rows] += new * (values.shape[2] / count)

    @torch.inference_mode(False)  # as in __init__
    def _reserve(self, capacity: int) -> None:
        """Have room for so many tokens a row, as the bulk has."""
        if capacity <= self.codes.shape[2]:
            return
        used = slice(0, min(max(self.lengths), self.codes.shape[2]))
        for name in ("codes", "scales"):
            old = getattr(self, name)
            new = _empty(old.device, (*old.shape[:2], capacity, *old.shape[3:]), old.dtype)
            new[:, :, used] = old[:, :, used]
            setattr(self, name, new)


def _empty(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return pages.empty(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)
