"""A pass over a long text as several, one after the other, between which a cache takes snapshots."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..models.latent import INDEXED
from ..storage.padding import NONE
from ..versions import CACHE_NAMES

_SEQUENCES = ("input_ids", "inputs_embeds", "per_layer_inputs")  # `[rows, tokens, ...]`
_RETURNED = ("output_hidden_states", "output_attentions", "output_router_logits")  # beside the last hidden state


def count_new(kwargs: dict[str, Any]) -> int:
    """The tokens of a decoder's pass with these keywords."""
    return next((kwargs[name].shape[1] for name in _SEQUENCES if kwargs.get(name) is not None), 0)


def compute_in_pieces(
    compute: Callable[..., Any], decoder: nn.Module, kwargs: dict[str, Any], sizes: Sequence[int], *, held: int
) -> Any:
    """Compute `compute(**kwargs)`, the decoder's forward on a cache that holds `held` tokens, by one call for each of
    `sizes`, in tokens. None, with nothing computed, if an argument or an asked output cannot be cut."""
    tokens, known = count_new(kwargs), {*_SEQUENCES, *CACHE_NAMES, "attention_mask", "position_ids"}
    kwargs = kwargs | {"attention_mask": _find_plain(kwargs, held + tokens)}
    mask, positions = kwargs["attention_mask"], kwargs.get("position_ids")
    asked = any(kwargs.get(name) or getattr(decoder.config, name, False) for name in _RETURNED)
    asked |= not kwargs.get("return_dict", getattr(decoder.config, "return_dict", True))
    others = any(isinstance(value, (Tensor, dict, list, tuple)) for name, value in kwargs.items() if name not in known)
    fits = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= tokens)
    if asked or others or not fits or (positions is not None and positions.shape[-1] != tokens):
        return None
    if positions is None and "position_ids" in inspect.signature(decoder.forward).parameters:
        # Not all models count positions on from the tokens of a cache (Bamba does not).
        given = next(kwargs[name] for name in _SEQUENCES if kwargs.get(name) is not None)
        positions = held + torch.arange(tokens, dtype=torch.int64, device=given.device)[None]
        kwargs = kwargs | {"position_ids": positions}
    hidden, result, start = list[Tensor](), None, 0
    for size in sizes:
        part, stop = dict(kwargs), start + size
        part.update({name: kwargs[name][:, start:stop] for name in _SEQUENCES if kwargs.get(name) is not None})
        if mask is not None:
            part["attention_mask"] = mask[:, : mask.shape[1] - tokens + stop]
        if positions is not None:
            part["position_ids"] = positions[..., start:stop]
        result = compute(**part)
        hidden.append(result.last_hidden_state)
        start = stop
    assert result is not None
    joined, kept = torch.cat(hidden, dim=1), kwargs.get("logits_to_keep")
    # Layers that read another's keys may have been given the last tokens of a piece alone.
    result.last_hidden_state = joined if not kept or joined.shape[1] == tokens else joined[:, -kept:]
    return result


def _find_plain(kwargs: dict[str, Any], seen: int) -> Any:
    """The mask of a pass. Models that read images hand their decoder a mask for each type of layer. If these hide only
    later tokens: None, as the decoder then makes the same masks itself."""
    mask = kwargs.get("attention_mask")
    full = mask.get("full_attention", mask.get(INDEXED, mask)) if isinstance(mask, dict) else mask
    if isinstance(mask, dict) and isinstance(full, Tensor) and full.dim() == 4:
        _, valid, visible = NONE.extend(full, batch=len(full), seen=seen, queries=count_new(kwargs))
        return None if valid is None and visible is None else mask
    return full
