"""Another prompt's key moments as layers hold them."""

import weakref
from typing import Any

import torch

from ..models.sharding import HeadShard
from .running import Pair, flatten


class LayerMoments:
    """What one layer keeps of another prompt's moments, from step to step. The pair for bulks of one length is shared
    by all caches. Rows of several lengths lie in tensors of its own: a new length's row alone is written anew."""

    def __init__(self) -> None:
        self._pair: Pair
        self._flat: Pair  # views of these
        self._key: Any = None
        self._lengths: tuple[int, ...] = ()

    def get(
        self,
        moments: Any,
        layer: int,
        lengths: tuple[int, ...],
        device: torch.device,
        shard: HeadShard,
        sizes: tuple[int | None, int | None] = (None, None),
    ) -> Pair:
        """Mean `[lengths * kv_heads, 1, dim]` and covariance of the shard's heads, by `moments` (`KeyMoments`), which
        the others are for."""
        known = self._key
        if known is not None and self._lengths == lengths and known[0]() is moments and known[1] == device:
            return self._flat
        key = weakref.ref(moments), device, len(lengths) if len(lengths) > 1 else lengths
        before, self._key = self._key, None  # what an error leaves half-written is asked for anew
        if before != key:
            self._pair, *more = moments.find_layer(layer, lengths, device, shard, sizes)
            if more:
                with torch.inference_mode(False):  # it may be written to outside inference mode
                    means, covariances = zip(self._pair, *more, strict=True)
                    self._pair = torch.cat(means), torch.cat(covariances)
            self._flat = flatten(*self._pair)
        elif self._lengths != lengths:
            for row, (old, new) in enumerate(zip(self._lengths, lengths, strict=True)):
                if old != new:
                    (found,) = moments.find_layer(layer, [new], device, shard, sizes)
                    for mine, made in zip(self._pair, found, strict=True):
                        mine[row] = made[0]
        self._key, self._lengths = key, lengths
        return self._flat

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's own tensors."""
        return sum(part.nbytes for part in self._pair) if len(self._lengths) > 1 else 0

    def __deepcopy__(self, memo: dict) -> "LayerMoments":
        return LayerMoments()  # a copy asks for the same, and so finds it
