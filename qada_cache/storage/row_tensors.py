"""Tensors that hold tokens row by row: where they lie, and what they take."""

import logging
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..files.private_map import PrivateMap
from ..replaying import REPLAYING
from ..said_once import warn_once
from . import pinned, transfers
from .placement import Placement
from .versioned import Buffer, Versioned

logger = logging.getLogger(__name__)
GRANULE = 256  # tokens; capacities are multiples of it
GROWTH = 1.25  # a store has room for at most this multiple of its tokens when it moves
# The same for an offloaded store: with its first tokens; and later, when it gets room for at least `PINNED_LEAST` times
# its tokens, and at most for `PINNED_LEAST * PINNED_GROWTH` times. Its capacities are multiples of `PINNED_GRANULE`.
PROMPT_GROWTH, PINNED_GROWTH, PINNED_LEAST, PINNED_GRANULE = 1.1, 1.5, 1.2, 64
# On devices of `REPLAYING` all layers grow at the same few lengths. These double up to `GRANULES` granules; then they
# are multiples of that, or of about 1/32 of the tokens.
GRANULES = 4
GOLDEN = 0.618034  # multiples of it, modulo 1, are spread evenly over [0, 1), however many there are


class RowTensors(Versioned):
    """The tensors of a `Bulk`, which fills them; in pinned host memory if offloaded."""

    # Keys and values `[batch, kv_heads, capacity, dim]` and `value_dim`, or what `CodedBulk` has; what follows a row's
    # tokens is not initialised and never read.
    tensors = Buffer[tuple[Tensor, ...]]()
    stored: list[int]  # tokens of each row in `tensors`
    lengths: list[int]  # tokens of each row, those included that `CodedBulk` has beside `tensors`
    source: PrivateMap | None  # the memory that copies share, or the file, under `tensors`
    unwritten: list[int]  # leading tokens of each row that still lie in `source`, the same in every copy
    equal: dict[tuple[int, int], int]  # leading tokens that two rows are known to have in common; 0 if missing
    growth = GROWTH
    expected = 0  # tokens that a row will have after the prompt under way; 0 if unknown
    layer: int  # its index
    device: torch.device  # the compute device
    placement: Placement  # of the cache
    offloading: bool  # whether `tensors` may lie in the host's memory instead of the device's
    offloaded: bool  # whether they do, and stay there

    def _allocate(
        self, like: Tensor, capacity: int, *, batch: int | None = None, offloaded: bool | None = None
    ) -> Tensor:
        """An uninitialised tensor `[batch, kv_heads, capacity, dim]` in the dtype of `like`. `batch` (None: `like`'s)
        and `offloaded` (None: as now) say for how many rows, and whether in host memory."""
        offloaded = self.offloaded if offloaded is None else offloaded
        shape = (like.shape[0] if batch is None else batch, like.shape[1], capacity, like.shape[3])
        with torch.inference_mode(False):  # an inference tensor could not be appended to outside inference mode
            if offloaded and self.device.type != "cpu" and 0 not in shape:
                try:
                    if self.device.type == "cuda":
                        return pinned.make(shape, like.dtype, self.device)
                    return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=True)
                except RuntimeError as error:  # the system limits it, or has none left
                    warn_once(
                        logger, f"the bulk lies in host memory that is not pinned, so that copies of it wait: {error}"
                    )
            return transfers.make_empty(shape, like.dtype, transfers.HOST if offloaded else self.device)

    def _copy_rows(self, index: Sequence[int], capacity: int, *, offloaded: bool) -> list[Tensor]:
        """New `tensors`, whose row `i` is the old row `index[i]`. Between devices heads are copied one by one: several
        would take the device's memory on their way to the host."""
        moved = []
        for old in self.tensors:
            new = self._allocate(old, capacity, batch=len(index), offloaded=offloaded)
            heads: Sequence[Any] = [slice(None)] if new.device == old.device else range(old.shape[1])
            for (row, source), head in product(enumerate(index), heads):
                new[row, head, : self.stored[source]] = old[source, head, : self.stored[source]]
            moved.append(new)
        return moved

    def _set_lengths(self, lengths: list[int]) -> None:
        """`tensors` hold `lengths[r]` tokens of row `r` from now on."""
        self.stored = self.lengths = lengths

    def _select_in_place(self, index: Sequence[int]) -> None:
        """Row `i` becomes the old row `index[i]`, of as many as before. Tokens that both are known to share are not
        copied: beams share all but their newest ones."""
        stored, pairs = self.stored, product(range(len(index)), repeat=2)
        shared = {(i, j): stored[i] if i == j else self.equal.get((i, j), 0) for i, j in pairs}
        changed = {row: source for row, source in enumerate(index) if row != source}
        starts: dict[int, int] = {}  # of rows that are both read and written: from where on they are read
        for row, source in changed.items():
            self.unwritten[row] = min(self.unwritten[row], start := shared[row, source])
            if source in changed:
                starts[source] = min(start, starts.get(source, start))
        for store in self.tensors:
            old = {source: store[source, :, start : stored[source]].clone() for source, start in starts.items()}
            for row, source in changed.items():
                start = shared[row, source]
                kept = (
                    old[source][:, start - starts[source] :]
                    if source in old
                    else store[source, :, start : stored[source]]
                )
                store[row, :, start : stored[source]] = kept
        self._set_lengths([stored[row] for row in index])
        self.equal = {(i, j): shared[index[i], index[j]] for i, j in shared}

    @property
    def _growth_share(self) -> float:
        return 0.0 if self.device.type in REPLAYING else self.layer * GOLDEN % 1.0

    def _find_granule(self, tokens: int) -> int:
        """The number of tokens that a row's capacity is a multiple of, if graphs replay steps and it holds `tokens`."""
        doubled = GRANULE << ((tokens - 1) // GRANULE).bit_length()
        return max(min(doubled, GRANULES * GRANULE), doubled // 32)

    def _find_capacity(self, tokens: int, *, offloaded: bool) -> int:
        """Tokens that a row gets room for when it moves to hold `tokens`: about a power of `growth` times `GRANULE`.
        Without replays layers have other exponents each, so that they do not all move at once.

        Pinning takes long. So a prompt that is read at once gets little spare room, and rows that outgrow it get more.
        """
        growth, step, needed = self.growth, GRANULE, tokens
        if offloaded:
            first, step = not self.capacity, PINNED_GRANULE
            growth = PROMPT_GROWTH if first else PINNED_GROWTH
            needed = max(tokens if first else math.ceil(PINNED_LEAST * tokens), self.expected)
        if self.device.type in REPLAYING:
            step = self._find_granule(needed)
            needed += step // 2  # or an answer might end the graph, and wait for memory to be pinned
        share = self._growth_share
        growths = math.ceil(math.log(needed / GRANULE, growth) - share) + share
        return max(math.floor(growth**growths * GRANULE / step) * step, -(-needed // step) * step, GRANULE)

    def _is_to_leave(self, rows: int, capacity: int) -> bool:
        """Whether `tensors` stay in host memory, or move there because the budget has no room for `capacity` tokens of
        `rows` rows on the device."""
        if self.offloaded or not self.offloading or not capacity:
            return self.offloaded
        return not self.placement.has_room(self, rows * capacity * self.row_token_bytes)

    def count_stored(self, length: int) -> int:
        """How many of a row's `length` tokens `tensors` hold."""
        return length

    def clip_stored(self, row: int, start: int, stop: int) -> slice:
        """The part of a row's tokens `start..stop` that `tensors` hold."""
        return slice(min(start, self.stored[row]), min(stop, self.stored[row]))

    @property
    def lent_bytes(self) -> int:
        """Bytes of the tensors `beside` that copies of the cache share."""
        return 0

    @property
    def keys(self) -> Tensor:
        """Keys as the model made them, `[batch, kv_heads, *, dim]`."""
        return self.tensors[0]

    @property
    def values(self) -> Tensor:
        """Values as the model made them, `[batch, kv_heads, *, value_dim]`."""
        return self.tensors[1]

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
        """Bytes of rows that are still in `source`."""
        return sum(map(min, self.unwritten, self.stored)) * self.row_token_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that `tensors` take, unused capacity included."""
        return sum(pinned.count_bytes(tensor) if self.offloaded else tensor.nbytes for tensor in self.tensors)
