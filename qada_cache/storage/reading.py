"""Reads a bulk for attention: the heads that need it, or all of it block by block."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from .bulk import Bulk, Head
from .staging import cut_blocks
from .transfers import AsyncCopy, double_buffer

Span = tuple[int, int]  # first token, end


class Part(NamedTuple):
    """A part of the bulk on the compute device, and what it cost."""

    rows: slice
    heads: slice
    keys: Tensor  # `[rows, heads, tokens, dim]`
    values: Tensor  # `[rows, heads, tokens, value_dim]`
    bulk_read_bytes: int
    room: int = 0  # tokens: each head has memory for these behind its own, which may be overwritten for now


def read_parts(bulk: Bulk, whole: list[list[bool]]) -> Iterator[Part]:
    """All tokens of the heads that an adaptive call reads whole, `whole[row][kv_head]`.

    If the bulk is not offloaded, these are views of neighbouring heads. If it is, one head comes at a time.
    """
    if bulk.offloaded:
        wanted = [(row, head) for row, flags in enumerate(whole) for head, flag in enumerate(flags) if flag]
        yield from _bring(
            bulk, [(head, (0, bulk.lengths[head[0]])) for head in wanted if bulk.lengths[head[0]]], coded=True
        )
        return
    for row, flags in enumerate(whole):
        for flag, indices in itertools.groupby(range(len(flags)), key=flags.__getitem__):
            if flag and bulk.lengths[row]:
                run = list(indices)
                heads = slice(run[0], run[-1] + 1)
                yield _view(bulk, slice(row, row + 1), heads, 0, bulk.lengths[row], coded=True)


def gather_parts(bulk: Bulk, wanted: Sequence[tuple[Head, Tensor]], *, coded: bool = True) -> Iterator[Part]:
    """Some tokens of each head, int64 `[tokens]` on the device, in this order. Tokens of an offloaded bulk are gathered
    on the host, the next head's while the last one's are copied. `coded` is as for `Bulk.decode`."""

    def start_copies() -> Iterator[tuple[tuple[Head, Tensor], AsyncCopy]]:
        for head, tokens in wanted:
            yield (head, tokens), bulk.gather(head, bulk.choose_stored(head[0], tokens))

    for (head, tokens), tensors in double_buffer(start_copies()):
        yield _make_part(bulk, head, tokens, tensors, coded=coded)


def stream(bulk: Bulk, rows: slice) -> Iterator[Part]:
    """Everything that rows of equal length hold, for an exact call, in blocks of `STREAM_TOKENS` tokens: views of
    all heads, or of one head if the bulk is offloaded, so that they take little device memory. Records that
    are not offloaded are decoded in blocks of a `decoding_share`."""
    heads = range(bulk.keys.shape[1])
    if not bulk.offloaded:
        spans = bulk.cut_spans(rows.start, heads=len(heads) * bulk.decoding_share if bulk.beside else 1)
        yield from (_view(bulk, rows, slice(0, len(heads)), *span, coded=False) for span in spans)
        return
    every = itertools.product(range(rows.start, rows.stop), heads)
    yield from _bring(bulk, list(itertools.product(every, bulk.cut_spans(rows.start))), coded=False)


def read_together(bulk: Bulk) -> Iterator[Part]:
    """The tokens in `tensors` of a bulk whose rows are alike, all heads at once, for an exact call: a view, or blocks
    that are copied to the device and decoded. Start computation with one block before asking for the next. Only this
    computation may write to its `room`."""
    rows, heads = slice(0, len(bulk.stored)), slice(0, bulk.tensors[0].shape[1])
    if not bulk.stored[0]:
        return
    if not bulk.offloaded:
        for span in cut_blocks(bulk, bulk.decoding_share) if bulk.beside else [(0, bulk.stored[0])]:
            part = _view(bulk, rows, heads, *span, coded=False)
            yield part._replace(room=_find_room(part.keys, part.values, span))
        return
    staging = bulk.placement.find_staging(bulk.device)
    for span, tensors in staging.bring(bulk, cut_blocks(bulk, bulk.decoding_share)):
        keys, values = bulk.decode(rows, heads, span, tensors)
        nbytes = len(bulk.stored) * heads.stop * (span[1] - span[0]) * bulk.stored_token_bytes
        yield Part(rows, heads, keys, values, nbytes, _find_room(keys, values, span))


def _find_room(keys: Tensor, values: Tensor, span: Span) -> int:
    """The number of tokens that memory has room for behind each head's `span`, up to the next head. 0 unless the span
    begins with the head's first token. Nobody reads what follows a row's tokens there."""
    if span[0]:
        return 0
    return min(part.stride(1) // part.stride(2) - part.shape[2] for part in (keys, values))


def read_on_host(bulk: Bulk, rows: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """As `Bulk.read` of all heads, but on the host. Keys and values that are stored there do not go to the device."""
    if bulk.offloaded and not bulk.beside:
        bulk.synchronize()
        return bulk.keys[rows, :, start:stop], bulk.values[rows, :, start:stop]
    keys, values = bulk.read(rows, slice(None), start, stop)
    return keys.cpu(), values.cpu()


def view_beside(bulk: Bulk) -> list[tuple[Tensor, Tensor]]:
    """Keys and values, as the model made them, of tokens that a bulk whose rows are alike holds beside `tensors`."""
    tokens = bulk.lengths[0] - bulk.stored[0]
    return [(bulk.keys[:, :, :tokens], bulk.values[:, :, :tokens])] if tokens else []


def _bring(bulk: Bulk, wanted: list[tuple[Head, Span]], *, coded: bool) -> Iterator[Part]:
    """Spans of heads of an offloaded bulk, the next one on its way to the device while one is used."""
    copies = double_buffer(((head, span), bulk.fetch(head, *span)) for head, span in wanted)
    for (head, span), tensors in copies:
        yield _make_part(bulk, head, span, tensors, coded=coded)


def _view(bulk: Bulk, rows: slice, heads: slice, start: int, stop: int, *, coded: bool) -> Part:
    keys, values = bulk.read(rows, heads, start, stop, coded=coded)
    here, each = bulk.clip_stored(rows.start, start, stop), keys.shape[0] * keys.shape[1]
    stored, beside_bytes = here.stop - here.start, bulk.count_beside_bytes(rows.start, coded=coded)
    nbytes = each * (stored * bulk.stored_token_bytes + (stop - start - stored) * beside_bytes)
    return Part(rows, heads, keys, values, nbytes)


def _make_part(bulk: Bulk, head: Head, tokens: Span | Tensor, tensors: tuple[Tensor, ...], *, coded: bool) -> Part:
    """A part of one head, from its slices `tensors` of what the bulk stores; the bulk adds its tokens beside these."""
    rows, heads = slice(head[0], head[0] + 1), slice(head[1], head[1] + 1)
    keys, values = bulk.decode(rows, heads, tokens, tensors, coded=coded)
    beside_bytes = (keys.shape[2] - tensors[0].shape[2]) * bulk.count_beside_bytes(head[0], coded=coded)
    return Part(rows, heads, keys, values, beside_bytes + sum(tensor.nbytes for tensor in tensors))
