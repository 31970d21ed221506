"""What transformers' own layers hold between steps, in tensors that stay where they are.

A pass writes the states of linear layers in place: a graph reads and writes them there. A sliding layer makes other
tensors in each pass. A graph has a place of its own for each of these: it reads the window there, and writes there
what the pass leaves. A full window hides nothing of what it holds from the next token, whatever the token's position.
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

_SLIDING = ("sliding_attention", "reference_sliding_attention")  # chunks hide their windows from the next one


def can_last(layers: Sequence[Any], config: PreTrainedConfig) -> bool:
    """Whether a graph can ever hold steps of these layers of a cache: keys of others than sliding ones grow."""
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    return all(
        isinstance(layer, QAdALayer)
        or not isinstance(layer, CacheLayerMixin)
        or (type(layer) is DynamicSlidingWindowLayer and kind in _SLIDING)
        for layer, kind in zip(layers, types, strict=False)
    )


class Held:
    """What the layers of a cache but ours hold now."""

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
        # Layers that record what is past hold more after each pass.
        self.lasts = not any(getattr(layer, "record_past", False) for layer in others)
        self.lasts &= all(map(_is_full, self.sliding))
        # The most tokens of a row that they show the next one.
        self.tokens = max((layer.sliding_window - 1 for layer in self.sliding), default=0)

    @property
    def windows(self) -> list[Tensor]:
        """Keys and values of sliding layers, `[batch, kv_heads, sliding_window - 1, dim]`."""
        return [part for layer in self.sliding for part in (layer.keys, layer.values) if part is not None]


class Lasting:
    """Where a graph reads and writes what was held when it was rehearsed, or the same of another step."""

    def __init__(self, held: Held) -> None:
        with torch.inference_mode(False):  # they may be written to outside inference mode
            self._windows = [part.clone(memory_format=torch.contiguous_format) for part in held.windows]
        self._states = held.states

    @property
    def tensors(self) -> list[Tensor]:
        """All that a replay writes to."""
        return self._states + self._windows

    def fits(self, held: Held) -> bool:
        """Whether this is held there, or can be put there."""
        some, others = held.windows, self._windows
        if len(held.states) != len(self._states) or not all(map(is_, held.states, self._states)):
            return False
        return len(some) == len(others) and all(_are_alike(*pair) for pair in zip(some, others, strict=True))

    def put(self, held: Held) -> None:
        """Have sliding layers hold their windows there."""
        for place, window in zip(self._windows, held.windows, strict=True):
            if place is not window:
                place.copy_(window)
        for layer, keys, values in zip(held.sliding, self._windows[::2], self._windows[1::2], strict=True):
            layer.keys, layer.values = keys, values

    @contextlib.contextmanager
    def write(self, held: Held) -> Iterator[None]:
        """Have a pass meanwhile leave there what the next one reads, layer by layer, so that no more than one window is
        held twice."""
        for layer, keys, values in zip(held.sliding, self._windows[::2], self._windows[1::2], strict=True):
            leaving = functools.partial(_update, layer.update, layer, keys, values)
            layer.update = leaving  # type: ignore[method-assign]  # of this layer, and for this pass
        try:
            yield
        finally:
            for layer in held.sliding:
                del layer.update


def _update(own: Callable[..., Any], layer: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What `layer`'s `own` method returns, and its window in these tensors."""
    seen = own(*args, **kwargs)
    keys.copy_(layer.keys)
    values.copy_(layer.values)
    layer.keys, layer.values = keys, values
    return seen


def _is_full(layer: DynamicSlidingWindowLayer) -> bool:
    """Whether each token takes the place of one that leaves the window."""
    kept = layer.sliding_window - 1
    return layer.cumulative_length > kept > 0 and layer.keys is not None and layer.keys.shape[2] == kept


def _are_alike(some: Tensor, other: Tensor) -> bool:
    return some is other or (some.shape, some.dtype, some.device) == (other.shape, other.dtype, other.device)
