"""Tensors that hold tokens row by row: where they lie, and what they take."""

import logging
import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from ..files.private_map import PrivateMap
from ..said_once import warn_once
from . import transfers
from .placement import Placement
from .versioned import Buffer, Versioned

logger = logging.getLogger(__name__)
GRANULE = 256  # tokens; capacities are multiples of it
# Devices whose steps are replays of a graph, which ends where a buffer is replaced. So there are few lengths at which
# layers grow: twice the last one up to so many granules, and then multiples of these, or of 1/32 of the tokens.
REPLAYING, GRANULES = ("cuda",), 4
GROWTH = 1.25  # a store has room for at most this multiple of its tokens when it moves; pinned blocks for more
GOLDEN = 0.618034  # multiples of it, modulo 1, are spread evenly over [0, 1), however many there are


class RowTensors(Versioned):
    """Those of a `Bulk`, which fills them; offloaded, in pinned host memory."""

    # Keys and values `[batch, kv_heads, capacity, dim]` and `value_dim`, or what `CodedBulk` has; what follows a row's
    # tokens is not initialised and never read.
    tensors = Buffer[tuple[Tensor, ...]]()
    stored: list[int]  # tokens of each row in them
    lengths: list[int]  # tokens of each row: as many, or those that `CodedBulk` has beside them too
    source: PrivateMap | None  # the memory that copies share, or the file, under `keys` and `values`
    unwritten: list[int]  # leading tokens of each row that still lie in `source`, the same in every copy
    growth = GROWTH
    layer: int  # its index
    device: torch.device  # which computes
    placement: Placement  # of the cache
    offloading: bool  # whether they may lie in host memory that is not the device's
    offloaded: bool  # whether they do, and stay there

    def _allocate(
        self, like: Tensor, capacity: int, *, batch: int | None = None, offloaded: bool | None = None
    ) -> Tensor:
        """Uninitialised, in another place or for other rows than those of now, if that is said."""
        offloaded = self.offloaded if offloaded is None else offloaded
        shape = (like.shape[0] if batch is None else batch, like.shape[1], capacity, like.shape[3])
        with torch.inference_mode(False):  # an inference tensor could not be appended to outside inference mode
            if offloaded and self.device.type != "cpu" and capacity > 0:
                try:
                    return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=True)
                except RuntimeError as error:  # the system limits it, or has none left
                    warn_once(
                        logger, f"the bulk lies in host memory that is not pinned, so that copies of it wait: {error}"
                    )
            return transfers.make_empty(shape, like.dtype, transfers.HOST if offloaded else self.device)

    def _copy_rows(self, index: Sequence[int], capacity: int, *, offloaded: bool) -> list[Tensor]:
        """New `tensors`, whose row `i` is the old row `index[i]`. Heads are copied one by one: several would take the
        device's memory on their way to the host."""
        moved = []
        for old in self.tensors:
            new = self._allocate(old, capacity, batch=len(index), offloaded=offloaded)
            for (row, source), head in product(enumerate(index), range(old.shape[1])):
                new[row, head, : self.stored[source]] = old[source, head, : self.stored[source]]
            moved.append(new)
        return moved

    @property
    def _growth_share(self) -> float:
        return self.layer * GOLDEN % 1.0

    def _find_granule(self, tokens: int) -> int:
        """What a row that holds so many tokens has room for is a multiple of it."""
        if self.device.type not in REPLAYING:
            return GRANULE
        doubled = GRANULE << ((tokens - 1) // GRANULE).bit_length()
        return max(min(doubled, GRANULES * GRANULE), doubled // 32)

    def _count_needed(self, tokens: int) -> int:
        """Tokens that a row has to have room for, to hold so many where it lies."""
        return self._count_offloaded(tokens) if self.offloaded else tokens

    def _count_offloaded(self, tokens: int) -> int:
        """Likewise in host memory, where layers leave pinned blocks before these are full."""
        if self.device.type in REPLAYING:
            tokens = -(-tokens // self._find_granule(tokens)) * self._find_granule(tokens)
        return int(tokens * GROWTH**self._growth_share)

    def _find_capacity(self, tokens: int, *, offloaded: bool) -> int:
        """Tokens that a row gets room for, when it moves to hold so many."""
        if offloaded:
            capacity = -(-(self._count_offloaded(tokens) + 1) // GRANULE) * GRANULE
            sizes = [t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in self.tensors]
            room = min(transfers.count_pinned(capacity * size) // size for size in sizes if size)
            return room // GRANULE * GRANULE
        share, granule = self._growth_share, self._find_granule(tokens)
        growths = math.ceil(math.log(tokens / GRANULE, self.growth) - share) + share
        return max(math.floor(self.growth**growths * GRANULE / granule), -(-tokens // granule)) * granule

    def _is_to_leave(self, rows: int, capacity: int) -> bool:
        """Whether it is to move to host memory, or to stay there, instead of taking room for so many tokens of so many
        rows on the device."""
        if self.offloaded or not self.offloading or not capacity:
            return self.offloaded
        return not self.placement.has_room(self, rows * capacity * self.row_token_bytes)

    def clip_stored(self, row: int, start: int, stop: int) -> slice:
        """Of a row's tokens `start..stop` those in `tensors`."""
        return slice(min(start, self.stored[row]), min(stop, self.stored[row]))

    @property
    def mappable(self) -> bool:
        """Whether its storage is plain host memory, perhaps a mapped file."""
        return self.device.type == "cpu" and not self.offloading

    @property
    def placed(self) -> bool:
        """Whether it lies on the device within a budget, or will when it has tokens."""
        return self.offloading and not self.offloaded

    @property
    def capacity(self) -> int:
        """Tokens of a row that `tensors` have room for."""
        return self.tensors[0].shape[2]

    @property
    def stored_token_bytes(self) -> int:
        """Bytes of a token of one head in `tensors`."""
        return sum(tensor.shape[3] * tensor.element_size() for tensor in self.tensors)

    @property
    def row_token_bytes(self) -> int:
        """Bytes of a token of all heads in `tensors`."""
        return self.tensors[0].shape[1] * self.stored_token_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tokens in `tensors`."""
        return sum(self.stored) * self.row_token_bytes

    @property
    def shared_bytes(self) -> int:
        """Of these, bytes still in `source`."""
        return sum(map(min, self.unwritten, self.stored)) * self.row_token_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that `tensors` take, unused capacity included."""
        pinned = [self.offloaded and tensor.is_pinned() for tensor in self.tensors]
        sizes = [tensor.nbytes for tensor in self.tensors]
        return sum(transfers.count_pinned(size) if block else size for size, block in zip(sizes, pinned, strict=True))
