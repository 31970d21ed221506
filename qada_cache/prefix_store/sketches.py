"""A bulk's sketch in segments' files: to code keys again takes longer than to read them.

Whole segments of a bulk are coded by their own keys, so that they stay as they are while a text goes on. A file holds
the code of the one that ends among its tokens. Caches that lay out or code otherwise make their own.
"""

from collections.abc import Sequence

import torch

from ..sketch import MIN_TOKENS, SEGMENT_TOKENS, Layout, count_segments
from ..sketch.codec import list_fields, quantize_segments
from ..state import Options
from ..storage import TokenStore
from .folder import CODES, Layers
from .naming import SEGMENT_TOKENS as FILE_TOKENS
from .naming import make_digest


def digest_sketch(options: Options) -> str:
    """A digest of all that a cache's codes follow from beside keys; empty without a sketch."""
    if not options.selects_tokens:
        return ""
    return make_digest([options.sink_tokens, options.sketch_bits, SEGMENT_TOKENS], options.query_energies)


def find_code(store: TokenStore, row: int, start: int, stop: int) -> dict[str, torch.Tensor]:
    """The code of the segment of a row's bulk that ends among its tokens `start..stop`, by name; empty if none does."""
    sketch, index = store.sketch, (stop - store.sinks) // SEGMENT_TOKENS - 1
    if sketch is None or index < 0 or index == (start - store.sinks) // SEGMENT_TOKENS - 1:
        return {}
    found = sketch.find_segment(row, index)
    if found is None:  # it is still open there
        first, own = store.sinks + index * SEGMENT_TOKENS, slice(row, row + 1)
        keys, _ = store.copy_tokens(own, first, first + SEGMENT_TOKENS)
        energies = None if sketch.energies is None else sketch.energies.expand(*keys.shape[:2], -1)
        found = {name: part[0] for name, part in quantize_segments(keys, energies, sketch.layout).items()}
    return {name: found[name].cpu() for name in CODES}


def has_code(layer: dict[str, torch.Tensor], layout: Layout) -> bool:
    """Whether this can be the code of a segment of such a layer's keys."""
    (heads, _, dim), value_dim = layer["keys"].shape, layer["values"].shape[2]
    fields = list_fields(dim, value_dim, layout.count, SEGMENT_TOKENS)
    fits = all(
        (layer[name].dtype, layer[name].shape[1:]) == fields[name] and len(layer[name]) == heads for name in CODES
    )
    return fits and torch.equal(
        layer["order"].long().sort(dim=-1).values, torch.arange(dim, device="cpu").expand(heads, 1, -1)
    )


def restore(store: TokenStore, row: int, pieces: Sequence[Layers], place: int) -> None:
    """Let the empty sketch of a layer, the one at `place`, know a row's bulk, by the codes that its pieces hold as far
    as these have them."""
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
