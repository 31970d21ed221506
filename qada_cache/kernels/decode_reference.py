"""One decode step of one layer in plain torch: `query_adaptive.py` for a `DecodeCall`, as kernels are held to it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..criterion import (
    current_score_moments,
    fixed_log_bulk,
    gaussian_log_bulk,
    larger_estimate,
    score_moments,
)
from ..sketch import MIN_TOKENS
from .decode_call import DecodeCall
from .query_adaptive import Masks, Part, Request, Step, attend, decide


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
    rule, query, tokens = call.rule, step.packed.float(), step.masks.bulk_tokens.unsqueeze(2)
    like = step.scores[..., 0]
    if rule.kind != "gaussian":
        return fixed_log_bulk(rule.criterion, like)
    current = other = None
    if call.mean is not None and call.covariance is not None and call.count is not None:
        mean, variance, known = current_score_moments(
            query, step.scores, call.mean, call.covariance, call.count,
            staged=step.masks.staged if rule.pool_staged else None, scaling=rule.scaling,
        )  # fmt: skip
        current = gaussian_log_bulk(mean, variance, tokens).masked_fill(~known, torch.nan)
    if call.other_mean is not None and call.other_covariance is not None:
        mean, variance = score_moments(query, call.other_mean, call.other_covariance, scaling=rule.scaling)
        other = gaussian_log_bulk(mean.view_as(like), variance.view_as(like), tokens)
    return larger_estimate(current, other)
