"""Which tokens of the local buffer each query sees, and padding: computed by the first layer of a pass for all."""

import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels.decode_call import Rows
from ..kernels.query_adaptive import Masks
from ..key_moments.rotation import round_length
from .padding import Padding


@dataclass(frozen=True, eq=False)
class Geometry(Masks):
    """Masks over the local buffer for the queries of one call; `rows` is 1 when all rows are alike.

    Attributes:
        stored: int64 `[rows, 1, queries]`, of `bulk_tokens` the ones that have left the local buffer.
        distinct_moment_lengths: the bulk lengths that another prompt's moments are asked for (`rotation.round_length`):
            of the `decided` queries, each once, ascending, on the host; nearly always one.
        row_lengths: likewise of each row's last query, decided or not; one for all rows if they agree.
        decisions: how many (row, query) pairs `decided` holds over the whole batch.
        dense_tokens: tokens in the bulks of rows with such a query, over the whole batch.
        any_pending: whether `pending` holds anything.
    """

    stored: Tensor
    distinct_moment_lengths: tuple[int, ...]
    row_lengths: tuple[int, ...]
    decisions: int
    dense_tokens: int
    any_pending: bool

    def __deepcopy__(self, memo: dict) -> "Geometry":
        return self  # nothing in it ever changes

    @cached_property
    def rows(self) -> Rows:
        """The part of a call of one query a row that decode kernels take, for all layers."""
        return Rows(self.local.flatten(1), self.pending.flatten(1), self.stored.flatten(), self.decided.flatten())


# Masks `[rows, 1, queries, columns]`, local and pending; of each row and query `bulk_tokens`, `stored` and `decided`.
MasksAndCounts = tuple[tuple[Tensor, ...], tuple[list[list[int]], ...]]


def _see_of_several(
    lengths: list[int], flushed: list[int], valid: Tensor | None, *, queries: int, end: int, sinks: int, window: int
) -> MasksAndCounts:
    """What the queries of these rows see, on the host."""
    rows, total, gone = len(lengths), torch.tensor(lengths)[:, None], torch.tensor(flushed)[:, None]
    if valid is None:
        position, shown = total - queries + torch.arange(queries), torch.ones(rows, queries, dtype=torch.bool)
    else:
        # A padding query borrows the position of the real one before it: its output is finite and unused.
        position, shown = total - valid.sum(dim=-1, keepdim=True) + valid.cumsum(dim=-1) - 1, valid
    sink_column = torch.arange(sinks).expand(rows, sinks)
    recent_column = total - end + torch.arange(end)
    token = torch.cat([sink_column, recent_column], dim=-1)[:, None, None, :]
    held = torch.cat([sink_column < gone.clamp_max(sinks), recent_column >= gone], dim=-1)[:, None, None, :]
    position = position[:, None, :, None]
    seen = held & (token <= position)
    local = seen & ((token < sinks) | (token > position - window))
    pending = seen & ~local
    bulk_tokens = (position.squeeze(-1) + 1 - sinks - window).clamp_min(0)
    counts = bulk_tokens, bulk_tokens - pending.sum(dim=-1), (bulk_tokens > 0) & shown[:, None, :]
    return (local, pending), tuple(count.squeeze(1).tolist() for count in counts)


def _see_of_one(
    lengths: list[int], flushed: list[int], valid: Tensor | None, *, queries: int, end: int, sinks: int, window: int
) -> MasksAndCounts:
    """As `_see_of_several`, faster, of one query, the newest token of each row."""
    local, pending = bytearray(), bytearray()
    bulk_tokens: list[list[int]] = []
    stored: list[list[int]] = []
    for total, gone in zip(lengths, flushed, strict=True):
        held, first = min(gone, sinks), end - (total - gone)  # flushed sinks; the row's first recent column
        start = min(max(first, end - total + sinks), end)  # of its tokens that are no sinks
        stop = max(start, end - window)  # where its window begins
        local += b"\1" * held + bytes(sinks - held + first) + b"\1" * (start - first)
        local += bytes(stop - start) + b"\1" * (end - stop)
        pending += bytes(sinks + start) + b"\1" * (stop - start) + bytes(end - stop)
        tokens = max(0, total - sinks - window)
        bulk_tokens.append([tokens])
        stored.append([tokens - (stop - start)])
    real = [True] * len(lengths) if valid is None else valid[:, 0].tolist()
    decided = [[tokens > 0 and there] for (tokens,), there in zip(bulk_tokens, real, strict=True)]
    masks = (torch.frombuffer(mask, dtype=torch.bool).view(len(lengths), 1, queries, -1) for mask in (local, pending))
    return tuple(masks), (bulk_tokens, stored, decided)


class ForwardPass:
    """Padding and geometry of the pass under way, found by its first layer for all.

    Args:
        sinks: sink tokens, which are also the first columns of the local buffer.
        window: tokens of the sliding window.

    Attributes:
        is_prefill_chunk: whether the pass reads a chunk of `generate`'s prompt, which is exact whatever its length.
    """

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window
        self.is_prefill_chunk = False
        self._mask: tuple[Any, Any, tuple[Padding, Tensor | None]] | None = None
        self._geometry: tuple[Any, Geometry] | None = None

    def padding_after(
        self, padding: Padding, mask: Tensor | None, *, batch: int, seen: int, queries: int
    ) -> tuple[Padding, Tensor | None]:
        """`Padding.after`, once per mask: every layer of a forward pass is handed the same tensor."""
        if mask is None:
            return padding.after(mask, batch=batch, seen=seen, queries=queries)
        call = (padding, batch, seen, queries)
        if self._mask is None or self._mask[0]() is not mask or self._mask[1] != call:
            self._mask = (weakref.ref(mask), call, padding.after(mask, batch=batch, seen=seen, queries=queries))
        return self._mask[2]

    def geometry(
        self,
        *,
        lengths: list[int],
        flushed: list[int],
        end: int,
        queries: int,
        valid: Tensor | None,
        device: torch.device,
    ) -> Geometry:
        """Masks for a call whose tokens have already been appended: layers move in lockstep, so they share them.

        For one query, masks follow from the beginning and end of a row's tokens; for several, from comparing positions.

        Args:
            lengths: real tokens of each row, the call's own included.
            flushed: of each row, how many of its oldest tokens have been flushed to sinks and bulk.
            end: recent columns in use; they are right-aligned, so column `end - 1` is every row's newest token.
            queries: tokens of the call, padding included.
            valid: bool `[batch, queries]` on the host, False for padding; None when every token is real.
            device: where the masks go.
        """
        # By content, not identity: a layer whose state differs must get its own masks.
        key = (tuple(lengths), tuple(flushed), end, queries, None if valid is None else valid.numpy().tobytes(), device)
        if self._geometry is not None and self._geometry[0] == key:
            return self._geometry[1]
        alike = valid is None and len(set(lengths)) == 1 and len(set(flushed)) == 1
        rows = 1 if alike else len(lengths)
        stands_for = len(lengths) // rows  # rows of the batch
        see = _see_of_one if queries == 1 else _see_of_several
        sizes = {"queries": queries, "end": end, "sinks": self.sinks, "window": self.window}
        masks, counts = see(lengths[:rows], flushed[:rows], valid, **sizes)
        bulk_tokens, stored, decided = counts
        deciding = [
            [(tokens, gone) for tokens, gone, decides in zip(*row, strict=True) if decides]
            for row in zip(bulk_tokens, stored, decided, strict=True)
        ]
        row_lengths = tuple(round_length(max(1, row[-1])) for row in bulk_tokens)
        tensors = [*masks, *(torch.tensor(count).unsqueeze(1) for count in counts)]
        # A blocking copy would wait for everything the accelerator still has to do.
        local, pending, *placed = (tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors)
        made = Geometry(
            local,
            pending,
            bulk_tokens=placed[0],
            stored=placed[1],
            decided=placed[2],
            distinct_moment_lengths=tuple(sorted({round_length(tokens) for row in deciding for tokens, _ in row})),
            row_lengths=row_lengths[:1] if len(set(row_lengths)) == 1 else row_lengths,
            decisions=sum(map(len, deciding)) * stands_for,
            dense_tokens=sum(max((gone for _, gone in row), default=0) for row in deciding) * stands_for,
            any_pending=bulk_tokens != stored,
        )
        self._geometry = (key, made)
        return made
