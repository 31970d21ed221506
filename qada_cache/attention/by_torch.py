"""A query-adaptive call by torch's operations, where no kernel serves, and its reports to audits and to the cache's
observer."""

from functools import cache, partial
from itertools import groupby
from operator import attrgetter, or_

import torch
from torch import Tensor

from ..criterion import find_long_context, log_mass, logit
from ..kernels import partial_attention
from ..kernels.operands import Operands, Query, Rows
from ..kernels.query_adaptive import (
    BulkAttention,
    Chosen,
    attend_near,
    decide,
    group_queries,
    score_near,
    select,
    sum_local,
)
from ..state.asker import Asker
from ..state.observation import Observation
from ..storage import TokenStore, reading


def attend_by_torch(
    layer: Asker, store: TokenStore, query: Query, rows: Rows, operands: Operands
) -> tuple[Tensor, Tensor]:
    """Compute a call for `decode.attend_adaptively`, and report it if the layer is observed. Returns the output, as
    there, and bool flags `[batch, kv_heads, group, queries]`. Heads decide and select; then tokens are gathered and
    attended to."""
    columns, every = slice(0, rows.columns), [[True] * operands.kv_heads] * store.batch
    keys, values = operands.near_keys[:, :, columns], operands.near_values[:, :, columns]
    grouped = group_queries(query, operands.kv_heads)
    scores = score_near(grouped, keys, query)
    log_local, log_bulk, bulk = sum_local(scores, rows, query.sink_logits), query.log_bulk, None
    if log_bulk is None:  # the oracle's: it needs every score, so everything is read whatever it decides
        bulk = attend_bulk(layer, store, query, operands, every, [])
        log_bulk = sum_bulk(scores, rows, bulk.lse)
    flags = decide(log_local, log_bulk, rows, operands)
    local = attend_near(scores, values, rows, flags, query.sink_logits)
    whole, selecting, chosen = every, list[list[bool]](), list[Chosen]()
    if bulk is None:
        whole, selecting, chosen = select(grouped, flags, local[1], store.bulk.lengths, query, rows, operands)
        bulk = attend_bulk(layer, store, query, operands, whole, chosen)
    out, read_lse = bulk.merge(*local, flags)
    _count_sketch_bytes(layer, store, selecting, whole)
    if layer.is_observed():

        def find_true_log_bulk() -> Tensor:
            true = attend_bulk(layer, store, query, operands, every, [], auditing=True)
            return sum_bulk(scores, rows, true.lse)

        seen = Observation(
            *(layer.index, query, rows),
            log_local=log_local,
            log_bulk=log_bulk,
            flags=flags,
            read_lse=read_lse.view_as(flags),
            bulk_lengths=tuple(store.bulk.lengths),
            whole=whole,
            chosen=chosen,
            find_true_log_bulk=find_true_log_bulk,
        )
        observe(layer, seen)
    return out.unflatten(2, flags.shape[2:]).flatten(1, 2).to(query.states.dtype), flags


def attend_bulk(
    layer: Asker,
    store: TokenStore,
    query: Query,
    operands: Operands,
    whole: list[list[bool]],
    chosen: list[Chosen],
    *,
    auditing: bool = False,
) -> BulkAttention:
    """Attend to the bulk: to all tokens of the heads in `whole`, then to the `chosen` tokens of other heads. The bytes
    read count as an audit's if `auditing`."""
    grouped, counters = group_queries(query, operands.kv_heads), layer.counters
    found = BulkAttention(
        grouped, query, operands.near_values.shape[3], partial(partial_attention, kernels=layer.options.kernels)
    )
    if not any(store.bulk.lengths):
        return found
    for part in reading.read_parts(store.bulk, whole):
        found.add_whole(part.rows, part.heads, part.keys, store.find_values(part.keys, part.values))
        if auditing:
            counters.audited_bytes += part.bulk_read_bytes
        else:
            counters.bulk_read_bytes += part.bulk_read_bytes
    by_head = [(head, list(blocks)) for head, blocks in groupby(chosen, key=attrgetter("row", "head"))]
    gathered = reading.gather_parts(store.bulk, [(head, blocks[0].tokens) for head, blocks in by_head])
    for ((row, head), blocks), part in zip(by_head, gathered, strict=True):
        assert operands.sketch is not None
        values = store.find_values(part.keys, part.values)
        for one in blocks:  # blocks of queries that share the tokens
            found.add_chosen(one, part.keys, values, operands.sketch)
        if not whole[row][head]:
            counters.bulk_read_bytes += part.bulk_read_bytes
    return found


def sum_bulk(scores: Tensor, rows: Rows, bulk_lse: Tensor) -> Tensor:
    """The true `log A_bulk` `[batch, kv_heads, group, queries]`, from the `scores` of pending tokens in the near buffer
    and the log-sum-exp `bulk_lse` of those over the stored bulk."""
    log_pending = log_mass(scores, rows.pending)
    return torch.logaddexp(log_pending, bulk_lse.view_as(log_pending))


def observe(layer: Asker, seen: Observation) -> None:
    """Report a call to the cache's observer, and audit it if it is the layer's turn."""
    try:
        if layer.shared.observer is not None:
            layer.shared.observer(seen)
        if layer.is_audited():
            audit(layer, seen)
    finally:
        seen.close()


def audit(layer: Asker, seen: Observation) -> None:
    """Count how one call's decisions compare with the truth, on the device: see `CacheStats.audit`."""
    log_local, log_bulk, flags = seen.log_local, seen.true_log_bulk, seen.flags
    decided = seen.rows.decided.unsqueeze(2)
    needed = find_long_context(log_local, log_bulk, logit(layer.options.threshold)) & decided
    all_lse = torch.logaddexp(log_local, log_bulk)
    missed = -torch.expm1((seen.read_lse - all_lse).clamp_max(0.0)).masked_fill(~decided, 0.0)
    tallies: tuple[Tensor, ...] = (decided.expand_as(flags), needed, needed & flags, flags, missed)
    if not _has_float64(decided.device):
        tallies = tuple(tally.cpu() for tally in tallies)
    layer.counters.add("audited", torch.stack([tally.sum(dtype=torch.float64) for tally in tallies]))


@cache
def _has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64, as Apple's do not, nor some of Intel's."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).sum()
    except (TypeError, RuntimeError):
        return False
    return True


def _count_sketch_bytes(layer: Asker, store: TokenStore, selecting: list[list[bool]], whole: list[list[bool]]) -> None:
    """Count the bytes that heads have read of the sketch."""
    bulk, counters = store.bulk, layer.counters
    in_records = bulk.records is not None
    for row, length in enumerate(bulk.lengths):
        readers = selecting[row] if selecting else []
        if in_records and bulk.sketch is not None and bulk.sketch.lengths[row]:  # decoding reads the sketch
            readers = list(map(or_, readers, whole[row])) if selecting else whole[row]
        if heads := sum(readers):
            assert bulk.sketch is not None
            counters.sketch_read_bytes += bulk.sketch.tensors.count_read_bytes(length) * heads
