"""Codes that tokens of a closed segment keep when a crop opens it again."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..sketch import SEGMENT_TOKENS, Layout
from ..sketch.codec import CODES, SEGMENTS, TOKENS, average_squares, has_whole_order, list_fields, quantize
from ..sketch.coded import RecordLayout, estimate_keys, find_query_weights
from .bulk_sketch import BulkSketch


@dataclass(frozen=True, eq=False)
class ReopenedSegment:
    """The fit of a row's segment, and codes and records of its first tokens, which a crop has left.

    These tokens keep their codes when the segment closes again. Other tokens are coded under the same fit. If they do
    not fit it, the whole segment is coded anew, once for good. Its tensors are never written: copies of a cache share
    them."""

    sketch: Mapping[str, Tensor]  # `CODES`, `[kv_heads, ...]`
    records: Tensor  # uint8 `[kv_heads, tokens, size]`
    recoded: bool  # whether some of these tokens have been coded twice, and must not be coded again

    @property
    def tokens(self) -> int:
        """Tokens whose codes it has."""
        return self.records.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(tensor.nbytes for tensor in (*self.sketch.values(), self.records))

    def copy(self, device: torch.device, tokens: int = SEGMENT_TOKENS) -> "ReopenedSegment":
        """A copy on `device` of its first tokens, at most `tokens`."""
        sketch = {name: part[..., :tokens] if name in TOKENS else part for name, part in self.sketch.items()}
        sketch = {name: part.to(device, copy=True) for name, part in sketch.items()}
        return ReopenedSegment(sketch, self.records[:, :tokens].to(device, copy=True), self.recoded)

    def put_sketch(
        self, index: int, keys: Tensor, energies: Tensor | None, layout: Layout, made: Mapping[str, Tensor]
    ) -> bool:
        """Code segment `index` of `keys` `[kv_heads, tokens, dim]`, whose last segment has all tokens that remain.
        `made` are a sketch's tensors of all these segments, `[kv_heads, ...]`. They are written if the segment's tokens
        fit. Returns whether they do, for which the host waits."""
        start, last = index * SEGMENT_TOKENS, index + 1 == made["units"].shape[1]
        span = slice(start, None if last else start + SEGMENT_TOKENS)
        own = keys[:, span]
        found = quantize(own[:, self.tokens :], energies, layout, self.sketch)  # other tokens
        if not (self.recoded or self._fits(own, energies, layout, found)):
            return False
        for name, part in found.items():
            if name in TOKENS:
                known = self.sketch[name][..., : own.shape[1]]
                made[name][..., span] = torch.cat([known, part], dim=-1)
            else:
                made[name][:, index] = part
        made["mean_squares"][:, index] = average_squares(made["scales"][:, span], found["units"])
        return True

    def _fits(self, keys: Tensor, energies: Tensor | None, layout: Layout, made: Mapping[str, Tensor]) -> bool:
        """Whether other tokens of the segment's `keys`, coded as `made` under the fit, have small errors. The sum of
        their weighted squares may exceed what the fit expects of these tokens by as much as it expects of all tokens of
        the segment."""
        weights = find_query_weights(energies, layout.dim, keys.device)
        of_segment = {name: part if name in TOKENS else part.unsqueeze(1) for name, part in made.items()}
        off = (keys[:, self.tokens :].float() - estimate_keys(of_segment, layout)) * weights.unsqueeze(-2)
        order, fit = self.sketch["order"].long(), self.sketch["weights"].float()
        noise = layout.find_errors(keys.device) * (weights.expand_as(fit).gather(-1, order) / fit).square()
        left = noise.sum(dim=-1) * self.sketch["mean_squares"]  # the squared error that the fit expects of a token
        return bool((off.square().sum(dim=(-2, -1)) <= left * (off.shape[1] + keys.shape[1])).all())

    def put_records(self, index: int, records: Tensor) -> None:
        """Write its tokens' records to their place in `records` `[kv_heads, tokens, stride]`, which are of the same
        tokens as the `keys` of `put_sketch`."""
        place = records[:, index * SEGMENT_TOKENS :][:, : self.tokens]
        place[..., : self.records.shape[2]] = self.records[:, : place.shape[1]]

    @property
    def record(self) -> dict[str, Any]:
        """Tensors and flags that a file keeps, by name."""
        return {**self.sketch, "records": self.records, "recoded": self.recoded}


def cut_segments(segments: Iterable[ReopenedSegment], tokens: int) -> tuple[ReopenedSegment, ...]:
    """The first `tokens` tokens of segments that follow each other, or all of them."""
    left = []
    for index, segment in enumerate(segments):
        if (kept := min(tokens - index * SEGMENT_TOKENS, segment.tokens)) > 0:
            left.append(segment if kept == segment.tokens else segment.copy(segment.records.device, kept))
    return tuple(left)


def restore_segments(
    records: list[list[dict[str, Any]]], rooms: list[int], sketch: BulkSketch, layout: RecordLayout
) -> list[tuple[ReopenedSegment, ...]]:
    """Each row's segments, restored from `records` (`ReopenedSegment.record`) for a bulk with this sketch and layout.
    Row `r` has `rooms[r]` tokens after its closed segments. ValueError, if its segments do not fit that."""
    found = []
    for row, room in zip(records, rooms, strict=True):
        segments = tuple(_restore(record, sketch, layout) for record in row)
        tokens = [segment.tokens for segment in segments]
        whole = all(0 < count <= SEGMENT_TOKENS for count in tokens) and set(tokens[:-1]) <= {SEGMENT_TOKENS}
        if not whole or sum(tokens) > room:
            raise ValueError(f"it has reopened segments of {tokens} tokens, where {room} tokens follow closed ones")
        found.append(segments)
    return found


def _restore(record: Mapping[str, Any], sketch: BulkSketch, layout: RecordLayout) -> ReopenedSegment:
    kv_heads, tokens = sketch.mean_key.shape[1], math.prod(record["scales"].shape[1:])
    fields = list_fields(layout.dim, layout.value_dim, sketch.layout.count, tokens).items()
    wanted = {name: field for name, field in fields if name in TOKENS}
    wanted |= {name: (dtype, shape[1:]) for name, (dtype, shape) in fields if name in SEGMENTS}
    for name, (dtype, shape) in {**wanted, "records": (torch.uint8, (tokens, layout.size))}.items():
        if ((found := record[name]).dtype, found.shape) != (dtype, (kv_heads, *shape)):
            raise ValueError(f"its reopened segment of {tokens} tokens has {name} {found.dtype} {list(found.shape)}")
    if not has_whole_order(record["order"]):
        raise ValueError("its reopened segment has an order that lacks channels")
    held = {name: record[name] for name in CODES}
    return ReopenedSegment(held, record["records"], bool(record["recoded"]))
