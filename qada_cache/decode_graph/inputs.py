"""Whether a CUDA graph can hold a decode step."""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import forward as attention
from ..attention import generation
from ..state import Shared
from ..state.layer import QAdALayer
from ..versions import CACHE_NAMES
from .capturing import GRAPHS
from .step import EAGER

_INPUTS = ("input_ids", "inputs_embeds", "per_layer_inputs", "position_ids")  # of a decoder, that differ by step
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")  # implementations that need no mask made on the host


@functools.cache
def takes_positions(decoder: type[Any]) -> bool:
    """Whether this class's forward function takes `position_ids`. Without them the host counts, not a replay."""
    return "position_ids" in inspect.signature(decoder.forward).parameters


def find_inputs(
    layers: list[Any], decoder: nn.Module, kwargs: dict[str, Any], *, followed: bool, sliding_tokens: int
) -> dict[str, Tensor] | None:
    """The decoder's inputs in `kwargs` if a graph can hold this step, else None. With `followed` (`is_followed_by`) a
    graph held the step before. Windows of sliding layers hold a row's `sliding_tokens` newest, padding included."""
    other = {name: value for name, value in kwargs.items() if value is not None and name not in CACHE_NAMES}
    inputs = {name: other.pop(name) for name in _INPUTS if name in other}
    mask, tokens = other.pop("attention_mask", None), inputs.get("input_ids", inputs.get("inputs_embeds"))
    required = other.pop("use_cache", True), other.pop("return_dict", True)
    other.pop("logits_to_keep", None)  # read by the language model's head, not by the decoder
    if any(value is not False for value in other.values()) or not all(required) or tokens is None:
        return None
    if not takes_positions(type(decoder)):  # type: ignore[arg-type]  # a class is hashable
        return None
    first = layers[0] if layers else None
    if not isinstance(first, QAdALayer) or first.store is None:
        return None
    store, device, shared = first.store, tokens.device, first.shared
    # A step behind a replay may have to flush first. One without pending tokens, before it or then, may read a prompt's
    # chunk. A store without tokens may have no rows either.
    has_room = store.has_room or (followed and store.end == store.capacity)
    if not store.end or not has_room or tokens.shape[:2] != (store.batch, 1):
        return None
    if (store.end <= store.window or not store.has_room) and generation.find_prompt().in_chunks:
        return None
    if first.device != device or not (followed or _are_alike(layers)):
        return None
    if shared.progress.changing or shared.progress.reached < shared.model.layers[-1]:
        return None  # a pass was interrupted: the layers will refuse this one
    if device.type not in GRAPHS or torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
        return None
    if shared.model.window is not None and first.seen >= shared.model.window:
        return None  # the layers will refuse this pass
    if decoder.training or shared.observer is not None or not (followed or _is_allowed(shared)):
        return None
    attention.check_switched_on(shared.model.config)
    padded = first.padding.known.numel() > 0
    if padded and first.padding.known.shape[1] > first.seen - sliding_tokens:
        return None  # windows hold padding, which the mask that a replay leaves out would hide
    if (mask is not None or padded) and not _shows_all(first, mask):
        return None
    if "position_ids" not in inputs and padded:  # a decoder may derive them from padding
        return None
    return inputs


def _are_alike(layers: list[Any]) -> bool:
    """Whether all layers hold tokens, with the newest in the same column, on one device, and none is in a pass."""
    if any(not isinstance(layer, QAdALayer) or layer.store is None for layer in layers):
        return False
    first = layers[0]
    return all(
        layer.store.end == first.store.end and layer.incoming is None and layer.device == first.device
        for layer in layers
    )


def _is_allowed(shared: Shared) -> bool:
    """Whether a graph can hold what the options and the config ask for."""
    options, config = shared.options, shared.model.config
    if config.output_hidden_states or config.output_attentions or not getattr(config, "return_dict", True):
        return False
    if config._attn_implementation not in (*_ATTENTION, EAGER):
        return False
    frozen = options.tracks_moments and not options.update_moments  # the host reads the counts of frozen moments
    return not frozen and not options.audit_every


def _shows_all(layer: QAdALayer, mask: Any) -> bool:
    """Whether `mask` shows each row's next token and hides only the known padding before it. Models that read images
    give a dict of masks, by kind of layer. Looking at a mask waits for the device."""
    if isinstance(mask, dict):
        masks = [each for each in mask.values() if each is not None]
        if not all(isinstance(each, Tensor) and _shows(layer, each) for each in masks):
            return False
        # A mask over a sliding window does not cover padding before the window.
        return not layer.padding.known.numel() or any(each.shape[-1] == layer.seen + 1 for each in masks)
    return isinstance(mask, Tensor) and mask.dim() == 2 and _shows(layer, mask)


def _shows(layer: QAdALayer, mask: Tensor) -> bool:
    padding, seen = layer.padding, layer.seen + 1
    assert layer.store is not None
    if mask.dim() == 2:
        return mask.shape == (layer.store.batch, seen) and padding.is_all_that_hides(mask)
    if mask.shape[-1] != seen:  # a mask over a sliding window
        return mask.dim() == 4 and bool((mask if mask.dtype == torch.bool else mask == 0).all())
    call: dict[str, Any] = {"batch": layer.store.batch, "seen": seen, "queries": 1, "first": True}
    return layer.shared.forward_pass.read_padding(padding, mask, **call)[1:] == (None, None)
