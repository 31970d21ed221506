"""What attention reads of a bulk: the heads that need it, or all of it block by block, and heads it may need next."""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .bulk import Bulk
from .residents import Head
from .transfers import AsyncCopy, HostCopy, double_buffer

PREFETCH_SHARE = 4  # at most one in so many heads of a layer is prefetched


class Part(NamedTuple):
    """A part of the bulk on the compute device, and what it cost."""

    rows: slice
    heads: slice
    keys: Tensor  # `[rows, heads, tokens, dim]`
    values: Tensor  # likewise, of `value_dim`
    bulk_read_bytes: int = 0  # from the bulk's own memory; prefetched ones were counted before
    resident_hit_bytes: int = 0  # from a resident instead


def read_parts(
    bulk: Bulk,
    whole: list[list[bool]],  # of every row and KV head, whether it is read whole
    *,
    selecting: bool = False,  # whether the other heads that are read select tokens
    update_residency: bool = True,  # False leaves residents and prefetched heads as they are (for an audit)
) -> Iterator[Part]:
    """What an adaptive call reads of heads that are read whole.

    If the bulk is not offloaded, whole heads are views of neighbouring ones. If it is, one head comes at a time:
    residents first, while others are being copied to the device, where these may stay as residents.
    """
    if not bulk.offloaded:
        for row, flags in enumerate(whole):
            for flag, indices in itertools.groupby(range(len(flags)), key=flags.__getitem__):
                if flag and bulk.lengths[row]:
                    run = list(indices)
                    yield _view(bulk, slice(row, row + 1), slice(run[0], run[-1] + 1), 0, bulk.lengths[row])
    elif not selecting or any(map(any, whole)):  # residents count the calls that ask for some
        heads = _heads(bulk, whole)
        prefetched, before = bulk.prefetched, {}
        if update_residency:
            before = bulk.residents.flag(heads)
            bulk.flagged, bulk.prefetched = heads, {}
        for part in _bring(bulk, [(head, (0, bulk.lengths[head[0]])) for head in heads], prefetched):
            if update_residency and not part.resident_hit_bytes:
                head, tensors = (part.rows.start, part.heads.start), (part.keys, part.values)
                nbytes = part.keys.nbytes + part.values.nbytes
                bulk.residents.keep(head, nbytes, before[head], functools.partial(AsyncCopy, tensors))
            yield part
    else:  # the next call is not expected to read any whole, and what was fetched for this one goes
        bulk.flagged, bulk.prefetched = [], {}


def gather_parts(bulk: Bulk, wanted: Sequence[tuple[Head, Tensor]]) -> Iterator[Part]:
    """Some tokens of heads, int64 `[tokens]` on the device each, in this order. Offloaded, they are put together on the
    host, or on the device for heads that are there; the next ones are while these are on their way."""

    def async_copies() -> Iterator[tuple[tuple[Head, str], AsyncCopy]]:
        for head, tokens in wanted:
            if (resident := bulk.residents.get(head, bulk.lengths)) is None:
                yield (head, "bulk_read_bytes"), bulk.gather(head, tokens)
            else:
                found = AsyncCopy(tuple(part[:, :, tokens] for part in resident.wait()))
                yield (head, "resident_hit_bytes"), found

    for (head, counted), tensors in double_buffer(async_copies()):
        yield _make_part(head, tensors, counted)


def stream(bulk: Bulk, rows: slice) -> Iterator[Part]:
    """Everything that rows of equal length hold, for an exact call, in blocks of `bulk.STREAM_TOKENS` tokens: views of
    all heads, or of one head if the bulk is offloaded, so that they take little device memory."""
    spans, heads = bulk.spans(rows.start), range(bulk.keys.shape[1])
    if not bulk.offloaded:
        yield from (_view(bulk, rows, slice(0, len(heads)), *span) for span in spans)
        return
    every = itertools.product(range(rows.start, rows.stop), heads)
    yield from _bring(bulk, list(itertools.product(every, spans)), {})


def _bring(bulk: Bulk, wanted: list[tuple[Head, tuple[int, int]]], prefetched: dict[Head, AsyncCopy]) -> Iterator[Part]:
    """Spans of heads to the device: those of residents first, while others are being copied."""
    held = {head: found for head, _ in wanted if (found := bulk.residents.get(head, bulk.lengths)) is not None}
    async_copies = double_buffer(
        (head, prefetched.get(head) or bulk.fetch(head, *span)) for head, span in wanted if head not in held
    )
    for head, (first, end) in wanted:
        if head in held:
            yield _make_part(head, tuple(part[:, :, first:end] for part in held[head].wait()), "resident_hit_bytes")
    for head, tensors in async_copies:
        yield _make_part(head, tensors, "" if head in prefetched else "bulk_read_bytes")


def prefetch(bulk: Bulk) -> int:
    """Start to copy heads that the last adaptive call flagged, those first that are flagged most. Returns the bytes.
    Copies that the next call does not ask for are dropped."""
    scores, moved = bulk.residents.scores, 0
    missing = [head for head in bulk.flagged if head not in bulk.residents.held and head not in bulk.prefetched]
    missing.sort(key=lambda head: -scores[head[0]][head[1]])
    with contextlib.suppress(torch.OutOfMemoryError):  # they will be copied when they are needed
        for head in missing[: max(1, len(bulk.lengths) * bulk.keys.shape[1] // PREFETCH_SHARE)]:
            bulk.prefetched[head] = bulk.fetch(head, 0, bulk.lengths[head[0]])
            moved += bulk.prefetched[head].nbytes
    return moved


def update_residency(bulk: Bulk, flags: Tensor) -> int:
    """Select residents of an offloaded bulk by the flags of a kernel that reads heads where they lie: bool
    `[batch, kv_heads]` on the device. Returns the bytes of copies that were started.

    Nothing here waits for the device. Flags count once they have reached the host, in this call or a later one. A
    resident is read on the device once its copy is whole.
    """
    moved = 0
    bulk.flag_copies.append(HostCopy(flags))
    while bulk.flag_copies and (wanted := bulk.flag_copies[0].read()) is not None:
        bulk.flag_copies.popleft()
        heads = _heads(bulk, wanted)
        before = bulk.residents.flag(heads)
        for head in heads:
            tokens = bulk.lengths[head[0]]
            if bulk.residents.get(head, bulk.lengths) is None:
                nbytes, fetch = bulk.token_bytes * tokens, functools.partial(bulk.fetch, head, 0, tokens)
                moved += nbytes * bulk.residents.keep(head, nbytes, before[head], fetch)
    return moved


def _heads(bulk: Bulk, wanted: list[list[bool]]) -> list[Head]:
    """The wanted heads that have a bulk."""
    return [(row, head) for row, flags in enumerate(wanted) if bulk.lengths[row] for head, f in enumerate(flags) if f]


def _view(bulk: Bulk, rows: slice, heads: slice, start: int, stop: int) -> Part:
    keys, values = bulk.read(rows, heads, start, stop)
    return Part(rows, heads, keys, values, bulk_read_bytes=keys.nbytes + values.nbytes)


def _make_part(head: Head, tensors: tuple[Tensor, ...], counted: str) -> Part:
    """`counted` is the field for its bytes; empty: they were counted before."""
    (row, column), (keys, values) = head, tensors
    nbytes = {counted: keys.nbytes + values.nbytes} if counted else {}
    return Part(slice(row, row + 1), slice(column, column + 1), keys, values, **nbytes)
