"""What a closed segment was coded as, kept when a crop opens it again."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sketch import SEGMENT_TOKENS, Layout
from ..sketch.codec import FIT, average_squares, has_whole_order, list_fields, quantize
from ..sketch.coded import RecordLayout
from .bulk_sketch import TOKENS, BulkSketch

KEPT = (*TOKENS, *FIT)  # of a sketch's tensors


@dataclass(frozen=True, eq=False)
class ReopenedSegment:
    """Of a row's segment the fit, and of its first tokens, those that a crop has left, codes and records. They are not
    coded again, however often it opens and closes; other tokens are coded under the same fit. Its tensors are never
    written: copies of a cache share them."""

    sketch: Mapping[str, Tensor]  # `KEPT`, `[kv_heads, ...]`
    records: Tensor  # uint8 `[kv_heads, tokens, size]`

    @property
    def tokens(self) -> int:
        """Tokens whose codes it has."""
        return self.records.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(tensor.nbytes for tensor in self.record.values())

    def copy(self, device: torch.device, tokens: int = SEGMENT_TOKENS) -> "ReopenedSegment":
        """Of its first tokens, at most so many."""
        sketch = {name: part[..., :tokens] if name in TOKENS else part for name, part in self.sketch.items()}
        sketch = {name: part.to(device, copy=True) for name, part in sketch.items()}
        return ReopenedSegment(sketch, self.records[:, :tokens].to(device, copy=True))

    def put_sketch(
        self, index: int, keys: Tensor, energies: Tensor | None, layout: Layout, made: Mapping[str, Tensor]
    ) -> None:
        """Code the segment number `index` of `keys` `[kv_heads, tokens, dim]`, whole segments and the last one's rest.
        `made` are a sketch's tensors of all of these segments, `[kv_heads, ...]`, which are written."""
        start, last = index * SEGMENT_TOKENS, index + 1 == made["units"].shape[1]
        span = slice(start, None if last else start + SEGMENT_TOKENS)
        own = keys[:, span]
        found = quantize(own[:, self.tokens :], energies, layout, self.sketch)  # other tokens
        for name, part in found.items():
            if name in TOKENS:
                known = self.sketch[name][..., : own.shape[1]]
                made[name][..., span] = torch.cat([known, part], dim=-1)
            else:
                made[name][:, index] = part
        made["mean_squares"][:, index] = average_squares(made["scales"][:, span], found["units"])

    def put_records(self, index: int, records: Tensor) -> None:
        """Put its tokens' records in their place among those of all tokens `[kv_heads, tokens, size]`, as for
        `put_sketch`."""
        place = records[:, index * SEGMENT_TOKENS :][:, : self.tokens]
        place.copy_(self.records[:, : place.shape[1]])

    @property
    def record(self) -> dict[str, Tensor]:
        """What a file keeps, by name."""
        return {**self.sketch, "records": self.records}


def cut_segments(segments: Iterable[ReopenedSegment], tokens: int) -> tuple[ReopenedSegment, ...]:
    """The first `tokens` tokens of segments that follow each other, or all of them."""
    left = []
    for index, segment in enumerate(segments):
        if (kept := min(tokens - index * SEGMENT_TOKENS, segment.tokens)) > 0:
            left.append(segment if kept == segment.tokens else segment.copy(segment.records.device, kept))
    return tuple(left)


def restore_segments(
    records: list[list[dict[str, Tensor]]], rooms: list[int], sketch: BulkSketch, layout: RecordLayout
) -> list[tuple[ReopenedSegment, ...]]:
    """The inverse of `record`, of each row's segments, in which `rooms[r]` tokens lie in a bulk with this sketch and
    these records; ValueError, if that cannot be."""
    found = []
    for row, room in zip(records, rooms, strict=True):
        segments = tuple(_restore(record, sketch, layout) for record in row)
        tokens = [segment.tokens for segment in segments]
        whole = all(0 < count <= SEGMENT_TOKENS for count in tokens) and set(tokens[:-1]) <= {SEGMENT_TOKENS}
        if not whole or sum(tokens) > room:
            raise ValueError(f"it has reopened segments of {tokens} tokens, where {room} tokens follow closed ones")
        found.append(segments)
    return found


def _restore(record: Mapping[str, Tensor], sketch: BulkSketch, layout: RecordLayout) -> ReopenedSegment:
    kv_heads, tokens = sketch.mean_key.shape[1], math.prod(record["scales"].shape[1:])
    fields = list_fields(layout.dim, layout.value_dim, sketch.layout.count, tokens).items()
    wanted = {name: (dtype, shape[name not in TOKENS :]) for name, (dtype, shape) in fields if name in KEPT}
    for name, (dtype, shape) in {**wanted, "records": (torch.uint8, (tokens, layout.size))}.items():
        if ((found := record[name]).dtype, found.shape) != (dtype, (kv_heads, *shape)):
            raise ValueError(f"its reopened segment of {tokens} tokens has {name} {found.dtype} {list(found.shape)}")
    if not has_whole_order(record["order"]):
        raise ValueError("its reopened segment has an order that lacks channels")
    return ReopenedSegment({name: record[name] for name in KEPT}, record["records"])
