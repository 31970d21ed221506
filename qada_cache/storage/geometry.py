"""Which tokens of the near buffer each query sees, and padding: computed by the first layer of a pass for all."""

import weakref
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels.decode_call import Rows
from ..kernels.query_adaptive import Masks
from ..key_moments.rotation import rounded
from .padding import Padding


@dataclass(frozen=True, eq=False)
class Geometry(Masks):
    """Masks over the near buffer for the queries of one call; `rows` is 1 when all rows are alike.

    Attributes:
        stored: int64 `[rows, 1, queries]`, of `bulk_tokens` the ones that have left the near buffer.
        moment_lengths: the bulk lengths that another prompt's moments are asked for (`rotation.rounded`): of the
            `decided` queries, each once, ascending, on the host; nearly always one.
        row_lengths: likewise of each row's last query, decided or not; one for all rows if they agree.
        decisions: how many (row, query) pairs `decided` holds over the whole batch.
        offered: tokens in the bulks of rows with such a query, over the whole batch.
        any_staged: whether `staged` holds anything.
    """

    stored: Tensor
    moment_lengths: tuple[int, ...]
    row_lengths: tuple[int, ...]
    decisions: int
    offered: int
    any_staged: bool

    def __deepcopy__(self, memo: dict) -> "Geometry":
        return self  # nothing in it ever changes

    @cached_property
    def rows(self) -> Rows:
        """The part of a call of one query a row that decode kernels take, for all layers."""
        return Rows(self.local.flatten(1), self.staged.flatten(1), self.stored.flatten(), self.decided.flatten())


def call_geometry(
    *,
    lengths: list[int],
    flushed: list[int],
    end: int,
    queries: int,
    valid: Tensor | None,
    sinks: int,
    window: int,
    device: torch.device,
) -> Geometry:
    """Masks for a call whose tokens have already been appended.

    For one query, masks follow from the beginning and end of a row's tokens; for several, from comparing positions.

    Args:
        lengths: real tokens of each row, the call's own included.
        flushed: of each row, how many of its oldest tokens have left the staging columns for sinks and bulk.
        end: staging columns in use; they are right-aligned, so column `end - 1` is every row's newest token.
        queries: tokens of the call, padding included.
        valid: bool `[batch, queries]` on the host, False for padding; None when every token is real.
        sinks: sink tokens, which are also the first columns of the near buffer.
        window: tokens of the sliding window.
        device: where the masks go.
    """
    batch = len(lengths)
    alike = valid is None and len(set(lengths)) == 1 and len(set(flushed)) == 1
    rows = 1 if alike else batch
    if queries == 1:
        real = [True] * rows if valid is None else valid[:, 0].tolist()
        made = _of_one_query(lengths[:rows], flushed[:rows], real, end=end, sinks=sinks, window=window, device=device)
        return replace(made, decisions=made.decisions * (batch // rows), offered=made.offered * (batch // rows))
    total = torch.tensor(lengths[:rows])[:, None]
    gone = torch.tensor(flushed[:rows])[:, None]
    if valid is None:
        position = total - queries + torch.arange(queries)
        shown = torch.ones(rows, queries, dtype=torch.bool)
    else:
        # A padding query borrows the position of the real one before it: its output is finite and unused.
        position = total - valid.sum(dim=-1, keepdim=True) + valid.cumsum(dim=-1) - 1
        shown = valid
    sink_column = torch.arange(sinks).expand(rows, sinks)
    tail_column = total - end + torch.arange(end)
    token = torch.cat([sink_column, tail_column], dim=-1)
    held = torch.cat([sink_column < gone.clamp_max(sinks), tail_column >= gone], dim=-1)

    token, position = token[:, None, None, :], position[:, None, :, None]
    seen = held[:, None, None, :] & (token <= position)
    local = seen & ((token < sinks) | (token > position - window))
    staged = seen & ~local
    bulk_tokens = (position.squeeze(-1) + 1 - sinks - window).clamp_min(0)
    decided = (bulk_tokens > 0) & shown[:, None, :]
    masks = {
        "local": local,
        "staged": staged,
        "bulk_tokens": bulk_tokens,
        "stored": bulk_tokens - staged.sum(dim=-1),
        "decided": decided,
    }
    row_lengths = tuple(rounded(max(1, tokens)) for tokens in bulk_tokens[:, 0, -1].tolist())
    # A blocking copy would wait for everything the accelerator still has to do.
    asynchronous = device.type == "cuda"
    return Geometry(
        **{name: mask.to(device, non_blocking=asynchronous) for name, mask in masks.items()},
        moment_lengths=tuple(sorted(set(map(rounded, bulk_tokens[decided].tolist())))),
        row_lengths=row_lengths[:1] if len(set(row_lengths)) == 1 else row_lengths,
        decisions=int(decided.sum()) * (batch // rows),
        offered=int((masks["stored"] * decided).amax(dim=-1).sum()) * (batch // rows),
        any_staged=bool(staged.any()),
    )


def _of_one_query(
    lengths: list[int], flushed: list[int], real: list[bool], *, end: int, sinks: int, window: int, device: torch.device
) -> Geometry:
    """`call_geometry` of a call of one query, the newest token of each row, `real` or padding; of these rows alone."""
    local, staged = bytearray(), bytearray()
    bulk_tokens, stored = [], []
    for total, gone in zip(lengths, flushed, strict=True):
        held, first = min(gone, sinks), end - (total - gone)  # sinks that left the tail; the tail's first column in use
        start = min(max(first, end - total + sinks), end)  # of its tokens that are no sinks
        stop = max(start, end - window)  # where its window begins
        local += b"\1" * held + bytes(sinks - held + first) + b"\1" * (start - first)
        local += bytes(stop - start) + b"\1" * (end - stop)
        staged += bytes(sinks + start) + b"\1" * (stop - start) + bytes(end - stop)
        bulk_tokens.append(max(0, total - sinks - window))
        stored.append(bulk_tokens[-1] - (stop - start))
    decided = [tokens > 0 and there for tokens, there in zip(bulk_tokens, real, strict=True)]
    row_lengths = tuple(rounded(max(1, tokens)) for tokens in bulk_tokens)

    def placed(part: Tensor) -> Tensor:
        return part.view(len(lengths), 1, 1, -1).to(device, non_blocking=device.type == "cuda")

    return Geometry(
        local=placed(torch.frombuffer(local, dtype=torch.bool)),
        staged=placed(torch.frombuffer(staged, dtype=torch.bool)),
        bulk_tokens=placed(torch.tensor(bulk_tokens)).squeeze(-1),
        stored=placed(torch.tensor(stored)).squeeze(-1),
        decided=placed(torch.tensor(decided)).squeeze(-1),
        moment_lengths=tuple(sorted({rounded(n) for n, there in zip(bulk_tokens, decided, strict=True) if there})),
        row_lengths=row_lengths[:1] if len(set(row_lengths)) == 1 else row_lengths,
        decisions=sum(decided),
        offered=sum(n for n, there in zip(stored, decided, strict=True) if there),
        any_staged=1 in staged,
    )


class ForwardPass:
    """Padding and geometry of the pass under way.

    Args:
        sinks, window: tokens, as for `call_geometry`.

    Attributes:
        reads_chunk: whether the pass reads a chunk of `generate`'s prompt, which is exact whatever its length.
    """

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window
        self.reads_chunk = False
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
        """`call_geometry`, once per call: layers move in lockstep, so the first one's serves them all."""
        # By content, not identity: a layer whose state differs must get its own masks.
        key = (tuple(lengths), tuple(flushed), end, queries, None if valid is None else valid.numpy().tobytes(), device)
        if self._geometry is None or self._geometry[0] != key:
            made = call_geometry(
                lengths=lengths,
                flushed=flushed,
                end=end,
                queries=queries,
                valid=valid,
                sinks=self.sinks,
                window=self.window,
                device=device,
            )
            self._geometry = (key, made)
        return self._geometry[1]
