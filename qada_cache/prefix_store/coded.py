"""Tokens in few bits, stored as they are held: a file for each closed segment of the bulk, the first one with the
sinks, and one for the tokens behind them, as the model made these."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache import QAdACache
from ..models import find_inputs_device
from ..sketch import LAST_TOKENS, MIN_TOKENS, SEGMENT_TOKENS, Layout
from ..sketch.codec import CODES, has_whole_order, list_fields
from ..sketch.coded import RecordLayout, fit_records
from ..state import Options
from ..state.layer import QAdALayer
from ..state.snapshots import Snapshot
from ..storage import TokenStore
from ..storage.coded_bulk import CodedBulk
from .folder import CODED, INDEXER, Folder, Header, Layers, Listing
from .keeping import store_states, write_segment
from .naming import Name, describe_reading, make_digest, name_segment

_PARTS = ("keys", "values")


def find_device(cache: QAdACache) -> torch.device:
    """Where the cache's model takes its inputs."""
    model = cache._shared.model.get()
    return torch.device("cpu") if model is None else find_inputs_device(model)


def copy_beside(layer: QAdALayer, row: int, start: int, stop: int) -> dict[str, Tensor]:
    """What a layer keeps beside its store of real tokens `start..stop` of one row, as a file has it."""
    return {name: held[row : row + 1, start:stop].cpu() for name, held in layer.beside.items()}


def find_edge(sinks: int, number: int) -> int:
    """The first token of file `number` of a text."""
    return sinks + number * SEGMENT_TOKENS if number else 0


def describe_coded(options: Options) -> str:
    """How a cache with these options, which holds few bits, reads and codes tokens."""
    named = [getattr(options, name) for name in ("bulk_bits", "sink_tokens", "sketch_bits")]
    return make_digest([CODED, *named, describe_reading(options)], options.query_energies)


def store_row(
    folder: Folder,
    listing: Listing,
    layers: Sequence[QAdALayer],
    row: int,
    *,
    root: str,
    tokens: Sequence[int],
    reading: str,
    about: dict[str, Any],
    snapshots: Iterable[Snapshot],  # of other layers than ours, if the row is all that they hold
    max_bytes: int,
) -> tuple[int, int]:
    """As `keeping.store_row`, of tokens in few bits. What is behind closed segments replaces what was before."""
    stores = [layer.store for layer in layers if layer.store is not None]
    sinks, chain, written = stores[0].sinks, list[Name](), 0
    closed = _count_whole(stores, row, len(tokens))
    try:
        for number in range(closed + 1):
            parent, whole = chain[-1].own if chain else root, number < closed
            start, stop = find_edge(sinks, number), find_edge(sinks, number + 1) if whole else len(tokens)
            part = list(tokens[start:stop])
            name = Name(root[:16], number, parent, name_segment(parent, part, reading))
            if part and name not in listing.files:
                made = [_copy_part(layer, row, start, stop, number if whole else None) for layer in layers]
                header = Header(part, reading, 0, CODED if whole else "", about)
                if not (
                    size := write_segment(folder, listing, name, header, made, max_bytes, chain, (start, len(tokens)))
                ):
                    return start, written
                written += size
            chain += [name] if part else []
        for number, name in enumerate(chain):
            rest = list(tokens[find_edge(sinks, number) :])
            _remove_outlived(folder, listing, name.parent, name, rest, reading)
    finally:
        folder.touch(listing, chain)
    arguments: dict[str, Any] = {"exact": 0, "reading": reading, "about": about, "max_bytes": max_bytes}
    arguments |= {"chain": [root, *(name.own for name in chain[:closed])]}
    arguments["starts"] = [find_edge(sinks, number) for number in range(closed + 1)]
    return len(tokens), written + store_states(folder, listing, tokens=tokens, snapshots=snapshots, **arguments)


def _count_whole(stores: Sequence[TokenStore], row: int, tokens: int) -> int:
    """The closed segments of a row that every layer has coded once."""
    most = (tokens - stores[0].sinks) // SEGMENT_TOKENS
    for store in stores:
        assert isinstance(store.bulk, CodedBulk)
        most = min([most, store.bulk.stored[row] // SEGMENT_TOKENS, *store.bulk.recoded[row]])
    return max(most, 0)


def _copy_part(layer: QAdALayer, row: int, start: int, stop: int, segment: int | None) -> dict[str, Tensor]:
    """A file's tensors of one layer, on the host: those of a closed segment, or of tokens as the model made them."""
    store, own = layer.store, slice(row, row + 1)
    assert store is not None
    bulk = store.bulk
    assert isinstance(bulk, CodedBulk)
    first = start if segment is None else stop - SEGMENT_TOKENS
    keys, values = store.copy_tokens(own, start, stop if segment is None else first)
    found = {"keys": keys[0].cpu(), "values": values[0].cpu(), **copy_beside(layer, row, start, stop)}
    if segment is not None:
        assert bulk.sketch is not None
        bulk.synchronize()
        at = segment * SEGMENT_TOKENS
        code = bulk.sketch.find_segment(row, segment)
        assert code is not None  # as it is closed
        found |= {name: code[name].cpu() for name in CODES}
        found["records"] = bulk.tensors[0][row, :, at : at + SEGMENT_TOKENS, : bulk.layout.size].cpu().contiguous()
    return found


def _remove_outlived(folder: Folder, listing: Listing, parent: str, new: Name, tokens: list[int], reading: str) -> None:
    """Remove files of tokens as the model made them, if `new` or what follows it has these."""
    for name, old in folder.list_following(listing, parent):
        if name != new and not old.sketch and old.reading == reading and old.tokens == tokens[: len(old.tokens)]:
            folder.remove(listing, name)


def has_shapes(sizes: tuple[int, int, int], dtype: torch.dtype, options: Options, layer: dict[str, Tensor]) -> bool:
    """Whether a closed segment fits a layer of these `(kv_heads, dim, value_dim)` with these options."""
    kv_heads, dim, value_dim = sizes
    layout, records = Layout.from_bits(dim, options.sketch_bits), layer["records"]
    coded = RecordLayout.from_bits(dim, value_dim, options.bulk_bits)
    if layout is None or coded is None:
        return False
    fields = list_fields(dim, value_dim, layout.count, SEGMENT_TOKENS)
    fits = all((layer[name].dtype, layer[name].shape[1:]) == fields[name] for name in CODES)
    fits = fits and {len(layer[name]) for name in (*CODES, "records")} == {kv_heads}
    fits = fits and (records.dtype, records.shape[1:]) == (torch.uint8, (SEGMENT_TOKENS, coded.size))
    return fits and layer["keys"].dtype == dtype and has_whole_order(layer["order"])


@torch.no_grad()
@torch.inference_mode(False)  # what is made here is written to later, perhaps outside inference mode
def fill(cache: QAdACache, layers: Sequence[QAdALayer], pieces: Sequence[tuple[Layers, int]]) -> None:
    """Fill an empty cache with one row's pieces: segments, then perhaps tokens as the model made them."""
    device = find_device(cache)
    total = sum(taken for _, taken in pieces)
    for place, layer in enumerate(layers):
        held = [{name: part.to(device) for name, part in found[place].items()} for found, _ in pieces]
        segments = [each for each in held if "records" in each]
        behind = [held[-1][part][None] for part in _PARTS] if len(held) > len(segments) else None
        if behind is not None:
            behind = [part[:, :, : pieces[-1][1]] for part in behind]
        like = [held[0][part][None, :, :0] for part in _PARTS]
        layer.lazy_initialization(*like)
        assert layer.store is not None
        seen = _fill(layer.store, segments, like if behind is None else behind)
        layer.seen = seen
        layer.crop(total - seen)
        if INDEXER in held[0]:
            parts = [each[INDEXER][:, :taken] for each, (_, taken) in zip(held, pieces, strict=True)]
            layer.restore_beside({INDEXER: torch.cat(parts, dim=1)})
        layer.store.exact, layer.store.alike = [0], [total]


def _fill(store: TokenStore, segments: Sequence[dict[str, Tensor]], behind: Sequence[Tensor]) -> int:
    """Fill an empty store of one row; returns its tokens. There are zeros behind too few tokens for the segments to be
    closed, for a crop to take away."""
    if not segments:
        store.absorb(behind[0], behind[1], None)
        return behind[0].shape[2]
    bulk, sketch, coded = store.bulk, store.bulk.sketch, len(segments) * SEGMENT_TOKENS
    assert isinstance(bulk, CodedBulk)
    assert sketch is not None
    beside = max(LAST_TOKENS, MIN_TOKENS - coded)  # tokens of the bulk that keep the segments closed
    least = beside + store.window
    keys, values = (torch.nn.functional.pad(part, (0, 0, 0, max(0, least - part.shape[2]))) for part in behind)
    store.reserve(store.window)
    for near, name, part in zip((store.near_keys, store.near_values), _PARTS, (keys, values), strict=True):
        near[0, :, : store.sinks] = segments[0][name]
        near[:, :, store.sinks : store.sinks + store.window] = part[:, :, beside:least]
    store.end = store.window
    store.lengths, store.flushed = [store.sinks + coded + least], [store.sinks + coded + beside]
    records = torch.cat([each["records"] for each in segments], dim=1)[None]
    bulk.fill(None, (fit_records(records, bulk.stride),), [coded])
    bulk.put_beside(keys[:, :, :beside], values[:, :, :beside], [coded + beside])
    sketch.adopt(bulk, 0, segments)
    sketch.append_from(bulk, slice(0, 1))
    store.absorb(keys[:, :, least:], values[:, :, least:], None)  # and the moments
    return store.lengths[0]
