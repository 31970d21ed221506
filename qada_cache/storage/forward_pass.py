"""Padding and masks of one forward pass, computed by its first layer for all."""

import weakref
from typing import Any

import torch
from torch import Tensor

from .geometry import Geometry, call_geometry
from .padding import Padding


class ForwardPass:
    """Padding and geometry of the pass under way.

    Args:
        sinks, window: tokens, as for `call_geometry`.

    Attributes:
        reads_chunk: whether the pass reads a chunk of `generate`'s prompt, which is exact whatever its length.
    """

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window
        self.reads_chunk = False
        self._mask: tuple[Any, Any, tuple[Padding, Tensor | None]] | None = None
        self._geometry: tuple[Any, Geometry] | None = None

    def padding_after(
        self, padding: Padding, mask: Tensor | None, *, batch: int, seen: int, queries: int
    ) -> tuple[Padding, Tensor | None]:
        """`Padding.after`, once per mask: every layer of a forward pass is handed the same tensor."""
        if mask is None:
            return padding.after(mask, batch=batch, seen=seen, queries=queries)
        call = (padding, batch, seen, queries)
        if self._mask is None or self._mask[0]() is not mask or self._mask[1] != call:
            self._mask = (weakref.ref(mask), call, padding.after(mask, batch=batch, seen=seen, queries=queries))
        return self._mask[2]

    def geometry(
        self,
        *,
        lengths: list[int],
        flushed: list[int],
        end: int,
        queries: int,
        valid: Tensor | None,
        device: torch.device,
    ) -> Geometry:
        """`geometry.call_geometry`, once per call: layers move in lockstep, so the first one's serves them all."""
        # By content, not identity: a layer whose state differs must get its own masks.
        key = (tuple(lengths), tuple(flushed), end, queries, None if valid is None else valid.numpy().tobytes(), device)
        if self._geometry is None or self._geometry[0] != key:
            made = call_geometry(
                lengths=lengths,
                flushed=flushed,
                end=end,
                queries=queries,
                valid=valid,
                sinks=self.sinks,
                window=self.window,
                device=device,
            )
            self._geometry = (key, made)
        return self._geometry[1]
