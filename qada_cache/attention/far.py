"""Attention over the stored bulk, of heads that need it: over all of its tokens, or over those that matter."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..kernels import merge_partials, partial_attention, reference
from ..sketch import Selection, select_tokens, unread_value, unreliable
from ..state.layer import QAdALayer
from ..storage.bulk_sketch import BulkSketch
from ..storage.geometry import Geometry
from ..storage.reading import chosen, flagged, learn, none_whole
from ..storage.residents import Head
from ..storage.store import TokenStore

BLOCK_SCORES = 1 << 22  # estimates of scores that are held at once


def neutral(store: TokenStore, packed: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of queries `[batch, kv_heads, queries, dim]` over nothing."""
    out = packed.new_zeros(*packed.shape[:-1], store.near_values.shape[-1], dtype=torch.float32)
    return out, packed.new_full(packed.shape[:-1], -torch.inf, dtype=torch.float32)


def whole_bulk(
    layer: QAdALayer,
    store: TokenStore,
    packed: Tensor,
    wanted: list[list[bool]] | None,
    *,
    scaling: float,
    audit: bool = False,
) -> tuple[Tensor, Tensor]:
    """Partial attention over the stored bulk, for the wanted KV heads only.

    Every stored token precedes every query's window, so no mask is needed.

    Args:
        layer: whose counters count.
        store: holds the bulk.
        packed: `[batch, kv_heads, queries, dim]`.
        wanted: of every row and KV head; None: all.
        scaling: multiplies the scores.
        audit: count it as an audit's reading, which decides nothing about what is kept on the device.

    Returns:
        `(out, lse)` as `partial_attention`, neutral where not wanted.
    """
    out, lse = neutral(store, packed)
    batch, kv_heads = packed.shape[:2]
    how: dict[str, Any] = {"scaling": scaling, "kernels": layer.options.kernels}
    for part in flagged(store.bulk, wanted or [[True] * kv_heads] * batch, learn=not audit):
        at = part.rows, part.heads
        out[at], lse[at] = partial_attention(packed[at], part.keys, part.values, **how)
        if audit:
            layer.counters.audited_bytes += part.pulled + part.spared
        else:
            layer.counters.pulled_bytes += part.pulled
            layer.counters.spared_bytes += part.spared
    return out, lse


def long_context(
    layer: QAdALayer,
    store: TokenStore,
    packed: Tensor,
    flags: Tensor,
    near_lse: Tensor,
    geometry: Geometry,
    *,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Partial attention of the flagged heads: over their whole bulk, or over what they choose of it by the sketch.

    Args:
        layer: whose options choose and whose counters count.
        store: holds the bulk.
        packed: `[batch, kv_heads, group * queries, dim]`.
        flags: bool `[batch, kv_heads, group, queries]`; reading them on the host is where a step waits for the device.
        near_lse: log-sum-exp of scores over what is near `[batch, kv_heads, group * queries]`.
        geometry: of the call.
        scaling: multiplies the scores.

    Returns:
        `(out, lse)` as `partial_attention`, of anything where not flagged; and `lse` of what was read alone, without
        what is estimated of the rest.
    """
    sketch, bulk, group = store.sketch, store.bulk, flags.shape[2]
    needed = flags.flatten(2).any(dim=-1)  # [batch, kv_heads]
    if sketch is None:
        out, lse = whole_bulk(layer, store, packed, needed.tolist(), scaling=scaling)
        return out, lse, lse
    # What one query finds too rough is read whole for all queries of the call.
    rough = unreliable(packed, sketch.tensors, scaling=scaling) & flags.flatten(2)
    coded = torch.tensor(sketch.lengths, device=flags.device)[:, None] > 0
    chooses = coded & ~rough.any(dim=-1)
    some, rest = torch.stack([needed & chooses, needed & ~chooses]).tolist()
    out, lse = neutral(store, packed)
    if any(map(any, rest)):  # residents count the calls that ask for some
        out, lse = whole_bulk(layer, store, packed, rest, scaling=scaling)
    else:
        none_whole(bulk)
    read_lse = lse.clone()
    asked: deque[tuple[Head, slice, Tensor, Selection]] = deque()

    def picks() -> Iterator[tuple[Head, Tensor]]:
        for row, heads in enumerate(some):
            for head, flag in enumerate(heads):
                if flag:
                    layer.counters.sketched_bytes += sketch.tensors.read_bytes(sketch.lengths[row])
                    selections = _selections(
                        sketch, (row, head), packed, flags, near_lse, geometry, scaling, layer.options.token_threshold
                    )
                    for queries, selection in selections:
                        index = selection.tokens.any(dim=0).nonzero()[:, 0]
                        asked.append(((row, head), queries, selection.tokens[:, index], selection))
                        yield (row, head), index

    grouped, outs, masses, read = (tensor.unflatten(2, (group, -1)) for tensor in (packed, out, lse, read_lse))
    for part in chosen(bulk, picks()):
        (row, head), queries, mask, selection = asked.popleft()
        at = row, head, slice(None), queries
        found = reference.partial_attention(grouped[at], part.keys[0], part.values[0], scaling=scaling, mask=mask)
        read[at] = found[1]
        rest = unread_value(grouped[at], sketch.tensors[row, head], selection.tilt, scaling=scaling)
        outs[at], masses[at] = merge_partials(*found, rest, selection.log_unread)
        layer.counters.pulled_bytes += part.pulled
        layer.counters.spared_bytes += part.spared
    if bulk.offloaded and layer.options.device_budget:
        layer.counters.pulled_bytes += learn(bulk, torch.tensor(some))
    return out, lse, read_lse


def _selections(
    sketch: BulkSketch,
    at: Head,
    packed: Tensor,
    flags: Tensor,
    near_lse: Tensor,
    geometry: Geometry,
    scaling: float,
    token_threshold: float,
) -> Iterator[tuple[slice, Selection]]:
    """Some queries of one head at a time, and what `select_tokens` says of them."""
    group, queries = flags.shape[2:]
    length = sketch.lengths[at[0]]
    grouped, log_near = packed[at].unflatten(0, (group, queries)), near_lse[at].unflatten(0, (group, queries))
    bulk_tokens = geometry.bulk_tokens.expand(packed.shape[0], -1, -1)[at[0], 0]
    block = max(1, BLOCK_SCORES // (group * length))
    for first in range(0, queries, block):
        part = slice(first, first + block)
        yield (
            part,
            select_tokens(
                grouped[:, part],
                sketch.tensors[at],
                length,
                log_near=log_near[:, part],
                bulk_tokens=bulk_tokens[part],
                flags=flags[at][:, part],
                scaling=scaling,
                token_threshold=token_threshold,
            ),
        )
