"""Query-adaptive attention of one layer over its cached tokens."""

import weakref
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..criterion import StaticHeads, gaussian_log_bulk, logit
from ..kernels import choice
from ..kernels.cpu import compiled_decode
from ..kernels.operands import Operands, Query, Rows
from ..key_moments import KeyMoments
from ..state.layer import QAdALayer
from ..storage import TokenStore
from .by_torch import attend_by_torch

TURN_TOKENS = 512  # more, where the window is as long, are matrices enough for torch


def attend_adaptively(layer: QAdALayer, store: TokenStore, query: Query) -> Tensor:
    """Query-adaptive attention: each head reads its sinks and window, a long-context head its bulk as well.

    The call's own tokens have been appended to `store` already, those of `query.unstored` without being written; every
    query has its own local set and is causal. There is at most a window of queries, and the result is `[batch, heads,
    queries, value_dim]` in their dtype. Padding queries get finite, unused values.
    """
    states, bulk = query.states, store.bulk
    rows = layer.shared.forward_pass.find_rows(
        lengths=store.lengths,
        flushed=store.flushed,
        end=store.end,
        queries=states.shape[2],
        valid=query.valid,
        device=states.device,
    )
    query.log_bulk = estimate_log_bulk(layer, store, query, rows)
    plain, single = query.sink_logits is None and query.softcap is None, states.shape[2] == 1
    served = plain and (single or takes_turns(layer, store, states)) and not layer.is_observed()
    kernel, operands = find_step(layer, store, states, served)
    if query.unstored is not None and kernel is not compiled_decode.fused_decode:  # which stores them itself
        store.write(*query.unstored)
        query.unstored = None
    if kernel is None:
        out, flags = attend_by_torch(layer, store, query, rows, operands)
    else:
        # Nothing here waits for the device: small tensors of host numbers are copied to it without blocking.
        out, flags = kernel(query, rows, operands)
    layer.counters.count(flags, rows, operands.kv_heads * bulk.token_bytes)
    return out


def takes_turns(layer: QAdALayer, store: TokenStore, states: Tensor) -> bool:
    """Whether kernels for single tokens are to compute several `[batch, heads, queries, dim]`. Heads that are read
    whole are read once for all tokens by torch, and by these once for each, so only if tokens are selected. The CPU's
    takes one row; by Triton's every token reads for itself."""
    options = layer.options
    if store.sketch is None or states.shape[2] > TURN_TOKENS or options.kernels == "torch":
        return False
    return not states.is_cpu or options.kernels == "triton" or len(states) == 1


class KnownStep(NamedTuple):
    """What `find_step` found, and what that follows from."""

    facts: tuple[Any, ...]
    parts: tuple[object, ...]
    queries: int  # of each row
    kernel: Callable | None
    operands: Operands


def find_step(layer: QAdALayer, store: TokenStore, states: Tensor, by_kernel: bool) -> tuple[Callable | None, Operands]:
    """The kernel for queries `[batch, heads, queries, dim]`, None if torch computes them, as it does unless `by_kernel`
    is allowed; and the operands. They are made anew when anything that they follow from is another."""
    facts = by_kernel, store.selects, states.shape, states.dtype, states.device, weakref.ref(layer.options)
    known: KnownStep | None = layer.last_step.known
    if known is None or known.facts != facts or not all(map(is_, known.parts, _list_parts(layer, store))):
        kernel = find_kernel(layer, store, states) if by_kernel else None
        operands = find_operands(layer, store, by_kernel=kernel is not None)
        known = KnownStep(facts, _list_parts(layer, store), states.shape[2], kernel, operands)
        layer.last_step.known = known
    kernel, operands = known.kernel, known.operands
    if kernel is not None and store.bulk.offloaded:
        store.bulk.find_in_place()  # its copies to the host may be under way
    return kernel, operands


def _list_parts(layer: QAdALayer, store: TokenStore) -> tuple[object, ...]:
    """What operands follow from, by identity."""
    bulk, counters, sketch = store.bulk, layer.counters, store.bulk.sketch
    known = (None, False) if sketch is None else (sketch.tensors, sketch.in_use)
    counts = counters.bulk_read_bytes, counters.sketch_read_bytes
    return (store.near_keys, store.near_values, bulk.tensors, bulk.beside, *known, *counts)


def find_operands(layer: QAdALayer, store: TokenStore, *, by_kernel: bool) -> Operands:
    """What the layer has for a call; what a kernel reads in place, and where it counts, if one computes it."""
    bulk, sketch, options, counters = store.bulk, store.sketch, layer.options, layer.counters
    # Criteria that compare no masses need a finite threshold.
    cut = logit(options.threshold) if options.criterion in ("gaussian", "oracle") else 0.0
    found = Operands(store.near_keys, store.near_values, bulk.keys, bulk.values, cut, binding=layer.binding)
    found.group_rule, found.token_threshold = options.group_rule, options.token_threshold
    if sketch is not None and (sketch.in_use or not by_kernel):
        found.sketch = sketch.tensors
    if by_kernel and bulk.sketch is not None and (records := bulk.records) is not None:
        found.records, found.sketch = records, bulk.sketch.tensors  # keys follow from it, whether or not it selects
        found.token_threshold = options.token_threshold if store.selects else 0.0
    if by_kernel:
        device = store.near_keys.device
        found.bulk_read_bytes = counters.find_on(device, "bulk_read_bytes")
        if found.sketch is not None:
            found.sketch_read_bytes = counters.find_on(device, "sketch_read_bytes")
    return found


def find_kernel(layer: QAdALayer, store: TokenStore, states: Tensor) -> Callable | None:
    """What `choice.choose_kernel` says of queries `[batch, heads, queries, dim]`."""
    bulk, sketch, options = store.bulk, store.sketch, layer.options
    records = bulk.records
    sketch = sketch if records is None else bulk.sketch  # which records lie behind, whether or not it selects
    layout = sketch.layout if sketch is not None and sketch.in_use else None
    call = states[:, :, :1], bulk.keys, bulk.values, options.criterion, options.kernels
    return choice.choose_kernel(*call, layout=layout, records=records, turn=states.shape[2] > 1)


def estimate_log_bulk(layer: QAdALayer, store: TokenStore, query: Query, rows: Rows) -> Tensor | None:
    """The `log A_bulk` that heads decide by, as `Query` has it; None for "oracle", which is to know it.

    By "gaussian" eq. 7's, the larger one of two estimates, and `+inf` where nothing is known of the bulk, so that it is
    read. In the eyes of a criterion that compares no masses it is `+inf` for long-context heads, `-inf` for local ones.
    """
    options, kv_heads, found = layer.options, store.near_keys.shape[1], None
    if options.criterion == "oracle":
        return None
    if options.criterion == "gaussian" and rows.decisions:
        states = query.states.float()
        if options.other_moments is not None:
            found = estimate_by_others(options.other_moments, layer, states, query, rows)
        if (own := store.moments) is not None:
            told: dict[str, Any] = {"kv_heads": kv_heads, "scaling": query.scaling, "softcap": query.softcap}
            estimate = gaussian_log_bulk(states, *own.flat, rows.own_log_tokens, **told)
            if 0 in own.count and not store.update_moments:  # frozen before there was anything to know
                known = (
                    torch.tensor(own.count, dtype=torch.int64, device="cpu").to(estimate.device, non_blocking=True) > 0
                )
                says = known.view(-1, 1, 1, 1) | rows.own_log_tokens.isposinf()
                estimate = estimate.masked_fill(~says, torch.nan)
            found = estimate if found is None else torch.fmax(found, estimate)  # which takes a number before a nan
    if found is not None:
        return found
    key = weakref.ref(options), query.states.shape[1], query.states.device
    if layer.binding.log_bulk is None or layer.binding.log_bulk[0] != key:
        shape = kv_heads, query.states.shape[1] // kv_heads
        long_context = torch.full(shape, options.criterion != "local", dtype=torch.bool, device="cpu")
        if isinstance(options.criterion, StaticHeads):
            own_heads = layer.shared.model.shard.take_own(options.criterion.long_context[layer.index])
            long_context &= own_heads.reshape(kv_heads, -1).cpu()  # one entry for a group broadcasts
        constant = torch.full(shape, -torch.inf, dtype=torch.float32, device="cpu")
        constant = constant.masked_fill_(long_context, torch.inf)[None, :, :, None]
        layer.binding.log_bulk = key, constant.to(query.states.device, non_blocking=True)
    return layer.binding.log_bulk[1]


def estimate_by_others(moments: KeyMoments, layer: QAdALayer, states: Tensor, query: Query, rows: Rows) -> Tensor:
    """Eq. 7's `log A_bulk` `[batch, kv_heads, group, queries]` of queries `[batch, heads, queries, dim]` float32 by
    another prompt's moments: of each query those for its bulk's length."""
    assert layer.store is not None
    device, shard, kv_heads = states.device, layer.shared.model.shard, layer.store.near_keys.shape[1]
    told: dict[str, Any] = {"kv_heads": kv_heads, "scaling": query.scaling, "softcap": query.softcap}
    if states.shape[2] == 1:
        pair = layer.kept_moments.get(moments, layer.index, rows.row_moment_lengths, device, shard)
        return gaussian_log_bulk(states, *pair, rows.log_tokens, **told)
    lengths = rows.query_moment_lengths
    means, covariances = layer.kept_moments.get(moments, layer.index, lengths, device, shard)
    found = torch.full((), -torch.inf, dtype=torch.float32, device=device)
    for length, mean, covariance in zip(
        (0, *lengths), means.split(kv_heads), covariances.split(kv_heads), strict=False
    ):
        estimate = gaussian_log_bulk(states, mean, covariance, rows.log_tokens, **told)
        found = torch.where(rows.bulk_tokens.unsqueeze(2) > length, estimate, found)
    return found
