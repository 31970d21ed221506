"""Layers as records for a file, and back. All numbers of a file are checked; `stock.py` checks transformers' layers."""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..files.private_map import PrivateMap
from ..files.tensor_file import PaddedTensor
from ..sketch import count_closed
from ..sketch.coded import RecordLayout, fit_records
from ..storage import PENDING_TOKENS
from ..storage.coded_bulk import CodedBulk
from ..storage.padding import NONE, Padding
from ..storage.reopened import restore_segments
from .counters import AUDITED, COUNTER_NAMES, Counters
from .layer import QAdALayer
from .stock import COUNTED, describe_attribute, require_fit

BULK = ("bulk_keys", "bulk_values")  # of a coded bulk: tokens without a record
RECORDS = "bulk_records"
HITS = "resident_hit_bytes"  # in older files: bulk bytes that were read, not in `bulk_read_bytes`
_SHAPES = {  # equal words stand for equal sizes
    "near_keys": "batch kv_heads columns dim",
    "near_values": "batch kv_heads columns value_dim",
    "bulk_keys": "batch kv_heads room dim",
    "bulk_values": "batch kv_heads room value_dim",
    "mean": "batch kv_heads dim",
    "covariance": "batch kv_heads dim dim",
    "local_heads": "kv_heads group",
    "local_groups": "kv_heads",
}
_COUNTED = ("local_heads", "local_groups")
_DTYPES = {"mean": torch.float32, "covariance": torch.float32, "local_heads": torch.int64, "local_groups": torch.int64}


def record_layer(layer: QAdALayer) -> dict[str, Any]:
    """The record of a layer, for `restore_layer`. Unused room of buffers is left out, except in the bulk's tensors: a
    loaded cache uses them in the mapped file, and appends tokens to them."""
    layer.check_attended()
    if (store := layer.store) is None:
        return {}
    bulk, used = store.bulk, slice(0, store.sinks + store.end)
    bulk.synchronize()
    # Room and each row's length of `BULK`.
    room, lengths = bulk.capacity if any(bulk.stored) else 0, bulk.lengths
    bulk_fields: dict[str, Any] = {}
    if isinstance(bulk, CodedBulk):
        bulk_fields[RECORDS] = PaddedTensor(bulk.tensors[0][..., : bulk.layout.size], bulk.stored, room)
        lengths = list(map(operator.sub, bulk.lengths, bulk.stored))
        room = max(lengths, default=0)
        if any(bulk.reopened):
            bulk_fields["reopened"] = [[segment.record for segment in segments] for segments in bulk.reopened]
        if any(bulk.recoded):
            bulk_fields["recoded"] = [sorted(segments) for segments in bulk.recoded]
    tensors = zip(BULK, (bulk.keys, bulk.values), strict=True)
    bulk_fields |= {name: PaddedTensor(tensor, lengths, room) for name, tensor in tensors}
    record = {
        "seen": layer.seen,
        "padding": [(0, layer.padding.known)] if layer.padding.known.numel() else [],
        **layer.counters.record,
        **{"near_keys": store.near_keys[:, :, used], "near_values": store.near_values[:, :, used]},
        **bulk_fields,
        **{"lengths": store.lengths, "flushed": store.flushed, "stored": bulk.lengths, "decoded": store.decoded},
        **{"exact": store.exact, "alike": store.alike},
    }
    record |= {"beside": layer.beside} if layer.beside else {}
    if store.moments is not None:
        record |= {"count": store.moments.count, "mean": store.moments.mean, "covariance": store.moments.covariance}
    if bulk.sketch is not None:
        record |= bulk.sketch.record
    if layer.readers:
        record["readers"] = {index: reader.counters.record for index, reader in layer.readers.items()}
    return record


def restore_layer(layer: QAdALayer, record: dict[str, Any], source: PrivateMap | None) -> None:
    """The inverse of `record_layer`, for an empty layer; ValueError, if the record contradicts itself, or the cache's
    options. `source` is the mapped file under the bulk's tensors, None if they are copies."""
    if not record:
        return
    try:
        padding = _check(layer, record)
        layer.lazy_initialization(record["near_keys"], record["near_values"])
        store = layer.store
        assert store is not None
        columns = record["near_keys"].shape[2]
        store.end = columns - store.sinks
        store.reserve(store.end)
        store.near_keys[:, :, :columns] = record["near_keys"]
        store.near_values[:, :, :columns] = record["near_values"]
        store.lengths, store.flushed, store.decoded = record["lengths"], record["flushed"], record["decoded"]
        store.exact, store.alike = record["exact"], record["alike"]
        bulk, (keys, values), stored = store.bulk, (record[name] for name in BULK), record["stored"]
        if isinstance(bulk, CodedBulk):
            bulk.fill(source, (fit_records(record[RECORDS], bulk.stride),), list(map(count_closed, stored)))
            bulk.put_beside(keys, values, stored)
            if "reopened" in record and bulk.sketch is not None:  # old files lack it, and those without crops
                rooms = [length - store.sinks - first for length, first in zip(store.lengths, bulk.stored, strict=True)]
                bulk.reopened = restore_segments(record["reopened"], rooms, bulk.sketch, bulk.layout)
            recoded = record.get("recoded", [[]] * len(stored))
            fits = len(recoded) == len(stored) and {type(index) for row in recoded for index in row} <= {int}
            require_fit(f"layer {layer.index}", fits, f"recoded segments {recoded}", f"ints, for {len(stored)} rows")
            bulk.recoded = list(map(frozenset, recoded))
        else:
            bulk.fill(source, (keys, values), stored)
        if store.moments is not None:
            store.moments.restore(record["count"], record["mean"], record["covariance"])
        if store.bulk.sketch is not None:
            store.bulk.sketch.restore(record, store.bulk)
    except (KeyError, TypeError, AttributeError) as error:  # a field is missing, or of another kind
        raise ValueError(f"layer {layer.index} is no record of a layer: {error!r}") from error
    layer.seen, layer.padding = record["seen"], padding
    layer.restore_beside(record.get("beside", {}))
    for asker, counts in zip(layer.askers, (record, *record.get("readers", {}).values()), strict=True):
        asker.counters = Counters(**{name: counts[name] for name in COUNTER_NAMES})
    layer.counters.bulk_read_bytes += record.get(HITS, 0)


def _check(layer: QAdALayer, record: dict[str, Any]) -> Padding:
    """The padding of a record, after checks. ValueError at a number or shape that no layer of these options has,
    KeyError, TypeError or AttributeError if a field is missing, or of a type that no record has."""
    options, require = layer.options, partial(require_fit, f"layer {layer.index}")
    lengths, flushed = record["lengths"], record["flushed"]
    sinks, window = options.sink_tokens, options.window
    tracked = ("mean", "covariance") if options.tracks_moments else ()
    sizes = {"batch": len(lengths)}
    _check_shapes(require, record, ("near_keys", "near_values", *BULK, *tracked), sizes)
    readers = record.get("readers", {})
    fits = isinstance(readers, dict) and list(readers) == list(layer.readers)
    require(fits, f"counts of layers {list(readers)}", f"of {list(layer.readers)}, which read its keys")
    for counts in (record, *readers.values()):
        _check_counters(require, counts, sizes)
    layout = RecordLayout.from_bits(sizes["dim"], sizes["value_dim"], options.bulk_bits)
    if layout is not None:
        shape = list(record[RECORDS].shape)
        wanted = [sizes["batch"], sizes["kv_heads"], *shape[2:3], layout.size]
        require(shape == wanted, f"records of shape {shape}", f"of shape {wanted} by the others")
        require(record[RECORDS].dtype == torch.uint8, f"records in {record[RECORDS].dtype}", "in torch.uint8")
    for near, far in (("near_keys", "bulk_keys"), ("near_values", "bulk_values")):
        dtype = record[near].dtype
        require(dtype.is_floating_point, f"{near} in {dtype}", "of a floating dtype")
        require(record[far].dtype == dtype, f"{far} in {record[far].dtype}", f"in {dtype}, as {near}")
    require(type(record["decoded"]) is bool, f"decoded of {record['decoded']}", "a bool")

    end, seen = sizes["columns"] - sinks, record["seen"]
    stored = [max(tokens - sinks, 0) for tokens in flushed]
    rows = [lengths, flushed, record["stored"], *([record["count"]] if options.tracks_moments else [])]
    fits = all(isinstance(row, list) and len(row) == len(lengths) and {*map(type, row)} <= {int} for row in rows)
    require(fits and type(seen) is int, f"{seen} tokens seen, in rows of {rows}", f"ints, for {len(lengths)} rows")
    most = window + max(window, PENDING_TOKENS)
    require(0 <= end <= most, f"{end} tokens beside {sinks} sinks", f"{most} at most")
    require(rows[2] == stored, f"{rows[2]} tokens in the bulk", f"{stored}, as {flushed} are flushed")
    closed = [0 if layout is None else count_closed(length) for length in stored]
    uncoded, most = max(map(operator.sub, stored, closed), default=0), sizes["room"]
    require(uncoded <= most, f"{uncoded} tokens in the bulk", f"{most} at most")
    if layout is not None:
        most = record[RECORDS].shape[2]
        require(max(closed, default=0) <= most, f"{closed} tokens in records", f"{most} at most")
    recents = list(map(operator.sub, lengths, flushed))
    pairs = zip(flushed, recents, strict=True)
    fits = all(tokens >= 0 and recent >= (window if tokens else 0) for tokens, recent in pairs)
    require(
        fits and max(recents, default=0) == end,
        f"{lengths} tokens, {flushed} of them flushed, in {end} columns",
        f"a window of {window}, if any are flushed, and as many columns",
    )
    if options.tracks_moments:
        behind = not options.update_moments and record["decoded"]  # frozen moments leave out decoded tokens
        pairs = zip(record["count"], stored, strict=True)
        fits = all((0 if behind else tokens) <= count <= tokens for count, tokens in pairs)
        require(fits, f"moments of {record['count']} tokens", f"of {stored}{' at most' if behind else ''}")
    padding = NONE
    for first, valid in record["padding"]:
        fits = first == 0 and valid.dtype == torch.bool and valid.dim() == 2 and len(valid) == len(lengths)
        what = f"padding {valid.dtype} {list(valid.shape)} from {first} on"
        require(fits and valid.shape[1] <= seen, what, f"bool [{len(lengths)}, {seen} at most] from 0 on")
        padding = Padding(valid.cpu())
    real = [seen - padded for padded in padding.count_by_row(len(lengths))]
    require(lengths == real, f"{lengths} tokens", f"{real}, of {seen} that were seen")
    exact, alike = record["exact"], record["alike"]
    fits = {*map(type, [*exact, *alike])} <= {int} and len(exact) == len(alike) == len(lengths)
    fits = fits and all(0 <= one <= other <= most for one, other, most in zip(exact, alike, lengths, strict=True))
    require(fits, f"{exact} tokens read exactly and {alike} alike", f"counts of at most {lengths}, the first ones less")
    return padding


def _check_shapes(require: Any, record: dict[str, Any], names: Sequence[str], sizes: dict[str, int]) -> None:
    """Raise ValueError at a tensor with another dtype than in `_DTYPES`, or another shape than in `sizes`, the size by
    axis; sizes of new axes are added to it."""
    for name in names:
        shape, axes, dtype = list(record[name].shape), _SHAPES[name].split(), record[name].dtype
        wanted = [sizes.get(axis, axis) for axis in axes]
        fits = len(shape) == len(axes)
        fits = fits and all(sizes.setdefault(axis, size) == size for axis, size in zip(axes, shape, strict=True))
        require(fits, f"{name} of shape {shape}", f"of shape {wanted} by the others")
        require(dtype == _DTYPES.get(name, dtype), f"{name} in {dtype}", f"in {_DTYPES.get(name)}")


def _check_counters(require: Any, record: dict[str, Any], sizes: dict[str, int]) -> None:
    """Raise ValueError at a counter of one layer's queries that is no count, or of another shape."""
    _check_shapes(require, record, [name for name in _COUNTED if record[name] is not None], sizes)
    for name, count in [*((name, record[name]) for name in COUNTER_NAMES), (HITS, record.get(HITS, 0))]:
        require(name in ("audited", *_COUNTED) or _is_count(count), f"{name} of {describe_attribute(count)}", "a count")
    audited = record["audited"]
    fits = audited is None or (audited.dtype, audited.shape) == (torch.float64, (AUDITED,))
    require(fits, f"audited of {describe_attribute(audited)}", f"float64 [{AUDITED}], or None")


def _is_count(value: Any) -> bool:
    """Whether a counter may hold this: an int, or int64 `[]` where a kernel counts."""
    if isinstance(value, Tensor):
        return value.dtype == torch.int64 and not value.dim() and value.item() >= 0
    return type(value) is int and 0 <= value < 2**63


def check_alike(layers: Sequence[Any]) -> None:
    """Raise ValueError unless all layers of a file have the same tokens, of as many rows."""
    ours = [layer for layer in layers if isinstance(layer, QAdALayer)]
    texts = [(layer.seen, layer.store.lengths, layer.store.flushed) if layer.store else None for layer in ours]
    if any(text != texts[0] for text in texts) or not all(layer.padding.equals(ours[0].padding) for layer in ours):
        raise ValueError(f"its layers hold different tokens: {texts}")
    stock = [layer for layer in layers if not isinstance(layer, QAdALayer)]
    states = [getattr(layer, name, None) for layer in stock for name in ("keys", "values")]
    for layer in stock:
        for name in ("conv_states", "recurrent_states"):
            states += (getattr(layer, name, None) or {}).values()
    rows = {len(state) for state in states if isinstance(state, Tensor) and state.dim() > 1}
    held = [text for text in texts if text is not None]
    rows |= {len(lengths) for _, lengths, _ in held}
    # A batch without rows has no tokens in our layers, while transformers' go on counting.
    seen = {layer.get_seq_length() for layer in layers if hasattr(layer, COUNTED)}
    seen |= {seen for seen, lengths, _ in held if lengths}
    if len(rows) > 1 or len(seen) > 1:
        raise ValueError(f"its layers hold different texts: {sorted(seen)} tokens in {sorted(rows)} rows")
