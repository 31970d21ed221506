"""Tokens out of a QAdACache, and into an empty one, as if an exact call had read them there."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import QAdACache
from ..key_moments.models import inputs_device, sizes
from ..state.layer import QAdALayer
from ..storage.padding import NONE, Padding
from .folder import Layers

Pieces = Sequence[tuple[Layers, int]]  # of one row: segments in order, and of each the first tokens that are taken


def layers_of(cache: QAdACache) -> list[QAdALayer]:
    """All layers of a cache; a NotImplementedError if any is of another kind, which cannot be cut where texts part."""
    if not cache.layers or not all(isinstance(layer, QAdALayer) for layer in cache.layers):
        raise NotImplementedError(
            f"PrefixStore keeps no prompts of {cache._shared.model.model_type}, whose sliding or linear layers cannot "
            "be cropped to a common beginning: save() and QAdACache.load keep a whole prompt"
        )
    return list(cache.layers)  # type: ignore[arg-type]


@torch.no_grad()
def copy_tokens(cache: QAdACache, row: int, start: int, stop: int) -> Layers:
    """Keys and values of real tokens `start..stop` of one row, on the host."""
    found = []
    for layer in layers_of(cache):
        assert layer.store is not None
        keys, values = layer.store.tokens(slice(row, row + 1), start, stop)
        found.append((keys[0].cpu(), values[0].cpu()))
    return found


@torch.no_grad()
@torch.inference_mode(False)  # what is made here is written to later, perhaps outside inference mode
def fill(cache: QAdACache, rows: Sequence[Pieces], exact: Sequence[int], seen: int) -> None:
    """Let an empty cache hold `seen` logical tokens a row: padding, then the row's pieces. Of row `r` the first
    `exact[r]` tokens were read exactly, wherever they come from."""
    lengths = [sum(taken for _, taken in pieces) for pieces in rows]
    known = torch.ones(len(rows), seen, dtype=torch.bool)
    for row, length in enumerate(lengths):
        known[row, : seen - length] = False
    padding, valid = (NONE, None) if known.all() else (Padding(known), known)
    model = cache._shared.model.get()
    device = torch.device("cpu") if model is None else inputs_device(model)
    for place, layer in enumerate(layers_of(cache)):
        keys, values = (_joined(rows, lengths, place, part, seen).to(device) for part in (0, 1))
        layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
        assert layer.store is not None
        layer.store.absorb(keys, values, valid)
        layer.store.exact, layer.store.alike = list(exact), list(lengths)
        layer.seen, layer.padding = seen, padding


def _joined(rows: Sequence[Pieces], lengths: Sequence[int], place: int, part: int, seen: int) -> Tensor:
    """The keys (`part` 0) or values of one layer, `[rows, kv_heads, seen, dim]`, zeros where there is padding."""
    like = next(layers[place][part] for pieces in rows for layers, _ in pieces)
    made = like.new_empty(len(rows), like.shape[0], seen, like.shape[2])
    for row, (pieces, length) in enumerate(zip(rows, lengths, strict=True)):
        at = seen - length
        made[row, :, :at] = 0
        for layers, taken in pieces:
            made[row, :, at : at + taken] = layers[place][part][:, :taken]
            at += taken
    return made


def has_shapes(model: PreTrainedModel, count: int, layers: Layers) -> bool:
    """Whether these are keys and values of a model with so many layers."""
    config = model.config.get_text_config(decoder=True)
    _, _, kv_heads, dim = sizes(config)
    value_dim = getattr(config, "v_head_dim", None) or dim
    return len(layers) == count and all(
        (keys.shape[0], keys.shape[2], values.shape[2]) == (kv_heads, dim, value_dim)
        and keys.dtype == values.dtype == model.dtype
        for keys, values in layers
    )
