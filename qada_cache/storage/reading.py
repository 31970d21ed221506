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

DECODED_SHARE = 16  # a block of decoded tokens is so many times shorter: decoding has temporaries
PREFETCH_SHARE = 4  # at most one in so many heads of a layer is prefetched
Span = tuple[int, int]  # first token, end


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
                    heads = slice(run[0], run[-1] + 1)
                    yield _view(bulk, slice(row, row + 1), heads, 0, bulk.lengths[row], coded=True)
    elif not selecting or any(map(any, whole)):  # residents count the calls that ask for some
        wanted = _find_heads(bulk, whole)
        prefetched, before = bulk.prefetched, {}
        if update_residency:
            before = bulk.residents.flag(wanted)
            bulk.flagged, bulk.prefetched = wanted, {}
        for head, span, tensors, counted in _bring(
            bulk, [(head, (0, bulk.lengths[head[0]])) for head in wanted], prefetched
        ):
            if update_residency and counted != "resident_hit_bytes":
                nbytes = sum(tensor.nbytes for tensor in tensors)
                bulk.residents.keep(head, nbytes, before[head], functools.partial(AsyncCopy, tensors))
            yield _make_part(bulk, head, span, tensors, counted, coded=True)
    else:  # the next call is not expected to read any whole, and what was fetched for this one goes
        bulk.flagged, bulk.prefetched = [], {}


def gather_parts(bulk: Bulk, wanted: Sequence[tuple[Head, Tensor]]) -> Iterator[Part]:
    """Some tokens of heads, int64 `[tokens]` on the device each, in this order. Offloaded, they are put together on the
    host, or on the device for heads that are there; the next ones are while these are on their way."""

    def start_copies() -> Iterator[tuple[tuple[Head, Tensor, str], AsyncCopy]]:
        for head, tokens in wanted:
            stored = bulk.choose_stored(head[0], tokens)
            if (resident := bulk.find_resident(head)) is None:
                yield (head, tokens, "bulk_read_bytes"), bulk.gather(head, stored)
            else:
                found = AsyncCopy(tuple(part[:, :, stored] for part in resident.wait()))
                yield (head, tokens, "resident_hit_bytes"), found

    for (head, tokens, counted), tensors in double_buffer(start_copies()):
        yield _make_part(bulk, head, tokens, tensors, counted, coded=True)


def stream(bulk: Bulk, rows: slice) -> Iterator[Part]:
    """Everything that rows of equal length hold, for an exact call, in blocks of `bulk.STREAM_TOKENS` tokens: views of
    all heads, or of one head if the bulk is offloaded, so that they take little device memory. Records that
    are not offloaded are decoded in shorter blocks."""
    heads = range(bulk.keys.shape[1])
    if not bulk.offloaded:
        spans = bulk.cut_spans(rows.start, heads=len(heads) * DECODED_SHARE if bulk.beside else 1)
        yield from (_view(bulk, rows, slice(0, len(heads)), *span, coded=False) for span in spans)
        return
    every = itertools.product(range(rows.start, rows.stop), heads)
    for brought in _bring(bulk, list(itertools.product(every, bulk.cut_spans(rows.start))), {}):
        yield _make_part(bulk, *brought, coded=False)


def _bring(
    bulk: Bulk, wanted: list[tuple[Head, Span]], prefetched: dict[Head, AsyncCopy]
) -> Iterator[tuple[Head, Span, tuple[Tensor, ...], str]]:
    """What the bulk stores of spans of heads, on the device, as `_make_part` takes it: of residents first, while others
    are being copied."""
    held = {head: found for head, _ in wanted if (found := bulk.find_resident(head)) is not None}
    async_copies = double_buffer(
        ((head, span), prefetched.get(head) or bulk.fetch(head, *span)) for head, span in wanted if head not in held
    )
    for head, span in wanted:
        if head in held:
            here = bulk.clip_stored(head[0], *span)
            yield head, span, tuple(part[:, :, here] for part in held[head].wait()), "resident_hit_bytes"
    for (head, span), tensors in async_copies:
        yield head, span, tensors, "" if head in prefetched else "bulk_read_bytes"


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
        heads = _find_heads(bulk, wanted)
        before = bulk.residents.flag(heads)
        for head in heads:
            tokens = bulk.lengths[head[0]]
            if bulk.find_resident(head) is None:
                nbytes = bulk.stored_token_bytes * bulk.stored[head[0]]
                fetch = functools.partial(bulk.fetch, head, 0, tokens)
                moved += nbytes * bulk.residents.keep(head, nbytes, before[head], fetch)
    return moved


def _find_heads(bulk: Bulk, wanted: list[list[bool]]) -> list[Head]:
    """The wanted heads that have a bulk."""
    return [(row, head) for row, flags in enumerate(wanted) if bulk.lengths[row] for head, f in enumerate(flags) if f]


def _view(bulk: Bulk, rows: slice, heads: slice, start: int, stop: int, *, coded: bool) -> Part:
    keys, values = bulk.read(rows, heads, start, stop, coded=coded)
    here, each = bulk.clip_stored(rows.start, start, stop), keys.shape[0] * keys.shape[1]
    stored, beside_bytes = here.stop - here.start, bulk.count_beside_bytes(rows.start, coded=coded)
    nbytes = each * (stored * bulk.stored_token_bytes + (stop - start - stored) * beside_bytes)
    return Part(rows, heads, keys, values, bulk_read_bytes=nbytes)


def _make_part(
    bulk: Bulk, head: Head, tokens: Span | Tensor, tensors: tuple[Tensor, ...], counted: str, *, coded: bool
) -> Part:
    """Of what the bulk stores of a head's tokens. `counted` is the field for the bytes of that; empty: they were
    counted before. Tokens beside it are the bulk's own."""
    rows, heads = slice(head[0], head[0] + 1), slice(head[1], head[1] + 1)
    keys, values = bulk.decode(rows, heads, tokens, tensors, coded=coded)
    beside_bytes = bulk.count_beside_bytes(head[0], coded=coded)
    nbytes = {"bulk_read_bytes": (keys.shape[2] - tensors[0].shape[2]) * beside_bytes}
    if counted:
        nbytes[counted] = nbytes.get(counted, 0) + sum(tensor.nbytes for tensor in tensors)
    return Part(rows, heads, keys, values, **nbytes)
