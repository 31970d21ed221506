"""Key moments on devices: made once for all caches, dropped with the last that uses them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

KEPT = 2  # moments of at least so many lengths stay on a device
# Caches in several threads may share moments. One lock for all, as locks cannot be copied.
_placing = threading.Lock()


class Placed:
    """Means and covariances by layer, device and length.

    Attributes:
        kept: those of the latest calls, by layer and device and then by length, the latest last.
    """

    def __init__(self) -> None:
        self.kept: dict[Any, dict[int, tuple[Tensor, Tensor]]] = {}
        # All moments alive: callers may keep theirs.
        self._means: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()
        self._covariances: WeakValueDictionary[Any, Tensor] = WeakValueDictionary()

    def get(
        self,
        layer: int,
        lengths: Sequence[int],
        device: torch.device,
        make: Callable[[int, int], tuple[Tensor, Tensor]],
    ) -> list[tuple[Tensor, Tensor]]:
        """As `KeyMoments.layer`; `make(layer, length)` gives missing moments, without the dimension of rows."""
        with _placing:
            kept = self.kept.setdefault((layer, device), {})
            found = []
            for length in lengths:
                at = layer, device, length
                if (placed := kept.pop(length, None) or self._in_use(at)) is None:
                    mean, covariance = (moment.float().to(device).contiguous() for moment in make(layer, length))
                    placed = mean.unsqueeze(0), covariance.unsqueeze(0)
                    self._means[at], self._covariances[at] = placed
                kept[length] = placed  # the latest are last
                found.append(placed)
            while len(kept) > max(KEPT, len(lengths)):
                del kept[next(iter(kept))]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all moments alive."""
        with _placing:
            pairs = [pair for at in list(self._means) if (pair := self._in_use(at)) is not None]
        return sum(mean.nbytes + covariance.nbytes for mean, covariance in pairs)

    def _in_use(self, at: tuple[int, torch.device, int]) -> tuple[Tensor, Tensor] | None:
        mean, covariance = self._means.get(at), self._covariances.get(at)
        return None if mean is None or covariance is None else (mean, covariance)
