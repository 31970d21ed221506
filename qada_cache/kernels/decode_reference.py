"""One decode step of one layer in plain torch: the definition the fused kernel is tested against."""

import torch
from torch import Tensor

from ..sketch import MIN_TOKENS, select_tokens, unread_value, unreliable
from .decision import current_log_bulk, larger, needs_long_context, other_log_bulk
from .decode_call import DecodeCall
from .reference import merge_partials, partial_attention, softmax_average


def fused_decode(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Query-adaptive attention of one query token a row: local attention, criterion, bulk where needed, merge.

    Returns:
        `[batch, heads, 1, value_dim]` in the query's dtype, and bool `[batch, kv_heads, group]`, True where a head
        read its bulk (there is one, and the query is decided).
    """
    query, rows, rule, sketch, scaling = call.query, call.rows, call.rule, call.sketch, call.rule.scaling
    batch, heads, _, dim = query.shape
    packed = query.reshape(batch, -1, call.group, dim)
    local, staged, decided = (
        mask[:, None, None] for mask in (rows.local, rows.staged, rows.decided)
    )  # the same for every head
    bulk_tokens = rows.bulk_lengths[:, None, None] + staged.sum(dim=-1)
    # Cleared, because a weight of 0 does not keep a nan out of a sum.
    near_keys, near_values = (
        near[:, :, : rows.columns].masked_fill(~(local | staged).mT, 0.0) for near in (call.near_keys, call.near_values)
    )
    scores = torch.matmul(packed.float(), near_keys.float().mT) * scaling  # [batch, kv_heads, group, columns]

    log_bulk = current = other = None
    if rule.kind == "gaussian":
        asked = packed.float(), scores.unsqueeze(3)
        if call.mean is not None and call.covariance is not None and call.count is not None:
            current = current_log_bulk(
                *asked, call.mean, call.covariance, call.count, staged=staged if rule.pool_staged else None,
                bulk_tokens=bulk_tokens, scaling=scaling,
            )  # fmt: skip
        if call.other_mean is not None and call.other_covariance is not None:
            moments = call.other_mean, call.other_covariance
            other = other_log_bulk(*asked, *moments, bulk_tokens=bulk_tokens, scaling=scaling)
        log_bulk = larger(current, other)
    flags = needs_long_context(
        scores.unsqueeze(3), log_bulk, criterion=rule.criterion, local=local, decided=decided & (bulk_tokens > 0),
        threshold=rule.threshold, group_rule=rule.group_rule,
    ).squeeze(3)  # fmt: skip

    visible = local | (staged & flags.unsqueeze(-1))
    out, lse = softmax_average(scores.masked_fill(~visible, -torch.inf), near_values)
    needed = flags.any(dim=-1)  # [batch, kv_heads]
    every, rough = bulk_tokens.expand(batch, 1, 1), torch.zeros_like(needed)
    stored = rows.bulk_lengths.expand(batch).tolist()
    if sketch is not None:
        rough = (flags & unreliable(packed, sketch, scaling=scaling)).any(dim=-1)
    for row, length in enumerate(stored):
        for head in needed[row].nonzero()[:, 0].tolist():
            keys, values = call.bulk_keys[row, head, :length], call.bulk_values[row, head, :length]
            one, selection = packed[row, head, None, None], None
            if sketch is not None and length >= MIN_TOKENS and not rough[row, head]:
                selection = select_tokens(
                    packed[row, head, :, None], sketch[row, head], length, log_near=lse[row, head, :, None],
                    bulk_tokens=every[row, 0], flags=flags[row, head, :, None], scaling=scaling,
                    token_threshold=rule.token_threshold,
                )  # fmt: skip
                keys, values = (part[selection.tokens[0].to(part.device)] for part in (keys, values))
                if call.sketched is not None:
                    call.sketched += sketch.read_bytes(length)
            keys, values = keys.to(query.device), values.to(query.device)
            far_out, far_lse = partial_attention(one, keys[None, None], values[None, None], scaling=scaling)
            if sketch is not None and selection is not None:
                rest = unread_value(packed[row, head], sketch[row, head], selection.tilt[:, 0], scaling=scaling)
                far_out, far_lse = merge_partials(far_out, far_lse, rest[None, None], selection.log_unread.mT[None])
            far_lse = far_lse[0, 0].masked_fill(~flags[row, head], -torch.inf)
            out[row, head], lse[row, head] = merge_partials(out[row, head], lse[row, head], far_out[0, 0], far_lse)
            if call.pulled is not None:
                call.pulled += keys.nbytes + values.nbytes
    return out.reshape(batch, heads, 1, -1).to(query.dtype), flags
