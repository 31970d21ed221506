"""Where the bulk of a layer's keys and values lives: preallocated, on the host when offloading."""

from collections.abc import Iterator

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from . import pages

GRANULE = 256  # tokens; capacities are multiples of it
GROWTH = 1.25  # a full store grows to this multiple of the need, so that copying is amortised over many tokens
STREAM_TOKENS = 4096  # tokens a head that one streamed block holds on the device


class Bulk:
    """Every key and value outside sinks and staging, oldest first, row by row.

    Layout `[batch, kv_heads, capacity, dim]`; row `r` holds its first `lengths[r]` tokens, the rest is not
    initialised and never read. With `offloading` on an accelerator the storage is pinned host memory; everywhere
    else it lies on the compute device and nothing is copied to be read.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, offloading: bool) -> None:
        """An empty store for tensors like `keys` `[batch, kv_heads, *, dim]` and `values` (`value_dim`)."""
        self.device = keys.device
        self.offloaded = offloading and self.device.type != "cpu"
        self.lengths = [0] * keys.shape[0]
        self.keys = self._allocate(keys, 0)
        self.values = self._allocate(values, 0)

    def _allocate(self, like: Tensor, capacity: int, batch: int | None = None) -> Tensor:
        shape = (like.shape[0] if batch is None else batch, like.shape[1], capacity, like.shape[3])
        with torch.inference_mode(False):  # an inference tensor could not be appended to outside inference mode
            if self.device.type == "cpu":
                return pages.empty(shape, like.dtype)
            device = torch.device("cpu") if self.offloaded else self.device
            return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=self.offloaded and capacity > 0)

    @property
    def capacity(self) -> int:
        """Tokens a row can hold before the store grows."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the storage, unused capacity included."""
        return self.keys.nbytes + self.values.nbytes

    def settle(self) -> None:
        """Wait for copies to the host that are still under way, before the host itself reads them."""
        if self.offloaded:
            torch.accelerator.synchronize(self.device)

    def _rebuild(self, index: list[int], capacity: int) -> None:
        """Move to a new storage whose row `i` is the old row `index[i]`."""
        self.settle()
        lengths = [self.lengths[row] for row in index]
        used = max(lengths, default=0)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._allocate(old, capacity, batch=len(index))
            if index == list(range(old.shape[0])):
                new[:, :, :used] = old[:, :, :used]
            else:
                for row, source in enumerate(index):
                    new[row, :, :used] = old[source, :, :used]
            setattr(self, name, new)
        self.lengths = lengths

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens a row."""
        if tokens > self.capacity:
            # The first fill is a prefill, whose length is no sign of growth to come: leave it little slack.
            need = tokens if self.capacity == 0 else int(tokens * GROWTH)
            self._rebuild(list(range(len(self.lengths))), -(-(need + 1) // GRANULE) * GRANULE)

    def append(self, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Add `keys` and `values` `[rows, kv_heads, tokens, dim]` to rows of equal length."""
        start, tokens = self.lengths[rows.start], keys.shape[2]
        self.reserve(start + tokens)
        self.keys[rows, :, start : start + tokens].copy_(keys, non_blocking=True)
        self.values[rows, :, start : start + tokens].copy_(values, non_blocking=True)
        self.lengths[rows] = [start + tokens] * len(self.lengths[rows])

    def read(self, rows: slice, heads: slice, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, heads, stop - start, dim]` on the compute device: a view, or a copy if offloaded."""
        part = self.keys[rows, heads, start:stop], self.values[rows, heads, start:stop]
        return send_to_device(part, self.device, non_blocking=True) if self.offloaded else part

    def stream(self, rows: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Everything rows of equal length hold, as blocks `[rows, kv_heads, tokens, dim]` on the compute device.

        Not offloaded, the one block is a view of it all; offloaded, device memory is bounded by two blocks.
        """
        length = self.lengths[rows.start]
        step = STREAM_TOKENS if self.offloaded else max(length, 1)
        for start in range(0, length, step):
            yield self.read(rows, slice(None), start, min(start + step, length))

    def truncate(self, lengths: list[int]) -> None:
        """Forget the newest tokens: row `r` keeps its first `lengths[r]`."""
        self.lengths = lengths

    def select(self, index: list[int]) -> None:
        """Keep, repeat or reorder rows: row `i` becomes the old row `index[i]`."""
        used = max((self.lengths[row] for row in index), default=0)
        self._rebuild(index, self.capacity if used else 0)
