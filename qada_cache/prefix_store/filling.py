"""Copies tokens out of a QAdACache, and into an empty one, as if an exact call had read them there."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import QAdACache
from ..cache_file import decode_record
from ..models import forgets_states, list_layer_devices, list_token_sizes
from ..models.latent import find_indexer_dim
from ..sketch import Layout
from ..sketch.codec import CODES
from ..state import BULK_BITS, Options
from ..state.layer import QAdALayer
from ..state.stock import check_stock
from ..storage.coded_bulk import CodedBulk
from ..storage.padding import NONE, Padding
from ..tuned_choice import LEFT_OPEN
from . import coded, sketches
from .folder import INDEXER, Folder, Layers, Listing
from .keeping import store_row
from .naming import EXACT, Name, describe_reading

_PARTS = ("keys", "values")
Pieces = Sequence[tuple[Layers, int]]  # one row's segments in order, each with the number of its first tokens taken


def keep_as_made(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a cache that holds its bulk in the model's dtype and reads the prompt exactly, unless `options` set
    `bulk_bits` or a `prefill_threshold` themselves. A tuned setting does not set these here."""
    given = {name: value for name, value in options.items() if value is not None or name not in LEFT_OPEN}
    return {"bulk_bits": BULK_BITS, "prefill_threshold": 0.0, **given}


def list_layers(cache: QAdACache, *, rows: int = 1) -> list[QAdALayer]:
    """The layers of a cache whose tokens are stored. NotImplementedError if there are none, or if so many rows cannot
    be stored together."""
    if not (ours := [layer for layer in cache.layers if isinstance(layer, QAdALayer)]):
        raise NotImplementedError(
            f"PrefixStore keeps no prompts of {cache._shared.model.model_type}, which has no full-attention layers: "
            "save() and QAdACache.load keep a whole prompt"
        )
    name = cache._shared.model.model_type
    if forgets_states(cache._shared.model.config):
        raise NotImplementedError(
            f"PrefixStore keeps no prompts of {name}, whose linear layers forget their states where several tokens "
            "follow: read whole prompts"
        )
    if rows > 1 and len(ours) < len(cache.layers):
        raise NotImplementedError(
            f"PrefixStore keeps no batches of {name}, which has sliding or linear layers: keep rows one by one"
        )
    return ours


@torch.no_grad()
@torch.inference_mode(False)  # as for `fill`
def flush(cache: QAdACache) -> None:
    """Move pending tokens to the stored bulk. A cache that is filled with these tokens has none pending either. Heads
    decide by the stored bulk, so both caches go on alike."""

    def absorb_nothing(layer: QAdALayer) -> None:
        if (store := layer.store) is not None and store.end > store.window:
            if store.outgrows(0):
                layer.drop_plans()  # they would keep the old buffers beside the new ones
            store.absorb(store.near_keys[:, :, :0], store.near_values[:, :, :0], None)
            layer.drop_old_plans(store.version)

    cache._change("keep", absorb_nothing, lambda layer, index: None)


@torch.no_grad()
def copy_tokens(cache: QAdACache, row: int, start: int, stop: int) -> Layers:
    """A file's tensors of real tokens `start..stop` of one row, on the host."""
    tensors = []
    for layer in list_layers(cache):
        assert layer.store is not None
        keys, values = layer.store.copy_tokens(slice(row, row + 1), start, stop, on_host=True)
        code = sketches.find_code(layer.store, row, start, stop)
        beside = coded.copy_beside(layer, row, start, stop)
        tensors.append({"keys": keys[0], "values": values[0], **code, **beside})
    return tensors


def store_tokens(
    folder: Folder, listing: Listing, cache: QAdACache, place: int, row: Sequence[int], **arguments: Any
) -> tuple[int, int]:
    """Store a row of a cache whose tokens are `row`, or begin with it, as `store_row` and `coded.store_row`:
    nothing, if caches with its options would read other keys from its records."""
    layers, options = list_layers(cache), cache.options
    store = layers[0].store
    assert store is not None
    alike = min(store.alike[place], len(row))
    arguments["snapshots"] = cache.take_snapshots() if store.batch == 1 else []
    if isinstance(store.bulk, CodedBulk):
        if not all(map(coded.is_coded_by_options, layers)):
            return 0, 0
        arguments["reading"] = coded.describe_coded(options)
        return coded.store_row(folder, listing, layers, place, tokens=row[:alike], **arguments)
    reading = describe_reading(options)
    return store_row(
        *(folder, listing),
        tokens=row[:alike],
        exact=alike if reading == EXACT else min(store.exact[place], alike),
        reading=reading,
        sketch=sketches.digest_sketch(options),
        copy=partial(copy_tokens, cache, place),
        **arguments,
    )


@torch.no_grad()
@torch.inference_mode(False)  # tensors made here are written to later, perhaps outside inference mode
def fill(cache: QAdACache, rows: Sequence[Pieces], exact: Sequence[int], seen: int) -> None:
    """Fill an empty cache with `seen` logical tokens a row: padding, then the row's pieces. The first `exact[r]` tokens
    of row `r` were read exactly."""
    if any("records" in layers[0] for pieces in rows for layers, _ in pieces):
        (pieces,) = rows
        coded.fill(cache, list_layers(cache), pieces)
        return
    lengths = [sum(taken for _, taken in pieces) for pieces in rows]
    real = torch.ones(len(rows), seen, dtype=torch.bool, device="cpu")
    for row, length in enumerate(lengths):
        real[row, : seen - length] = False
    padding, valid = (NONE, None) if real.all() else (Padding(real), real)
    device = coded.find_device(cache)
    for place, layer in enumerate(list_layers(cache)):
        keys, values = (_join(rows, lengths, place, part, seen).to(device) for part in _PARTS)
        layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
        store = layer.store
        assert store is not None
        known, shown = (NONE, None) if layer.stores_padding else (padding, valid)
        # No other text begins with padding that is stored among its tokens.
        alike = [0 if layer.stores_padding and length < seen else length for length in lengths]
        if isinstance(store.bulk, CodedBulk):  # needs its own sketch to code tokens, so stored codes are not used
            store.absorb(keys, values, shown)
            store.exact, store.alike, sketch = [0] * len(rows), alike, None
        else:
            sketch, store.bulk.sketch = store.bulk.sketch, None
            store.absorb(keys, values, shown)
            store.exact, store.alike, store.bulk.sketch = list(map(min, exact, alike)), alike, sketch
        for row, pieces in enumerate(rows if sketch is not None else ()):
            sketches.restore(store, row, [layers for layers, _ in pieces], place)
        layer.seen, layer.padding = seen, known
        if any(INDEXER in layers[place] for pieces in rows for layers, _ in pieces):
            layer.restore_beside({INDEXER: _join(rows, lengths, place, INDEXER, seen)[:, 0].to(device)})


@torch.no_grad()
@torch.inference_mode(False)  # as for `fill`
def read_states(cache: QAdACache, name: Name, states: Any, tensors: dict[str, Tensor]) -> dict[int, dict[str, Any]]:
    """The attributes of sliding and linear layers in the file `name`, by the layer's index, for `restore_states`; a
    ValueError if they are not those of this cache's layers, as of another version of transformers."""
    devices = list_layer_devices(cache._shared.model.get(), len(cache.layers))
    try:
        others = {str(index): layer for index, layer in enumerate(cache.layers) if not isinstance(layer, QAdALayer)}
        if [*dict(states["dict"])] != [*others]:
            raise ValueError("they are of other layers")
        records = {int(index): decode_record(held, tensors, devices[int(index)]) for index, held in states["dict"]}
        for index, layer in others.items():
            check_stock(layer, records[int(index)])
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"the states in {name} cannot be used: {error}") from error
    return records


def restore_states(cache: QAdACache, records: dict[int, dict[str, Any]]) -> None:
    """Put what `read_states` found into the sliding and linear layers."""
    for index, record in records.items():
        vars(cache.layers[index]).update(record)


def _join(rows: Sequence[Pieces], lengths: Sequence[int], place: int, part: str, seen: int) -> Tensor:
    """All rows' tensor `part` of layer number `place`, `[rows, kv_heads, seen, dim]`, with zeros for padding."""
    like = next(layers[place][part] for pieces in rows for layers, _ in pieces)
    joined = like.new_empty(len(rows), like.shape[0], seen, like.shape[2])
    for row, (pieces, length) in enumerate(zip(rows, lengths, strict=True)):
        start = seen - length
        joined[row, :, :start] = 0
        for layers, taken in pieces:
            joined[row, :, start : start + taken] = layers[place][part][:, :taken]
            start += taken
    return joined


def has_shapes(model: PreTrainedModel, options: Options, indices: Sequence[int], layers: Layers) -> bool:
    """Whether a file's `layers` fit layers number `indices` of the model: keys and values have its shapes and dtype,
    indexers' keys its width, and the sketch's codes, if any, the layout of `options`."""
    config = model.config.get_text_config(decoder=True)
    sizes, indexer_dims = list_token_sizes(config), [find_indexer_dim(config, index) for index in indices]
    if [layer[INDEXER].shape[2] if INDEXER in layer else 0 for layer in layers] != indexer_dims:
        return False
    pairs = zip(layers, sizes * len(layers) if len(sizes) == 1 else sizes, strict=True)
    if layers and "records" in layers[0]:
        return all(coded.has_shapes(layer_sizes, model.dtype, options, layer) for layer, layer_sizes in pairs)
    return all(
        (layer["keys"].shape[0], layer["keys"].shape[2], layer["values"].shape[2]) == layer_sizes
        and layer["keys"].dtype == layer["values"].dtype == model.dtype
        and (not layer.keys() & {*CODES} or _has_code(layer, layer_sizes[1], options))
        for layer, layer_sizes in pairs
    )


def _has_code(layer: dict[str, Tensor], dim: int, options: Options) -> bool:
    layout = Layout.from_bits(dim, options.sketch_bits)
    return layout is not None and sketches.has_code(layer, layout)
