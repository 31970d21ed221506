"""One decode step of one layer in plain torch, by `query_adaptive.py`."""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..criterion import gaussian_log_bulk
from ..sketch import MIN_TOKENS, SEGMENT_TOKENS, count_closed, count_segments
from ..sketch.codec import Sketch
from ..sketch.coded import decode_keys, decode_values, estimate_keys
from .operands import Operands, Query, Rows, is_shared
from .query_adaptive import BulkAttention, attend_near, decide, group_queries, score_near, select, sum_local


def decode_step(query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
    """The reference of every `fused_decode`: attention of one query token a row.

    Returns `[batch, heads, 1, value_dim]` in the query's dtype, and bool `[batch, kv_heads, group, 1]`, True where a
    head read its bulk (there is one, and the query is decided).
    """
    for near, new in zip((layer.near_keys, layer.near_values), query.unstored or (), strict=False):
        near[:, :, rows.columns - 1] = new[:, :, 0]
    lengths, dtype = rows.bulk_lengths.expand(len(query.states)).tolist(), query.states.dtype
    stored = layer
    if layer.records is not None:
        query, layer = replace(query, states=query.states.float()), decode_records(layer, lengths)
    grouped = group_queries(query, layer.kv_heads)
    # Cleared, because a weight of 0 does not keep a nan out of a sum.
    keys, values = (
        near[:, :, : rows.columns].masked_fill(~(rows.local | rows.pending).mT, 0.0)
        for near in (layer.near_keys, layer.near_values)
    )
    scores = score_near(grouped, keys, query)
    flags = decide(sum_local(scores, rows, query.sink_logits), find_log_bulk(query, layer.kv_heads), rows, layer)
    local = attend_near(scores, values, rows, flags, query.sink_logits)
    whole, selecting, chosen = select(grouped, flags, local[1], lengths, query, rows, layer)
    bulk = BulkAttention(grouped, query, values.shape[3])
    for row, heads in enumerate(whole):
        for head in [head for head, wanted in enumerate(heads) if wanted and lengths[row]]:
            every = torch.arange(lengths[row], dtype=torch.int64, device=layer.bulk_keys.device)
            bulk.add_whole(slice(row, row + 1), slice(head, head + 1), *_gather(layer, row, head, every))
            _count(stored, every, lengths[row])
    for selected in chosen:
        assert layer.sketch is not None
        tokens = selected.tokens.to(layer.bulk_keys.device)
        bulk.add_chosen(selected, *_gather(layer, selected.row, selected.head, tokens), layer.sketch)
        _count(stored, tokens, lengths[selected.row])
    out, _ = bulk.merge(*local, flags)
    if stored.sketch is not None and stored.sketch_read_bytes is not None:
        for row, length in enumerate(lengths):
            readers = sum(selecting[row]) if selecting else 0
            if stored.records is not None and length >= MIN_TOKENS:  # these decode keys from the sketch too
                readers += sum(whole[row])
            stored.sketch_read_bytes += stored.sketch.count_read_bytes(length) * readers
    return out.reshape(*query.states.shape[:3], -1).to(dtype), flags


def find_log_bulk(query: Query, kv_heads: int) -> Tensor:
    """`query.log_bulk`, or without it the larger estimate by `query.moments`: float32 `[batch or 1, kv_heads, group,
    1]`."""
    if query.log_bulk is not None:
        return query.log_bulk
    scoring: dict[str, Any] = {"kv_heads": kv_heads, "scaling": query.scaling}
    estimates = [gaussian_log_bulk(query.states.float(), *moments, **scoring) for moments in query.moments]
    return functools.reduce(torch.fmax, estimates)  # it prefers a number to a nan


def decode_records(layer: Operands, lengths: list[int]) -> Operands:
    """The same layer without records, in float32. It counts no bytes."""
    assert layer.records is not None
    assert layer.sketch is not None
    stored, weights, layout = layer.records, layer.records.weights, layer.records.layout
    longest, shared = max(lengths), is_shared(layer.bulk_keys, layer.bulk_values)
    keys, values = (
        part.new_zeros(*part.shape[:2], longest, part.shape[3], dtype=torch.float32)
        for part in (layer.bulk_keys, layer.bulk_values)
    )
    values = keys[..., : values.shape[3]] if shared else values
    for row, length in enumerate(lengths):
        closed, one = count_closed(length), slice(row, row + 1)
        if length >= MIN_TOKENS:
            parts = stored.tensor[one, :, :closed].to(stored.open.device), stored.open[one, :, : length - closed]
            records, predicted = torch.cat(parts, dim=2), predict_keys(layer.sketch, one, length)
            keys[row, :, :length] = decode_keys(records, predicted, weights, layout)[0]
            if not shared:
                values[row, :, :length] = decode_values(records, layout)[0]
            continue
        for target, source in ((keys, layer.bulk_keys), (values, layer.bulk_values)):  # a bulk too short for records
            target[row, :, :length] = source[row, :, :length]
    sketch = layer.sketch if layer.token_threshold > 0 else None
    local = layer.near_keys.float(), layer.near_values.float()
    decoded = Operands(*local, keys, values, layer.logit_threshold, layer.group_rule, layer.token_threshold)
    decoded.sketch = sketch
    return decoded


def predict_keys(sketch: Sketch, rows: slice, tokens: int) -> Tensor:
    """The sketch's estimates of the first `tokens` keys of rows, those of closed segments or all: float32 `[rows,
    kv_heads, tokens, dim]`."""
    fields = {name: part[rows] for name, part in sketch.to_tensors().items()}
    fields |= {name: fields[name][..., :tokens] for name in ("codes", "scales")}
    segments = torch.arange(tokens, dtype=torch.int64, device=sketch.codes.device) // SEGMENT_TOKENS
    return estimate_keys(fields, sketch.layout, of=segments.clamp_max(count_segments(tokens) - 1))


def _gather(layer: Operands, row: int, head: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, 1, tokens, dim]` of these tokens of a row's KV head, on the query's device."""
    keys, values = (
        part[row, head][tokens].to(layer.near_keys.device)[None, None] for part in (layer.bulk_keys, layer.bulk_values)
    )
    return keys, values


def _count(layer: Operands, tokens: Tensor, length: int) -> None:
    """Add the bytes of these tokens of one KV head to the counter of bytes read; the bulk has `length` tokens."""
    if layer.bulk_read_bytes is None:
        return
    pair = layer.bulk_keys, layer.bulk_values
    token_bytes = sum(part.shape[3] * part.element_size() for part in (pair[:1] if is_shared(*pair) else pair))
    if layer.records is not None and length >= MIN_TOKENS:
        token_bytes = layer.records.tensor.shape[3]
    layer.bulk_read_bytes += len(tokens) * token_bytes
