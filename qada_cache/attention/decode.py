"""Query-adaptive attention of one layer over its cached tokens."""

from typing import Any

import torch
from torch import Tensor

from ..criterion import gaussian_log_bulk
from ..kernels.cpu import compiled_decode
from ..kernels.operands import Moments, Query, Rows
from ..key_moments import KeyMoments
from ..state.asker import Asker
from ..storage import TokenStore
from .by_torch import attend_by_torch
from .plan import Plan, find_plan

TURN_TOKENS = 512  # the most that kernels compute: the matrices of longer turns are large enough for torch


def attend_adaptively(layer: Asker, store: TokenStore, query: Query) -> Tensor:
    """Query-adaptive attention: each head reads its sinks and window, a long-context head its bulk as well.

    The call's own tokens have been appended to `store` already, those of `query.unstored` without being written; every
    query has its own local set and is causal. There is at most a window of queries, and the result is `[batch, heads,
    queries, value_dim]` in their dtype. Padding queries get finite, unused values.
    """
    states = query.states
    rows = layer.shared.forward_pass.find_rows(
        lengths=store.lengths,
        flushed=store.flushed,
        end=store.end,
        queries=states.shape[2],
        valid=query.valid,
        device=states.device,
    )
    single, observed = states.shape[2] == 1, layer.is_observed()
    served = query.softcap is None and (single or takes_turns(layer, store, states)) and not observed
    plan = find_plan(layer, store, states, by_kernel=served, sinks=query.sink_logits is not None)
    return compute(layer, store, query, rows, plan)


def compute(layer: Asker, store: TokenStore, query: Query, rows: Rows, plan: Plan) -> Tensor:
    """Compute the output of `attend_adaptively` by this plan, and count decisions."""
    bulk, kernel, operands = store.bulk, plan.kernel, plan.operands
    storer = None if query.unstored is None else plan.storer
    by_itself = kernel is compiled_decode.fused_decode  # this one stores the token, and estimates `log A_bulk`
    if storer is not None or by_itself:
        query.moments = list_moments(layer, store, rows)
    if not query.moments:
        query.log_bulk = estimate_log_bulk(layer, store, query, rows, plan)
    if kernel is not None and bulk.offloaded:
        bulk.find_in_place()  # its copies to the host may be under way
    if storer is not None:
        storer.store(query, store.newest)
    elif query.unstored is not None and not by_itself:
        store.write(*query.unstored)
        query.unstored = None
    if kernel is None:
        out, flags = attend_by_torch(layer, store, query, rows, operands)
    else:
        # Nothing here waits for the device: small tensors of host numbers are copied to it without blocking.
        out, flags = kernel(query, rows, operands)
    layer.counters.count(flags, rows, operands.kv_heads * bulk.token_bytes)
    return out


def takes_turns(layer: Asker, store: TokenStore, states: Tensor) -> bool:
    """Whether kernels for single tokens compute a turn of several, `states` `[batch, heads, queries, dim]`. They read
    a whole head once for each token, and torch once for all, so they serve only if tokens are selected. The CPU's
    kernel takes one row; by Triton's every token reads for itself."""
    options = layer.options
    if store.sketch is None or states.shape[2] > TURN_TOKENS or options.kernels == "torch":
        return False
    return not states.is_cpu or options.kernels == "triton" or len(states) == 1


def list_moments(layer: Asker, store: TokenStore, rows: Rows) -> list[Moments]:
    """The moments by which kernels estimate `log A_bulk` of single queries, taking the larger estimate. Empty if
    `estimate_log_bulk` has to: the criterion is another one, or the moments were frozen before they had tokens."""
    options, own, found = layer.options, store.moments, list[Moments]()
    frozen = own is not None and not store.update_moments and 0 in own.count
    if options.criterion != "gaussian" or not rows.decisions or frozen:
        return found
    if (pair := find_other_moments(layer, store, rows.row_moment_lengths)) is not None:
        found.append((*pair, rows.log_tokens))
    if own is not None:
        found.append((*own.flat, rows.own_log_tokens))
    return found


def find_other_moments(layer: Asker, store: TokenStore, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
    """Another prompt's moments by which single queries are decided for, as of `LayerMoments.get`, for rows whose bulks
    have these rounded lengths; None if the options name none."""
    moments, near = layer.options.other_moments, store.near_keys
    if moments is None or layer.options.criterion != "gaussian":
        return None
    sizes = near.shape[1], near.shape[3]
    return layer.kept_moments.get(moments, layer.keys_of, lengths, near.device, layer.shared.model.shard, sizes)


def estimate_log_bulk(layer: Asker, store: TokenStore, query: Query, rows: Rows, plan: Plan) -> Tensor | None:
    """The `log A_bulk` that heads decide by, as `Query.log_bulk`; None under "oracle", which computes it from the bulk.

    Under "gaussian" it is eq. 7's, the larger of the estimates, and `+inf` if nothing is known of the bulk, so that the
    bulk is read. Under criteria that compare no masses it is `+inf` for long-context heads and `-inf` for local heads.
    """
    options, kv_heads, found = layer.options, store.near_keys.shape[1], None
    if options.criterion == "oracle":
        return None
    if options.criterion == "gaussian" and rows.decisions:
        states = query.states.float()
        if options.other_moments is not None:
            found = estimate_by_others(options.other_moments, layer, states, query, rows, kv_heads)
        if (own := store.moments) is not None:
            scoring: dict[str, Any] = {"kv_heads": kv_heads, "scaling": query.scaling, "softcap": query.softcap}
            estimate = gaussian_log_bulk(states, *own.flat, rows.own_log_tokens, **scoring)
            if 0 in own.count and not store.update_moments:  # frozen before some row had tokens in its bulk
                known = (
                    torch.tensor(own.count, dtype=torch.int64, device="cpu").to(estimate.device, non_blocking=True) > 0
                )
                says = known.view(-1, 1, 1, 1) | rows.own_log_tokens.isposinf()
                estimate = estimate.masked_fill(~says, torch.nan)
            found = estimate if found is None else torch.fmax(found, estimate)  # fmax ignores nan
    if found is not None:
        return found
    return plan.find_constant(layer)


def estimate_by_others(
    moments: KeyMoments, layer: Asker, states: Tensor, query: Query, rows: Rows, kv_heads: int
) -> Tensor:
    """Eq. 7's `log A_bulk` `[batch, kv_heads, group, queries]` of queries `[batch, heads, queries, dim]` float32, by
    another prompt's moments. Each query takes those for the length of its bulk."""
    lookup: Any = states.device, layer.shared.model.shard, (kv_heads, states.shape[3])
    scoring: dict[str, Any] = {"kv_heads": kv_heads, "scaling": query.scaling, "softcap": query.softcap}
    if states.shape[2] == 1:
        pair = layer.kept_moments.get(moments, layer.keys_of, rows.row_moment_lengths, *lookup)
        return gaussian_log_bulk(states, *pair, rows.log_tokens, **scoring)
    lengths = rows.query_moment_lengths
    means, covariances = layer.kept_moments.get(moments, layer.keys_of, lengths, *lookup)
    found = torch.full((), -torch.inf, dtype=torch.float32, device=states.device)
    for length, mean, covariance in zip(
        (0, *lengths), means.split(kv_heads), covariances.split(kv_heads), strict=False
    ):
        estimate = gaussian_log_bulk(states, mean, covariance, rows.log_tokens, **scoring)
        found = torch.where(rows.bulk_tokens.unsqueeze(2) > length, estimate, found)
    return found
