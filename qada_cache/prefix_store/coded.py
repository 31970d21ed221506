"""Stores tokens in few bits without decoding them. Each closed segment of the bulk has a file, the first one with the
sinks. The last file has the tokens after the closed segments, whose keys and values are the model's, unchanged."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache import QAdACache
from ..models import find_inputs_device
from ..sketch import LAST_TOKENS, MIN_TOKENS, SEGMENT_TOKENS, Layout
from ..sketch.codec import CODES, MIN_ENERGY, MIN_VARIANCE, has_whole_order, list_fields
from ..sketch.coded import RecordLayout, fit_records
from ..state import Options
from ..state.layer import QAdALayer
from ..state.snapshots import Snapshot
from ..storage import TokenStore
from ..storage.coded_bulk import CodedBulk
from ..storage.transfers import bring
from .folder import CODED, INDEXER, Folder, Header, Layers, Listing
from .keeping import store_states, write_segment
from .naming import Name, describe_reading, make_digest, name_segment

_PARTS = ("keys", "values")


def find_device(cache: QAdACache) -> torch.device:
    """The device of the inputs of the cache's model; the CPU if there is no model."""
    model = cache._shared.model.get()
    return torch.device("cpu") if model is None else find_inputs_device(model)


def copy_beside(layer: QAdALayer, row: int, start: int, stop: int) -> dict[str, Tensor]:
    """The tensors that a layer has beside its store, by name, for real tokens `start..stop` of one row:
    `[1, tokens, dim]`, on the host."""
    return {name: tensor[row : row + 1, start:stop].cpu() for name, tensor in layer.beside.items()}


def find_edge(sinks: int, number: int) -> int:
    """The index of the first token in file `number` of a text."""
    return sinks + number * SEGMENT_TOKENS if number else 0


def describe_coded(options: Options) -> str:
    """`Header.reading` of tokens in few bits: a digest of the options that decide how they are read and coded."""
    values = [getattr(options, name) for name in ("bulk_bits", "sink_tokens", "sketch_bits")]
    values += [MIN_ENERGY, MIN_VARIANCE, describe_reading(options)]
    return make_digest([CODED, *values], options.query_energies)


def is_coded_by_options(layer: QAdALayer) -> bool:
    """Whether records were coded by the query energies of the cache's options. Those of a fork by other moments were
    not, nor are those of its file: what they were coded by stays with them."""
    assert layer.store is not None
    sketch = layer.store.bulk.sketch
    assert sketch is not None  # records lie behind one
    assert sketch.energies is not None  # without any, records are coded by ones
    energies = layer.find_query_energies(*sketch.mean_key.shape[1:])
    return sketch.matches(sketch.layout, torch.ones_like(sketch.energies) if energies is None else energies)


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
    snapshots: Iterable[Snapshot],  # states of sliding and linear layers, if the cache has this row alone
    max_bytes: int,
) -> tuple[int, int]:
    """As `keeping.store_row`, for tokens in few bits. The file of tokens after the closed segments replaces older ones
    that its tokens begin with. Nothing is stored from the first segment on of which tokens have been decoded."""
    stores = [layer.store for layer in layers if layer.store is not None]
    sinks, chain, written = stores[0].sinks, list[Name](), 0
    closed = _count_whole(stores, row, len(tokens))
    if _has_decoded(stores, row):
        tokens = tokens[: find_edge(sinks, closed)]
    try:
        for number in range(closed + 1):
            parent, whole = chain[-1].own if chain else root, number < closed
            start, stop = find_edge(sinks, number), find_edge(sinks, number + 1) if whole else len(tokens)
            part = list(tokens[start:stop])
            name = Name(root[:16], number, parent, name_segment(parent, part, reading))
            # Tokens of a whole segment may have been stored before it was closed, in a file of the same name.
            if part and (name not in listing.files or (whole and not _is_coded(folder, name))):
                copied = [_copy_part(layer, row, start, stop, number if whole else None) for layer in layers]
                header = Header(part, reading, 0, CODED if whole else "", about)
                before = start, len(tokens)
                if not (size := write_segment(folder, listing, name, header, copied, max_bytes, chain, before)):
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


def _is_coded(folder: Folder, name: Name) -> bool:
    """Whether a file holds a segment in few bits. One that cannot be read is written anew."""
    try:
        return folder.read_header(name).sketch == CODED
    except (OSError, ValueError):
        return False


def _count_whole(stores: Sequence[TokenStore], row: int, tokens: int) -> int:
    """The number of a row's first segments that are closed in every layer and that no layer has coded twice."""
    most = (tokens - stores[0].sinks) // SEGMENT_TOKENS
    for store in stores:
        assert isinstance(store.bulk, CodedBulk)
        most = min([most, store.bulk.stored[row] // SEGMENT_TOKENS, *store.bulk.recoded[row]])
    return max(most, 0)


def _has_decoded(stores: list[TokenStore], row: int) -> bool:
    """Whether a crop has opened closed segments of a row that are still open, or were coded again. Caches that found
    their tokens beside other keys and values would code them once more at every edit."""
    bulks = [store.bulk for store in stores]
    return any(bulk.reopened[row] or bulk.recoded[row] for bulk in bulks if isinstance(bulk, CodedBulk))


def _copy_part(layer: QAdALayer, row: int, start: int, stop: int, segment: int | None) -> dict[str, Tensor]:
    """One layer's tensors for a file, on the host: those of closed segment number `segment`, or with None the unchanged
    keys and values of tokens `start..stop`."""
    store, rows = layer.store, slice(row, row + 1)
    assert store is not None
    bulk = store.bulk
    assert isinstance(bulk, CodedBulk)
    first = start if segment is None else stop - SEGMENT_TOKENS
    keys, values = store.copy_tokens(rows, start, stop if segment is None else first)
    tensors = {"keys": keys[0], "values": values[0], **copy_beside(layer, row, start, stop)}
    if segment is not None:
        assert bulk.sketch is not None
        bulk.synchronize()
        at = segment * SEGMENT_TOKENS
        code = bulk.sketch.find_segment(row, segment)
        assert code is not None  # as it is closed
        tensors |= {name: code[name] for name in CODES}
        tensors["records"] = bulk.tensors[0][row, :, at : at + SEGMENT_TOKENS, : bulk.layout.size].contiguous()
    return bring(tensors)


def _remove_outlived(folder: Folder, listing: Listing, parent: str, new: Name, tokens: list[int], reading: str) -> None:
    """Remove files after `parent` that are not in few bits, if their tokens are the first of `tokens`: those of `new`
    and of the files after it."""
    for name, old in folder.list_following(listing, parent):
        if name != new and not old.sketch and old.reading == reading and old.tokens == tokens[: len(old.tokens)]:
            folder.remove(listing, name)


def has_shapes(sizes: tuple[int, int, int], dtype: torch.dtype, options: Options, layer: dict[str, Tensor]) -> bool:
    """Whether a stored closed segment fits a layer with these `sizes` `(kv_heads, dim, value_dim)` and options."""
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
@torch.inference_mode(False)  # tensors made here are written to later, perhaps outside inference mode
def fill(cache: QAdACache, layers: Sequence[QAdALayer], pieces: Sequence[tuple[Layers, int]]) -> None:
    """Fill an empty cache with one row's pieces: closed segments in few bits, then perhaps one with unchanged keys and
    values."""
    device = find_device(cache)
    total = sum(taken for _, taken in pieces)
    for place, layer in enumerate(layers):
        read = [{name: part.to(device) for name, part in piece[place].items()} for piece, _ in pieces]
        segments = [each for each in read if "records" in each]
        empty = [read[0][part][None, :, :0] for part in _PARTS]
        unchanged = empty  # keys and values [1, kv_heads, tokens, dim] after the closed segments
        if len(read) > len(segments):
            unchanged = [read[-1][part][None][:, :, : pieces[-1][1]] for part in _PARTS]
        layer.lazy_initialization(*empty)
        assert layer.store is not None
        seen = _fill(layer.store, segments, unchanged)
        layer.seen = seen
        layer.crop(total - seen)
        if INDEXER in read[0]:
            parts = [each[INDEXER][:, :taken] for each, (_, taken) in zip(read, pieces, strict=True)]
            layer.restore_beside({INDEXER: torch.cat(parts, dim=1)})
        layer.store.exact, layer.store.alike = [0], [total]


def _fill(store: TokenStore, segments: Sequence[dict[str, Tensor]], unchanged: Sequence[Tensor]) -> int:
    """Fill an empty store of one row with closed segments, then `unchanged` keys and values; returns its number of
    tokens. Segments stay closed only with enough tokens after them. If there are fewer, zeros are added, and the
    caller crops them."""
    if not segments:
        store.absorb(unchanged[0], unchanged[1], None)
        return unchanged[0].shape[2]
    bulk, sketch, coded = store.bulk, store.bulk.sketch, len(segments) * SEGMENT_TOKENS
    assert isinstance(bulk, CodedBulk)
    assert sketch is not None
    bulk_rest = max(LAST_TOKENS, MIN_TOKENS - coded)  # tokens of the bulk after the segments, which keep these closed
    least = bulk_rest + store.window
    keys, values = (torch.nn.functional.pad(part, (0, 0, 0, max(0, least - part.shape[2]))) for part in unchanged)
    store.reserve(store.window)
    for near, name, part in zip((store.near_keys, store.near_values), _PARTS, (keys, values), strict=True):
        near[0, :, : store.sinks] = segments[0][name]
        near[:, :, store.sinks : store.sinks + store.window] = part[:, :, bulk_rest:least]
    store.end = store.window
    store.lengths, store.flushed = [store.sinks + coded + least], [store.sinks + coded + bulk_rest]
    records = torch.cat([each["records"] for each in segments], dim=1)[None]
    bulk.fill(None, (fit_records(records, bulk.stride),), [coded])
    bulk.put_beside(keys[:, :, :bulk_rest], values[:, :, :bulk_rest], [coded + bulk_rest])
    sketch.adopt(bulk, 0, segments)
    sketch.append_from(bulk, slice(0, 1))
    store.absorb(keys[:, :, least:], values[:, :, least:], None)  # and the moments
    return store.lengths[0]
