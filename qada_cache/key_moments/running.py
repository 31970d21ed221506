"""Key moments as layers hold them: the current prompt's, running, and another prompt's, on devices for all caches."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..kernels.reference import without_autocast

BLOCK_TOKENS = 4096  # bounds the float32 copy of new keys
# Caches in several threads may share moments. One lock for all, as locks cannot be copied.
_placing = threading.Lock()
Pair = tuple[Tensor, Tensor]  # mean and covariance


class RunningMoments:
    """Count, mean and covariance of the keys of one layer, row by row, in float32.

    Updated by Chan's pairwise merge of centred blocks: stable for keys with large means, and independent of the split
    into blocks, to rounding.

    Attributes:
        count: tokens taken in, one int a row; and `known`, the same as int64 `[batch]` beside the other tensors.
        mean: `[batch, kv_heads, dim]` float32.
        covariance: `[batch, kv_heads, dim, dim]` float32, of the population; zeros for a row without tokens.
    """

    def __init__(self, batch: int, kv_heads: int, dim: int, device: torch.device) -> None:
        self.count = [0] * batch
        self.known = torch.zeros(batch, dtype=torch.int64, device=device)
        self.mean = torch.zeros(batch, kv_heads, dim, dtype=torch.float32, device=device)
        self.covariance = torch.zeros(batch, kv_heads, dim, dim, dtype=torch.float32, device=device)

    def update(self, rows: slice, keys: Tensor) -> None:
        """Take in `keys` `[rows, kv_heads, tokens, dim]`, any dtype; the rows must have equal counts."""
        for block in keys.split(BLOCK_TOKENS, dim=-2):
            if block.shape[-2]:
                with without_autocast(keys.device):
                    self._merge(rows, block.float())

    def _merge(self, rows: slice, block: Tensor) -> None:
        """Take in one float32 block that is not empty."""
        old, new = self.count[rows.start], block.shape[-2]
        mean, share = block.mean(dim=-2), new / (old + new)
        centred = block - mean.unsqueeze(-2)
        covariance = torch.matmul(centred.transpose(-1, -2), centred) / new
        delta = mean - self.mean[rows]
        self.mean[rows] += delta * share
        self.covariance[rows] += (covariance - self.covariance[rows]) * share
        self.covariance[rows] += delta.unsqueeze(-1) * delta.unsqueeze(-2) * (share * (1 - share))
        self._counted(rows, old + new)

    def _counted(self, rows: slice, tokens: int) -> None:
        self.count[rows] = [tokens] * len(self.count[rows])
        self.known[rows] = tokens

    def clear(self, rows: slice) -> None:
        """Forget everything about these rows."""
        self._counted(rows, 0)
        self.mean[rows] = 0.0
        self.covariance[rows] = 0.0

    def select(self, index: list[int]) -> None:
        """Keep, repeat or reorder rows: row `i` becomes the old row `index[i]`."""
        self.count = [self.count[row] for row in index]
        self.known, self.mean, self.covariance = self.known[index], self.mean[index], self.covariance[index]

    def move(self, device: torch.device) -> None:
        """Move to another device."""
        self.known, self.mean, self.covariance = (t.to(device) for t in (self.known, self.mean, self.covariance))

    def restore(self, count: list[int], mean: Tensor, covariance: Tensor) -> None:
        """Take over another one's moments."""
        self.count, self.mean, self.covariance = count, mean, covariance
        self.known = torch.tensor(count, device=mean.device)


class DeviceMoments:
    """Means and covariances by layer, device and length, for as long as anyone has them."""

    def __init__(self) -> None:
        self._means: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
        self._covariances: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()

    def get(
        self, layer: int, lengths: Sequence[int], device: torch.device, make: Callable[[int, int], Pair]
    ) -> list[Pair]:
        """As `KeyMoments.layer`; `make(layer, length)` gives what nobody has, without the dimension of rows."""
        found = []
        with _placing:
            for length in lengths:
                at = layer, device, length
                if (placed := self._in_use(at)) is None:
                    mean, covariance = (moment.float().to(device).contiguous() for moment in make(layer, length))
                    placed = self._means[at], self._covariances[at] = mean.unsqueeze(0), covariance.unsqueeze(0)
                found.append(placed)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all moments alive."""
        with _placing:
            pairs = [pair for at in list(self._means) if (pair := self._in_use(at)) is not None]
        return sum(mean.nbytes + covariance.nbytes for mean, covariance in pairs)

    def _in_use(self, at: tuple[int, torch.device, int]) -> Pair | None:
        mean, covariance = self._means.get(at), self._covariances.get(at)
        return None if mean is None or covariance is None else (mean, covariance)


class LayerMoments:
    """What one layer keeps of another prompt's moments, from step to step.

    The pair for bulks of one length is shared by all caches. Rows of several lengths lie in tensors of the layer's own:
    when a length changes, its row alone is written anew.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._lengths: tuple[int, ...] = ()
        self._shared: list[Pair] = []
        self._pair: Pair | None = None

    def get(
        self,
        moments: Any,
        layer: int,
        lengths: tuple[int, ...],
        device: torch.device,
        own: Callable[[Tensor, int], Tensor],
    ) -> Pair:
        """Mean `[lengths, kv_heads, dim]` and covariance, those heads of `moments` (`KeyMoments`) that `own` leaves."""
        key = weakref.ref(moments), len(lengths), device
        if self._pair is None or self._key != key or (self._lengths != lengths and len(lengths) == 1):
            shared = moments.layer(layer, lengths, device)
            pairs = [(own(mean, 1), own(covariance, 1)) for mean, covariance in shared]
            if len(lengths) == 1:
                self._shared, self._pair = shared, pairs[0]
            else:
                with torch.inference_mode(False):  # it may be written to outside inference mode
                    means, covariances = zip(*pairs, strict=True)
                    self._shared, self._pair = [], (torch.cat(means), torch.cat(covariances))
        elif self._lengths != lengths:
            for row, (old, new) in enumerate(zip(self._lengths, lengths, strict=True)):
                if old != new:
                    for mine, made in zip(self._pair, moments.layer(layer, [new], device)[0], strict=True):
                        mine[row] = own(made, 1)[0]
        self._key, self._lengths = key, lengths
        return self._pair

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's own tensors."""
        return 0 if self._pair is None or self._shared else sum(part.nbytes for part in self._pair)

    def __deepcopy__(self, memo: dict) -> "LayerMoments":
        return LayerMoments()  # a copy asks for the same, and so finds it
