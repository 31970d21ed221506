"""Another prompt's key moments on a layer's device, for the lengths of its rows."""

import weakref
from typing import Any

import torch

from ..models.sharding import HeadShard
from ..replaying import REPLAYING
from .running import Pair, flatten


class LayerMoments:
    """One layer's copy of another prompt's moments, from step to step. For bulks of one length all caches share the
    pair, but on devices that replay steps. There, and for rows of several lengths, tensors are of this layer alone, and
    only rows whose length changed are written anew."""

    def __init__(self) -> None:
        self._pair: Pair  # mean and covariance
        self._flat: Pair  # views of them
        self._key: Any = None  # what the pair was computed for: moments (weakly), device, lengths or their count
        self._lengths: tuple[int, ...] = ()
        self._own = False  # whether they are this layer's alone

    def get(
        self,
        moments: Any,
        layer: int,
        lengths: tuple[int, ...],
        device: torch.device,
        shard: HeadShard,
        sizes: tuple[int | None, int | None] = (None, None),
    ) -> Pair:
        """Mean `[lengths * kv_heads, 1, dim]` and covariance of the shard's heads. The arguments after `moments`
        (`KeyMoments`) are those of its `find_layer`."""
        last = self._key
        if last is not None and self._lengths == lengths and last[0]() is moments and last[1] == device:
            return self._flat
        self._own = len(lengths) > 1 or device.type in REPLAYING
        key = weakref.ref(moments), device, len(lengths) if self._own else lengths
        last, self._key = self._key, None  # after an error in between, the pair is computed anew
        if last != key:
            pairs = moments.find_layer(layer, lengths, device, shard, sizes)
            if self._own:
                with torch.inference_mode(False):  # they may be written to outside inference mode
                    means, covariances = zip(*pairs, strict=True)
                    self._pair = torch.cat(means), torch.cat(covariances)
            else:
                (self._pair,) = pairs
            self._flat = flatten(*self._pair)
        else:
            held = list(self._lengths)
            for row, (old, new) in enumerate(zip(self._lengths, lengths, strict=True)):
                if old != new:
                    # Rows come to a length one after the other: only the first one's moments are averaged.
                    place, pair = (held.index(new), self._pair) if new in held else (0, None)
                    if pair is None:
                        (pair,) = moments.find_layer(layer, [new], device, shard, sizes)
                    for target, source in zip(self._pair, pair, strict=True):
                        target[row] = source[place]
                    held[row] = new
        self._key, self._lengths = key, lengths
        return self._flat

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's own tensors."""
        return sum(part.nbytes for part in self._pair) if self._own else 0

    def __deepcopy__(self, memo: dict) -> "LayerMoments":
        return LayerMoments()  # a copy gets its pair from `moments` again
