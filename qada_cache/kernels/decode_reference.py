"""One decode step of one layer in plain torch: `query_adaptive.py` for a `DecodeCall`, as kernels are held to it."""

from collections.abc import Iterator

from torch import Tensor

from ..criterion import fixed_log_bulk
from ..sketch import MIN_TOKENS
from .decode_call import DecodeCall
from .query_adaptive import Masks, Part, Request, Step, attend, decide, estimated_log_bulk


def decode_step(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """What every `fused_decode` computes: attention of one query token a row.

    Returns:
        `[batch, heads, 1, value_dim]` in the query's dtype, and bool `[batch, kv_heads, group]`, True where a head
        read its bulk (there is one, and the query is decided).
    """
    query, rows, sketch = call.query, call.rows, call.sketch
    batch, heads, _, dim = query.shape
    local, staged, decided = (mask[:, None, None] for mask in (rows.local, rows.staged, rows.decided))
    bulk_tokens = rows.bulk_lengths[:, None, None] + staged.sum(dim=-1)
    # Cleared, because a weight of 0 does not keep a nan out of a sum.
    near_keys, near_values = (
        near[:, :, : rows.columns].masked_fill(~(local | staged).mT, 0.0) for near in (call.near_keys, call.near_values)
    )
    lengths = rows.bulk_lengths.expand(batch).tolist()
    step = Step(
        query.reshape(batch, -1, call.group, dim),
        near_keys,
        near_values,
        Masks(local, staged, bulk_tokens, decided & (bulk_tokens > 0)),
        call.rule,
        lengths,
        sketch,
        [length if length >= MIN_TOKENS else 0 for length in lengths],
    )

    def read(whole: list[list[bool]], requests: Iterator[Request] | None) -> Iterator[Part]:
        for row, wanted in enumerate(whole):
            for head in [head for head, does in enumerate(wanted) if does and lengths[row]]:
                yield _part(call, row, head, slice(0, lengths[row]))
        for request in requests or ():
            yield _part(call, request.row, request.head, request.tokens.to(call.bulk_keys.device), request)

    flags = decide(step, _log_bulk(call, step))
    out, _, selecting = attend(step, flags, read)
    if sketch is not None and call.sketched is not None:
        call.sketched += sum(sketch.read_bytes(lengths[row]) * sum(heads) for row, heads in enumerate(selecting))
    return out.reshape(batch, heads, 1, -1).to(query.dtype), flags.squeeze(3)


def _part(call: DecodeCall, row: int, head: int, tokens: slice | Tensor, request: Request | None = None) -> Part:
    """Tokens of one head of a call's bulk, on the query's device, counted."""
    keys, values = (
        bulk[row, head][tokens].to(call.query.device)[None, None] for bulk in (call.bulk_keys, call.bulk_values)
    )
    if call.pulled is not None:
        call.pulled += keys.nbytes + values.nbytes
    return Part(slice(row, row + 1), slice(head, head + 1), keys, values, request)


def _log_bulk(call: DecodeCall, step: Step) -> Tensor:
    """`log A_bulk` `[batch, kv_heads, group, 1]`, as a call's rule has it."""
    if call.rule.kind != "gaussian":
        return fixed_log_bulk(call.rule.criterion, step.scores[..., 0])
    current, others = None, []
    if call.mean is not None and call.covariance is not None and call.count is not None:
        current = call.mean, call.covariance, call.count
    if call.other_mean is not None and call.other_covariance is not None:
        others = [(0, call.other_mean, call.other_covariance)]
    return estimated_log_bulk(step, current, others, pool=call.rule.pool_staged)
