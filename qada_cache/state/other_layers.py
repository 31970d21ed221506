"""Transformers' own layers, beside ours in a cache: what their verbs lack."""

import copy
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin


def copy_layer(layer: Any) -> Any:
    """A copy of a layer that shares its tensors, which their verbs replace and never write to."""
    twin = copy.copy(layer)
    vars(twin).update({name: dict(held) for name, held in vars(layer).items() if isinstance(held, dict)})
    return twin


def crop_layer(layer: Any, tokens: int) -> None:
    """Have a layer remove its newest `-tokens`; nothing, if it is empty. RuntimeError, if it cannot: one that records
    what is past would take the tokens out of a part of its linear states."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        is_empty = not getattr(layer, "get_seq_length", int)()
    elif not (is_empty := not any(layer.has_previous_state.values())) and tokens and not layer.is_croppable:
        raise RuntimeError(
            "crop cannot take tokens out of linear layers, whose states are of the whole text: reset() and read the "
            "text again, or go on from a copy.deepcopy that was made before these tokens"
        )
    if not is_empty:
        layer.crop(tokens)


def is_whole(layer: Any) -> bool:
    """Whether `crop_layer` can take any number of tokens out of a layer: it holds nothing, or all that it has seen."""
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.cumulative_length < layer.sliding_window
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return not any(layer.has_previous_state.values())
    return not hasattr(layer, "get_seq_length")  # one without tokens


def move_layer(layer: Any, device: torch.device) -> None:
    """Move a layer's keys to a device: a cache that was loaded by a config does not know its model's."""
    if getattr(layer, "keys", None) is not None and layer.keys.device != device:
        layer.device = device
        layer.prefetch()


def drop_tensors(layer: Any) -> None:
    """Drop a layer's tensors, and what was noted of them, before it is reset. Its own reset keeps linear states, which
    are of one number of rows; in the oldest transformers supported it keeps the length of keys."""
    if isinstance(layer, DynamicLayer):
        layer.keys = layer.values = None
        layer.is_initialized = False
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for kind in ("conv_states", "recurrent_states"):
            for states, empty in ((getattr(layer, kind), None), (getattr(layer, f"is_{kind}_initialized"), False)):
                states.update(dict.fromkeys(states, empty))
        layer.conv_kernel_size.update(dict.fromkeys(layer.conv_kernel_size))
        layer.device = layer.dtype = None
