"""What attention reads of a bulk: the heads that need it, or all of it block by block, and heads it may need next."""

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .bulk import Bulk
from .residents import Head, Resident
from .transfers import Arrival, Note, ahead

EARLY_SHARE = 4  # at most one in so many heads of a layer is fetched before it is asked for


class Read(NamedTuple):
    """A part of the bulk on the compute device, and the bytes read for it.

    Attributes:
        rows, heads: of the part.
        keys, values: `[rows, heads, tokens, dim]` and `value_dim`.
        pulled: bytes read from the bulk's own memory, but for those that `prefetch` has counted.
        spared: bytes that were read from a resident instead.
    """

    rows: slice
    heads: slice
    keys: Tensor
    values: Tensor
    pulled: int
    spared: int


def flagged(bulk: Bulk, wanted: list[list[bool]], *, learn: bool = True) -> Iterator[Read]:
    """All tokens of the wanted heads of each row, for an adaptive call.

    If the bulk is not offloaded, they are views of neighbouring heads. An offloaded bulk comes head by head: residents
    first, while the others are copied to the device. Those copies may stay as residents.

    Args:
        bulk: to read from.
        wanted: of every row and KV head.
        learn: False leaves residents and early copies as they are (for an audit).
    """
    if not bulk.offloaded:
        for row, flags in enumerate(wanted):
            for run in _runs(flags) if bulk.lengths[row] else ():
                yield _view(bulk, slice(row, row + 1), run, 0, bulk.lengths[row])
        return
    heads = _heads(bulk, wanted)
    early, before = bulk.early, {}
    if learn:
        before = bulk.residents.flag(heads)
        bulk.flagged, bulk.early = heads, {}
    held = _held(bulk, heads)
    missing = [head for head in heads if head not in held]
    arrivals = ahead(early.get(head) or _fetch(bulk, head, 0, bulk.lengths[head[0]]) for head in missing)
    for head, resident in held.items():
        yield _of_head(head, resident.keys, resident.values, spared=True)
    for head, (keys, values) in zip(missing, arrivals, strict=True):
        if learn:
            bulk.residents.keep(head, keys, values, before[head])
        yield _of_head(head, keys, values, pulled=head not in early)


def none_whole(bulk: Bulk) -> None:
    """Note that an adaptive call reads no head whole: copies started for it are dropped, and none start for the
    next."""
    bulk.flagged, bulk.early = [], {}


def chosen(bulk: Bulk, picks: Iterable[tuple[Head, Tensor]]) -> Iterator[Read]:
    """Some tokens of heads, each of them int64 `[tokens]` on the device.

    An offloaded bulk gathers them on the host, or on the device for residents; the next head's tokens are picked while
    these are copied.
    """
    sources: deque[tuple[Head, bool]] = deque()

    def arrivals() -> Iterator[Arrival]:
        for head, index in picks:
            held = _held(bulk, [head])
            sources.append((head, head in held))
            if head in held:
                keys, values = held[head].keys, held[head].values
                yield Arrival((keys[:, :, index], values[:, :, index]))
            else:
                yield bulk.gather(head, index)

    for keys, values in ahead(arrivals()):
        head, spared = sources.popleft()
        yield _of_head(head, keys, values, pulled=not spared, spared=spared)


def stream(bulk: Bulk, rows: slice) -> Iterator[Read]:
    """Everything that rows of equal length hold, for an exact call, in blocks of `bulk.STREAM_TOKENS` tokens.

    If the bulk is not offloaded, a block is a view of all heads. If it is, a block is one head of one row, copied
    unless it is resident, so that device memory stays bounded.
    """
    spans = bulk.spans(rows.start)
    if not bulk.offloaded:
        yield from (_view(bulk, rows, slice(0, bulk.keys.shape[1]), *span) for span in spans)
        return
    every = [(row, head) for row in range(rows.start, rows.stop) for head in range(bulk.keys.shape[1])]
    held = _held(bulk, every)
    missing = [(head, span) for head in every if head not in held for span in spans]
    arrivals = ahead(_fetch(bulk, head, *span) for head, span in missing)
    for head, resident in held.items():
        for first, end in spans:
            yield _of_head(head, resident.keys[:, :, first:end], resident.values[:, :, first:end], spared=True)
    for (head, _), (keys, values) in zip(missing, arrivals, strict=True):
        yield _of_head(head, keys, values, pulled=True)


def prefetch(bulk: Bulk) -> int:
    """Start to copy heads that the last adaptive call flagged: the next one is likely to flag them. Returns the bytes.

    Heads that are flagged most come first. Copies that the next call does not ask for are dropped.
    """
    if not bulk.offloaded:
        return 0
    scores, moved = bulk.residents.scores, 0
    missing = [head for head in bulk.flagged if head not in bulk.residents.held and head not in bulk.early]
    missing.sort(key=lambda head: -scores[head[0]][head[1]])
    for head in missing[: max(1, len(bulk.lengths) * bulk.keys.shape[1] // EARLY_SHARE)]:
        tokens = bulk.lengths[head[0]]
        try:
            bulk.early[head] = bulk.fetch(head, 0, tokens)
        except torch.OutOfMemoryError:  # it will be copied when it is needed
            break
        moved += bulk.token_bytes * tokens
    return moved


def learn(bulk: Bulk, flags: Tensor) -> int:
    """Choose residents by the flags of a kernel that reads heads where they lie, on the host or on the device.

    Nothing here waits for the device. Flags count once they have reached the host, in this call or a later one. A head
    that may then stay is copied, and is read on the device once its copy is whole.

    Args:
        bulk: an offloaded one.
        flags: bool `[batch, kv_heads]`, on the device.

    Returns:
        bytes of the copies that were started.
    """
    bulk.noted.append(Note(flags))
    moved = 0
    while bulk.noted and (wanted := bulk.noted[0].read()) is not None:
        bulk.noted.popleft()
        heads = _heads(bulk, wanted)
        before = bulk.residents.flag(heads)
        for head in heads:
            tokens = bulk.lengths[head[0]]
            if bulk.residents.get(head, tokens) is None:
                nbytes, fetch = bulk.token_bytes * tokens, functools.partial(bulk.fetch, head, 0, tokens)
                moved += nbytes * bulk.residents.bring(head, nbytes, before[head], fetch)
    return moved


def _heads(bulk: Bulk, wanted: list[list[bool]]) -> list[Head]:
    """The wanted heads that have a bulk."""
    return [(row, head) for row, flags in enumerate(wanted) if bulk.lengths[row] for head, f in enumerate(flags) if f]


def _held(bulk: Bulk, heads: list[Head]) -> dict[Head, Resident]:
    """Those of the heads that lie on the device, whole."""
    found = {head: bulk.residents.get(head, bulk.lengths[head[0]]) for head in heads}
    held = {head: resident for head, resident in found.items() if resident is not None}
    for resident in held.values():
        resident.wait()
    return held


def _fetch(bulk: Bulk, head: Head, start: int, stop: int) -> Arrival:
    """`bulk.fetch`; if memory runs out, residents are dropped and it is tried again."""
    try:
        return bulk.fetch(head, start, stop)
    except torch.OutOfMemoryError:
        if not bulk.residents.shared.clear():
            raise
    return bulk.fetch(head, start, stop)


def _view(bulk: Bulk, rows: slice, heads: slice, start: int, stop: int) -> Read:
    keys, values = bulk.read(rows, heads, start, stop)
    return Read(rows, heads, keys, values, keys.nbytes + values.nbytes, 0)


def _of_head(head: Head, keys: Tensor, values: Tensor, *, pulled: bool = False, spared: bool = False) -> Read:
    moved, (row, column) = keys.nbytes + values.nbytes, head
    return Read(slice(row, row + 1), slice(column, column + 1), keys, values, moved * pulled, moved * spared)


def _runs(wanted: list[bool]) -> Iterator[slice]:
    """Maximal runs of neighbouring True entries."""
    start = None
    for index, flag in enumerate([*wanted, False]):
        if flag and start is None:
            start = index
        elif not flag and start is not None:
            yield slice(start, index)
            start = None
