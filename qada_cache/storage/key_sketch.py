"""A copy of the bulk's keys in few bits, on the compute device: what tokens are chosen by."""

from typing import Any

import torch
from torch import Tensor

from ..kernels import sketch
from . import pages
from .bulk import Bulk


class KeySketch:
    """Codes of every key in the bulk of one layer, for rows that have at least `sketch.MIN_TOKENS` there.

    What a row's codes are follows from its tokens alone, however they came: the centre is the mean of the first ones.
    So after a crop they are as if the rest had never been seen.

    Attributes:
        bits: of a coded value.
        codes: uint8 `[batch, kv_heads, capacity, dim * bits / 8]`, as long as the bulk's buffers.
        scales: bfloat16 `[batch, kv_heads, capacity]`.
        centre: float32 `[batch, kv_heads, dim]`.
        lengths: tokens of each row that are coded: all in its bulk, or none.
    """

    def __init__(self, like: Tensor, bits: int) -> None:
        """Empty, for keys like `like` `[batch, kv_heads, *, dim]`."""
        batch, kv_heads, _, dim = like.shape
        self.bits, self.lengths = bits, [0] * batch
        with torch.inference_mode(False):  # an inference tensor could not be written to outside inference mode
            self.codes = _empty(like.device, (batch, kv_heads, 0, sketch.code_bytes(dim, bits)), torch.uint8)
            self.scales = _empty(like.device, (batch, kv_heads, 0), torch.bfloat16)
            self.centre = torch.zeros(batch, kv_heads, dim, device=like.device)

    @classmethod
    def of(cls, like: Tensor, bits: int | None) -> "KeySketch | None":
        """One for such keys; None if none is asked for, or codes would not fill whole bytes (then all is read)."""
        return None if bits is None or like.shape[3] * bits % 8 else cls(like, bits)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one head."""
        return self.codes.shape[3] + self.scales.element_size()

    def follow(self, bulk: Bulk, rows: slice, keys: Tensor | None = None) -> None:
        """Code what rows of equal length lack of the bulk; `keys` `[rows, kv_heads, tokens, dim]` are its newest."""
        length, known = bulk.lengths[rows.start], self.lengths[rows.start]
        if length < sketch.MIN_TOKENS or length == known:
            return
        self._reserve(bulk.capacity)
        if keys is not None and keys.shape[2] < length - known:
            keys = None
        if not known:
            first = bulk.read(rows, slice(None), 0, sketch.MIN_TOKENS)[0] if keys is None else keys
            self.centre[rows] = first[:, :, : sketch.MIN_TOKENS].float().mean(dim=2)
        for span in bulk.spans(rows.start, known, heads=self.codes.shape[1]):
            if keys is None:
                block = bulk.read(rows, slice(None), *span)[0]
            else:
                older = length - keys.shape[2]  # than the first of `keys`
                block = keys[:, :, span[0] - older : span[1] - older]
            at = rows, slice(None), slice(*span)
            self.codes[at], self.scales[at] = sketch.encode(block, self.centre[rows], self.bits)
        self.lengths[rows] = [length] * len(self.lengths[rows])

    def truncate(self, lengths: list[int]) -> None:
        """Row `r` keeps its first `lengths[r]` tokens."""
        kept = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]
        self.lengths = [length if length >= sketch.MIN_TOKENS else 0 for length in kept]

    def select(self, index: list[int]) -> None:
        """Row `i` becomes the old row `index[i]`."""
        self.lengths = [self.lengths[row] for row in index]
        self.codes, self.scales, self.centre = self.codes[index], self.scales[index], self.centre[index]

    def move(self, device: torch.device) -> None:
        """Serve keys on another device."""
        self.codes, self.scales = self.codes.to(device), self.scales.to(device)
        self.centre = self.centre.to(device)

    @property
    def record(self) -> dict[str, Any]:
        """What a file keeps, by name."""
        used = slice(0, max(self.lengths))
        kept = {"codes": self.codes[:, :, used], "scales": self.scales[:, :, used], "centre": self.centre}
        return kept | {"sketched": self.lengths}

    def restore(self, record: dict[str, Any]) -> None:
        """The inverse of `record`, which may hold other things as well, for an empty sketch."""
        self.lengths = record["sketched"]
        self._reserve(record["codes"].shape[2])
        for name, new in (("codes", self.codes), ("scales", self.scales)):
            new[:, :, : max(self.lengths)] = record[name]
        self.centre.copy_(record["centre"])

    @torch.inference_mode(False)  # as in __init__
    def _reserve(self, capacity: int) -> None:
        """Have room for so many tokens a row, as the bulk has."""
        if capacity <= self.codes.shape[2]:
            return
        used = min(max(self.lengths), self.codes.shape[2])
        for name in ("codes", "scales"):
            old = getattr(self, name)
            new = _empty(old.device, (*old.shape[:2], capacity, *old.shape[3:]), old.dtype)
            new[:, :, :used] = old[:, :, :used]
            setattr(self, name, new)


def _empty(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return pages.empty(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)
