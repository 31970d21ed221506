"""Tensors at fixed addresses for the state of transformers' own layers between steps: linear states and windows.

A pass writes the states of linear layers in place: a graph reads and writes them there. A sliding layer makes new
tensors in each pass. So the graph has its own copy of each window: a replay reads it, and writes the next window there.
The next token sees all of a full window, whatever the token's position, so no mask is needed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from ..state.layer import QAdALayer
from ..state.linear_states import list_states

_SLIDING = ("sliding_attention", "reference_sliding_attention")  # not chunked: a chunk hides the one before it


def can_last(layers: Sequence[Any], config: PreTrainedConfig) -> bool:
    """Whether a graph can ever hold steps of these layers of a cache. It cannot if a layer that is neither ours nor
    sliding has keys, as these grow."""
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    return all(
        isinstance(layer, QAdALayer)
        or not isinstance(layer, CacheLayerMixin)
        or (type(layer) is DynamicSlidingWindowLayer and kind in _SLIDING)
        for layer, kind in zip(layers, types, strict=False)
    )


class LayerStates:
    """The present state of a cache's layers that are not ours: windows of sliding layers, states of linear layers."""

    def __init__(self, layers: Sequence[Any]) -> None:
        others = [layer for layer in layers if not isinstance(layer, QAdALayer)]
        self.sliding = [layer for layer in others if isinstance(layer, DynamicSlidingWindowLayer)]
        self.states = [
            state
            for layer in others
            if isinstance(layer, LinearAttentionCacheLayerMixin)
            for state in list_states(layer).values()
            if state is not None
        ]
        # Whether a pass leaves tensors of the same shapes. Layers with `record_past` grow in each pass.
        self.keeps_shapes = not any(getattr(layer, "record_past", False) for layer in others)
        self.keeps_shapes &= all(map(_is_full, self.sliding))
        # The most tokens of a row that a window shows the next token.
        self.window_tokens = max((layer.sliding_window - 1 for layer in self.sliding), default=0)

    @property
    def windows(self) -> list[Tensor]:
        """Keys and values of sliding layers, `[batch, kv_heads, sliding_window - 1, dim]`."""
        return [part for layer in self.sliding for part in (layer.keys, layer.values) if part is not None]


class Lasting:
    """The tensors that a graph reads and writes: the linear states themselves, and its own copies of the windows."""

    def __init__(self, current: LayerStates) -> None:
        with torch.inference_mode(False):  # they may be written to outside inference mode
            self._windows = [part.clone(memory_format=torch.contiguous_format) for part in current.windows]
        self._states = current.states

    @property
    def tensors(self) -> list[Tensor]:
        """All that a replay writes to."""
        return self._states + self._windows

    def fits(self, current: LayerStates) -> bool:
        """Whether the linear states are the same tensors as here, and the windows have the shapes of those here."""
        if len(current.states) != len(self._states) or not all(map(is_, current.states, self._states)):
            return False
        if len(current.windows) != len(self._windows):
            return False
        return all(_are_alike(*pair) for pair in zip(current.windows, self._windows, strict=True))

    def put(self, current: LayerStates) -> None:
        """Copy the windows of sliding layers here, and make these tensors the layers' keys and values."""
        for own_copy, window in zip(self._windows, current.windows, strict=True):
            if own_copy is not window:
                own_copy.copy_(window)
        for layer, keys, values in zip(current.sliding, self._windows[::2], self._windows[1::2], strict=True):
            layer.keys, layer.values = keys, values

    @contextlib.contextmanager
    def write(self, current: LayerStates) -> Iterator[None]:
        """Inside, a pass writes each sliding layer's next window here. It does so layer by layer, so that at most one
        window is in memory twice."""
        for layer, keys, values in zip(current.sliding, self._windows[::2], self._windows[1::2], strict=True):
            update = functools.partial(_update, layer.update, layer, keys, values)
            layer.update = update  # type: ignore[method-assign]  # of this layer, and for this pass
        try:
            yield
        finally:
            for layer in current.sliding:
                del layer.update


def _update(update: Callable[..., Any], layer: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns what `update`, the layer's own method, returns. The layer's new window is then in `keys` and `values`."""
    keys_and_values = update(*args, **kwargs)
    keys.copy_(layer.keys)
    values.copy_(layer.values)
    layer.keys, layer.values = keys, values
    return keys_and_values


def _is_full(layer: DynamicSlidingWindowLayer) -> bool:
    """Whether the window is full, so that each new token replaces the oldest one."""
    tokens = layer.sliding_window - 1
    return layer.cumulative_length > tokens > 0 and layer.keys is not None and layer.keys.shape[2] == tokens


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
