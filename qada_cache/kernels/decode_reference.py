"""One decode step of one layer in plain torch: the definition the fused kernel is tested against."""

import torch
from torch import Tensor

from ..sketch import MIN_TOKENS, Sketch, select_tokens, unread_value, unreliable
from .decision import current_log_bulk, larger, needs_long_context, other_log_bulk
from .reference import merge_partials, partial_attention, softmax_average


def fused_decode(
    query: Tensor,
    near_keys: Tensor,
    near_values: Tensor,
    bulk_keys: Tensor,
    bulk_values: Tensor,
    *,
    local: Tensor,
    staged: Tensor,
    bulk_lengths: Tensor,
    decided: Tensor,
    scaling: float,
    threshold: float,
    group_rule: str = "head",
    criterion: str | Tensor = "gaussian",
    mean: Tensor | None = None,
    covariance: Tensor | None = None,
    count: Tensor | None = None,
    pool_staged: bool = False,
    other_mean: Tensor | None = None,
    other_covariance: Tensor | None = None,
    pulled: Tensor | None = None,
    sketch: Sketch | None = None,
    token_threshold: float = 0.0,
    sketched: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Query-adaptive attention of one query token a row: local attention, criterion, bulk where needed, merge.

    A query's tokens are its local ones (sinks and window, itself included) and its bulk, which is the first
    `bulk_lengths` tokens of the bulk buffers and the `staged` columns of the near buffers. Columns of the near
    buffers that are neither, tokens past `bulk_lengths`, and the bulk buffers of KV heads without a flagged head are
    not read and may hold anything, nan included. "`batch` or 1" below means that one row may stand for all.

    Args:
        query: `[batch, heads, 1, dim]`; all tensors below share its dtype unless one is given.
        near_keys, near_values: `[batch, kv_heads, columns, dim]` and `value_dim`.
        bulk_keys, bulk_values: `[batch, kv_heads, capacity, dim]` and `value_dim`.
        local, staged: bool `[batch or 1, columns]`, disjoint.
        bulk_lengths: int64 `[batch or 1]`.
        decided: bool `[batch or 1]`, False for a padding query: its heads are local, its output finite and unused.
        scaling: multiplies the scores.
        threshold: tau of eq. 2 and eq. 7, in [0, 1].
        group_rule: as in `criterion.group_decision`.
        criterion: "gaussian" (eq. 7), "dense" (no head is local), "local" (every head is), or the static table bool
            `[kv_heads, group]`, True for a long-context head.
        mean, covariance: float32 `[batch or 1, kv_heads, dim]` and `[batch or 1, kv_heads, dim, dim]`, moments of the
            first `count` keys of the row's bulk, for eq. 7.
        count: int64 `[batch or 1]`, if these are given. Where it is 0 they say nothing.
        pool_staged: pool them with those of the staged tokens.
        other_mean, other_covariance: likewise, of another prompt's keys. If both are given, the larger estimate of
            `A_bulk` counts; if nothing is known, every head with a bulk needs it.
        pulled: int64 `[]`, to which the bytes of bulk keys and values that were needed are added.
        sketch: of the bulk's keys, with room for as many tokens. With it, a KV head reads of a bulk of
            `MIN_TOKENS` and more what `select_tokens` says; a group of which a long-context head finds it
            `unreliable` reads all, and so does every group without it.
        token_threshold: as there.
        sketched: int64 `[]`, to which the bytes of the sketch that were needed are added.

    Returns:
        `[batch, heads, 1, value_dim]` in the query's dtype, and bool `[batch, kv_heads, group]`, True where a head
        read its bulk (there is one, and the query is decided).
    """
    batch, heads, _, dim = query.shape
    kv_heads = near_keys.shape[1]
    packed = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    local, staged, decided = (mask[:, None, None] for mask in (local, staged, decided))  # one query of every head
    bulk_tokens = bulk_lengths[:, None, None] + staged.sum(dim=-1)
    # Cleared, because a weight of 0 does not keep a nan out of a sum.
    near_keys, near_values = (near.masked_fill(~(local | staged).mT, 0.0) for near in (near_keys, near_values))
    scores = torch.matmul(packed.float(), near_keys.float().mT) * scaling  # [batch, kv_heads, group, columns]

    log_bulk = current = other = None
    if isinstance(criterion, str) and criterion == "gaussian":
        asked = packed.float(), scores.unsqueeze(3)
        if mean is not None and covariance is not None and count is not None:
            current = current_log_bulk(
                *asked, mean, covariance, count, staged=staged if pool_staged else None, bulk_tokens=bulk_tokens,
                scaling=scaling,
            )  # fmt: skip
        if other_mean is not None and other_covariance is not None:
            other = other_log_bulk(*asked, other_mean, other_covariance, bulk_tokens=bulk_tokens, scaling=scaling)
        log_bulk = larger(current, other)
    flags = needs_long_context(
        scores.unsqueeze(3), log_bulk, criterion=criterion, local=local, decided=decided & (bulk_tokens > 0),
        threshold=threshold, group_rule=group_rule,
    ).squeeze(3)  # fmt: skip

    visible = local | (staged & flags.unsqueeze(-1))
    out, lse = softmax_average(scores.masked_fill(~visible, -torch.inf), near_values)
    needed = flags.any(dim=-1)  # [batch, kv_heads]
    every, rough = bulk_tokens.expand(batch, 1, 1), torch.zeros_like(needed)
    lengths = [length if length >= MIN_TOKENS else 0 for length in bulk_lengths.expand(batch).tolist()]
    if sketch is not None:
        rough = (flags & unreliable(packed, sketch, lengths, scaling=scaling)).any(dim=-1)
    for row, length in enumerate(bulk_lengths.expand(batch).tolist()):
        for head in needed[row].nonzero()[:, 0].tolist():
            keys, values = bulk_keys[row, head, :length], bulk_values[row, head, :length]
            one, selection = packed[row, head, None, None], None
            if sketch is not None and lengths[row] and not rough[row, head]:
                selection = select_tokens(
                    packed[row, head, :, None], sketch[row, head], length, log_near=lse[row, head, :, None],
                    bulk_tokens=every[row, 0], flags=flags[row, head, :, None], scaling=scaling,
                    token_threshold=token_threshold,
                )  # fmt: skip
                keys, values = (part[selection.tokens[0].to(part.device)] for part in (keys, values))
                if sketched is not None:
                    sketched += sketch.read_bytes(length)
            keys, values = keys.to(query.device), values.to(query.device)
            far_out, far_lse = partial_attention(one, keys[None, None], values[None, None], scaling=scaling)
            if sketch is not None and selection is not None:
                rest = unread_value(packed[row, head], sketch[row, head], selection.tilt[:, 0], scaling=scaling)
                far_out, far_lse = merge_partials(far_out, far_lse, rest[None, None], selection.log_unread.mT[None])
            far_lse = far_lse[0, 0].masked_fill(~flags[row, head], -torch.inf)
            out[row, head], lse[row, head] = merge_partials(out[row, head], lse[row, head], far_out[0, 0], far_lse)
            if pulled is not None:
                pulled += keys.nbytes + values.nbytes
    return out.reshape(batch, heads, 1, -1).to(query.dtype), flags
