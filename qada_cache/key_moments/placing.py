"""Key moments on devices: made once for all caches, dropped with the last that uses them."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# Caches in several threads may share moments. One lock for all, as locks cannot be copied.
_placing = threading.Lock()
Pair = tuple[Tensor, Tensor]  # mean and covariance


class Placed:
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


class Kept:
    """What one layer keeps of another prompt's moments, from step to step.

    The pair for bulks of one length is shared by all caches. Rows of several lengths lie in tensors of the layer's own:
    when a length changes, its row alone is written anew.
    """

    def __init__(self) -> None:
        self._asked: Any = None
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
        asked = weakref.ref(moments), len(lengths), device
        if self._pair is None or self._asked != asked or (self._lengths != lengths and len(lengths) == 1):
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
        self._asked, self._lengths = asked, lengths
        return self._pair

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's own tensors."""
        return 0 if self._pair is None or self._shared else sum(part.nbytes for part in self._pair)

    def __deepcopy__(self, memo: dict) -> "Kept":
        return Kept()  # a copy asks for the same, and so finds it
