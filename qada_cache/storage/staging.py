"""Device memory that whole layers of an offloaded bulk pass through, one on its way while another is computed with."""

import weakref
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..sketch import SEGMENT_TOKENS
from . import transfers

if TYPE_CHECKING:
    from .bulk import Bulk

BLOCK_BYTES = 1 << 27  # bytes of keys and values in the model's dtype, in one block on the device
# Starting a copy takes the host as long as the bus takes for this many bytes. So a tensor is copied as a whole, and not
# head by head, if no head has more unused room than that.
COPY_BYTES = 1 << 19
Span = tuple[int, int]  # first token, end


def cut_blocks(bulk: "Bulk", share: int = 1) -> list[Span]:
    """The tokens in `tensors` of a bulk whose rows are alike, in blocks of whole segments. A block has at most
    `BLOCK_BYTES / share` bytes, and at least one segment."""
    stored, (batch, heads) = bulk.stored[0], bulk.tensors[0].shape[:2]
    tokens = BLOCK_BYTES // (share * batch * heads * bulk.token_bytes)
    step = max(1, tokens // SEGMENT_TOKENS) * SEGMENT_TOKENS
    return [(first, min(first + step, stored)) for first in range(0, stored, step)]


class _Copy(NamedTuple):
    """A block on its way."""

    bulk: "weakref.ref[Bulk]"  # weak, so that a copy that nobody asks for keeps no host memory
    stored: list[int]  # the bulk's: it has another list after each change of what it stores
    span: Span
    slot: int
    tensors: tuple[Tensor, ...]  # `[batch, kv_heads, tokens, *]`, views of the slot's memory
    event: Any  # recorded after the copy; None if it has ended


class Staging:
    """Two slots of memory on a device, for the bulks of one cache. Copies run on a stream of their own. The device
    alone waits: a copy for computation with the last block of its slot, computation for its copy. So a host that runs
    ahead takes no more memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free()

    def _free(self) -> None:
        self._ahead: _Copy | None = None
        self._memory: list[Tensor | None] = [None, None]
        self._used: list[Any] = [None, None]  # per slot, the event after the last computation with it
        self._turn = 0

    def bring(self, bulk: "Bulk", spans: list[Span]) -> Iterator[tuple[Span, tuple[Tensor, ...]]]:
        """Spans of `tensors`, all rows and heads, on the device. While one is used the next one is copied; the first
        of the cache's next bulk while the last is. Start computation with one before asking for the next."""
        ahead, self._ahead = self._ahead, None
        for index, span in enumerate(spans):
            copy = ahead
            if copy is None or copy.bulk() is not bulk or copy.stored is not bulk.stored or copy.span != span:
                copy = self._start(bulk, span)
            following = bulk if index + 1 < len(spans) else _find_next(bulk)
            if following is None:
                ahead = None
            else:
                upcoming = (
                    cut_blocks(following, following.decoding_share) if following is not bulk else spans[index + 1 :]
                )
                ahead = self._start(following, upcoming[0])
            if copy.event is not None:
                transfers.wait_event(copy.event, self.device)
            yield span, copy.tensors
            self._used[copy.slot] = transfers.mark(self.device)
        if ahead is None:  # the last layer: a pass may be long in coming
            self._free()
        self._ahead = ahead

    def _start(self, bulk: "Bulk", span: Span) -> _Copy:
        """Copy a block to the slot whose turn it is."""
        slot, self._turn = self._turn, 1 - self._turn
        plans = [_plan(tensor, span) for tensor in bulk.tensors]
        sizes = [-(-rows.numel() * rows.element_size() // 256) * 256 for rows, _ in plans]
        memory = self._memory[slot]
        if memory is None or len(memory) < sum(sizes):
            memory = self._memory[slot] = None  # before it is replaced
            memory = self._memory[slot] = transfers.make_staging(sum(sizes), self.device)
        pairs, views, start = [], [], 0
        for (rows, tokens), size in zip(plans, sizes, strict=True):
            room = memory[start : start + rows.numel() * rows.element_size()].view(rows.dtype).view(rows.shape)
            start += size
            views.append(room[:, :, tokens])
            if rows.is_contiguous():
                pairs.append((room, rows))
            else:
                heads = product(range(rows.shape[0]), range(rows.shape[1]))
                pairs += [(room[at], rows[at]) for at in heads]
        event = transfers.refill(pairs, self.device, after=(self._used[slot], bulk.written))
        return _Copy(weakref.ref(bulk), bulk.stored, span, slot, tuple(views), event)


def _plan(tensor: Tensor, span: Span) -> tuple[Tensor, slice]:
    """The part of `tensor` `[batch, kv_heads, capacity, *]` to copy for a span of tokens, and their place in the
    copy."""
    unused = tensor.shape[2] - (span[1] - span[0])
    if tensor.is_contiguous() and unused * tensor.shape[3] * tensor.element_size() <= COPY_BYTES:
        return tensor, slice(*span)
    return tensor[:, :, slice(*span)], slice(None)


def _find_next(bulk: "Bulk") -> "Bulk | None":
    """The bulk of the cache's next layer that lies in host memory for the same device, with rows alike."""
    others = [
        each
        for each in bulk.placement.bulks
        if each.layer > bulk.layer and each.offloaded and each.device == bulk.device and any(each.stored)
    ]
    found = min(others, key=lambda each: each.layer, default=None)
    return found if found is not None and len(set(found.stored)) == 1 else None
