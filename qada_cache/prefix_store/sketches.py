"""Stores the sketch of a bulk in segments' files, as coding keys again takes longer than reading codes.

The code of a whole segment of a bulk depends only on the segment's keys, so it does not change as a text grows. A file
holds the code of the bulk's segment that ends among its tokens. Caches with another layout or code make their own.
"""

from collections.abc import Sequence

import torch

from ..sketch import MIN_TOKENS, SEGMENT_TOKENS, Layout, count_segments
from ..sketch.codec import CODES, MIN_ENERGY, MIN_VARIANCE, has_whole_order, list_fields
from ..state import Options
from ..storage import TokenStore
from ..storage.transfers import bring
from .folder import Layers
from .naming import FILE_TOKENS, make_digest


def digest_sketch(options: Options) -> str:
    """A digest of all that a cache's codes depend on beside keys; empty without a sketch."""
    if not options.selects_tokens:
        return ""
    values = [options.sink_tokens, options.sketch_bits, SEGMENT_TOKENS, MIN_ENERGY, MIN_VARIANCE]
    return make_digest(values, options.query_energies)


def find_code(store: TokenStore, row: int, start: int, stop: int) -> dict[str, torch.Tensor]:
    """The code of the bulk's segment that ends among tokens `start..stop` of a row, as tensors by name. Empty if no
    segment ends there."""
    sketch, index = store.sketch, (stop - store.sinks) // SEGMENT_TOKENS - 1
    if sketch is None or index < 0 or index == (start - store.sinks) // SEGMENT_TOKENS - 1:
        return {}
    found = sketch.find_segment(row, index)
    if found is None:  # the sketch has this segment still open
        first, own = store.sinks + index * SEGMENT_TOKENS, slice(row, row + 1)
        keys, _ = store.copy_tokens(own, first, first + SEGMENT_TOKENS)
        found = {name: part[0] for name, part in sketch.code_keys(keys).items()}
    return bring({name: found[name] for name in CODES})


def has_code(layer: dict[str, torch.Tensor], layout: Layout) -> bool:
    """Whether the codes of `layer` have the shapes and dtypes that `layout` gives its keys."""
    (heads, _, dim), value_dim = layer["keys"].shape, layer["values"].shape[2]
    fields = list_fields(dim, value_dim, layout.count, SEGMENT_TOKENS)
    fits = all(
        (layer[name].dtype, layer[name].shape[1:]) == fields[name] and len(layer[name]) == heads for name in CODES
    )
    return fits and has_whole_order(layer["order"])


def restore(store: TokenStore, row: int, pieces: Sequence[Layers], place: int) -> None:
    """Fill the empty sketch of `store`, the layer at `place` in each of `pieces`, for a row's bulk: with codes from the
    pieces, up to the first one without codes, and by coding the rest."""
    sketch, length = store.sketch, store.bulk.lengths[row]
    assert sketch is not None
    known = []
    for index in range(count_segments(length) - 1 if length >= MIN_TOKENS else 0):
        last = store.sinks + (index + 1) * SEGMENT_TOKENS - 1  # its last token
        layer = pieces[last // FILE_TOKENS][place]
        if not layer.keys() >= {*CODES}:
            break
        known.append(layer)
    if known:
        sketch.adopt(store.bulk, row, known)
    sketch.append_from(store.bulk, slice(row, row + 1))
