"""Query-adaptive attention in plain torch, step by step: the reference of kernels, and the path without one.

The steps are `score_near`, `decide`, `attend_near`, `select` and `BulkAttention`. Callers gather the bulk's tokens, so
these functions do not depend on where it lies.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import criterion
from ..sketch import MIN_TOKENS
from ..sketch.codec import Sketch
from ..sketch.selection import estimate_unread, find_unreliable, select_tokens
from .operands import Operands, Query, Rows
from .reference import merge_partials, partial_attention, softmax_average

BLOCK_SCORES = 1 << 22  # estimated scores in memory at once


class Chosen(NamedTuple):
    """The tokens of one KV head that some queries of a call read, and estimates of unread tokens, as in `Selection`."""

    row: int
    head: int
    queries: Tensor  # int64, indices of these queries in the call
    tokens: Tensor  # int64, on the query's device: tokens of this head that any query of the call selected
    seen: Tensor  # bool `[queries, tokens]`, True for a token that a query selected
    log_unread: Tensor
    tilt: Tensor


def group_queries(query: Query, kv_heads: int) -> Tensor:
    """Queries `[batch, kv_heads, group * queries, dim]`, by KV head, so that the heads of a group share its keys."""
    batch, _, _, dim = query.states.shape
    return query.states.reshape(batch, kv_heads, -1, dim)


def score_near(grouped: Tensor, near_keys: Tensor, query: Query) -> Tensor:
    """Scores over the near buffer, float32 `[batch, kv_heads, group, queries, columns]`. All keys must be finite."""
    scores = torch.matmul(grouped.float(), near_keys.float().mT) * query.scaling
    return criterion.soft_cap(scores, query.softcap).unflatten(2, (-1, query.states.shape[2]))


def sum_local(scores: Tensor, rows: Rows, sink_logits: Tensor | None) -> Tensor:
    """`log A_local` `[batch, kv_heads, group, queries]`, a learned sink included."""
    log_local = criterion.log_mass(scores, rows.local)
    return log_local if sink_logits is None else torch.logaddexp(log_local, _view_sinks(sink_logits, log_local))


def _view_sinks(sink_logits: Tensor, like: Tensor) -> Tensor:
    return sink_logits.float().view(*like.shape[1:3], 1)


def decide(log_local: Tensor, log_bulk: Tensor, rows: Rows, layer: Operands) -> Tensor:
    """The flags of long-context heads, bool `[batch, kv_heads, group, queries]`; False for queries without a bulk."""
    flags = criterion.find_long_context(log_local, log_bulk, layer.logit_threshold)
    decided = rows.decided & (rows.bulk_tokens > 0)
    return criterion.decide_for_groups(flags, layer.group_rule) & decided.unsqueeze(2)


def attend_near(
    scores: Tensor, near_values: Tensor, rows: Rows, flags: Tensor, sink_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of every head over its sinks and window, and of long-context heads over their pending tokens too.

    Returns `out` float32 `[batch, kv_heads, group * queries, value_dim]` and `lse` float32. A learned sink is a token
    whose value is zero.
    """
    visible = rows.local.unsqueeze(1) | (rows.pending.unsqueeze(1) & flags.unsqueeze(-1))
    out, lse = softmax_average(scores.masked_fill(~visible, -torch.inf).flatten(2, 3), near_values)
    if sink_logits is None:
        return out, lse
    sinks = _view_sinks(sink_logits, flags).expand(flags.shape).flatten(2, 3)
    return merge_partials(out, lse, torch.zeros_like(out), sinks)


def select(
    grouped: Tensor, flags: Tensor, lse: Tensor, lengths: list[int], query: Query, rows: Rows, layer: Operands
) -> tuple[list[list[bool]], list[list[bool]], list[Chosen]]:
    """The tokens to read of bulks of `lengths` tokens, by `flags` of `decide` and `lse` of `attend_near`.

    Returns whether each row and KV head reads its whole bulk, whether it selects tokens, and the selected tokens. A
    KV head may do both: each query of a call reads what it would alone, all tokens if its own estimates are unreliable.
    Here a step waits for the device, as the host reads flags.
    """
    wanted = flags.any(dim=2)  # [batch, kv_heads, queries]
    if layer.sketch is None or not any(lengths):
        return (wanted.any(dim=-1).tolist() if any(lengths) else [[]] * len(lengths)), [], []
    unreliable = find_unreliable(grouped, layer.sketch, scaling=query.scaling).view_as(flags)
    sketched = torch.tensor([length >= MIN_TOKENS for length in lengths], dtype=torch.bool, device=flags.device)
    selects = wanted & sketched[:, None, None] & ~(unreliable & flags).any(dim=2)
    selecting, whole = torch.stack([selects, wanted & ~selects]).any(dim=-1).tolist()
    chosen, shape = [], flags.shape[2:]  # [group, queries]
    bulk_tokens = rows.bulk_tokens.expand(len(flags), -1, -1)
    options: dict[str, Any] = {"scaling": query.scaling, "softcap": query.softcap}
    options["token_threshold"] = layer.token_threshold
    for row, head in [(row, head) for row, heads in enumerate(selecting) for head, does in enumerate(heads) if does]:
        states, log_buffer = (tensor[row, head].unflatten(0, shape) for tensor in (grouped, lse))
        block = max(1, BLOCK_SCORES // (shape[0] * lengths[row]))
        parts, selections = selects[row, head].nonzero()[:, 0].split(block), []
        for part in parts:
            options |= {"log_buffer": log_buffer[:, part], "bulk_tokens": bulk_tokens[row, 0, part]}
            options["flags"] = flags[row, head, :, part]
            selections.append(select_tokens(states[:, part], layer.sketch[row, head], lengths[row], **options))
        tokens = torch.stack([each.tokens.any(dim=0) for each in selections]).any(dim=0).nonzero()[:, 0]
        for part, each in zip(parts, selections, strict=True):
            chosen.append(Chosen(row, head, part, tokens, each.tokens[:, tokens], each.log_unread, each.tilt))
    return whole, selecting, chosen


class BulkAttention:
    """Attention of queries `[batch, kv_heads, group * queries, dim]` over the bulk tokens that were added."""

    def __init__(self, grouped: Tensor, query: Query, value_dim: int, partial: Callable = partial_attention) -> None:
        """Attention over no tokens yet. `partial` is `partial_attention`, or a function that computes the same."""
        self._grouped, self._query, self._partial = grouped, query, partial
        # float32. `out` and `lse` include the estimate for unread tokens; `read_lse` is of read tokens alone.
        self.out = grouped.new_zeros(*grouped.shape[:-1], value_dim, dtype=torch.float32)
        self.lse = grouped.new_full(grouped.shape[:-1], -torch.inf, dtype=torch.float32)
        self.read_lse = self.lse.clone()

    def add_whole(self, rows: slice, heads: slice, keys: Tensor, values: Tensor) -> None:
        """Add the whole bulk of these rows and KV heads, for all queries; keys are `[rows, heads, tokens, dim]`."""
        at, scaling, softcap = (rows, heads), self._query.scaling, self._query.softcap
        self.out[at], self.lse[at] = self._partial(self._grouped[at], keys, values, scaling=scaling, softcap=softcap)
        self.read_lse[at] = self.lse[at]

    def add_chosen(self, chosen: Chosen, keys: Tensor, values: Tensor, sketch: Sketch) -> None:
        """Add the tokens `[1, 1, tokens, dim]` that some queries selected, and the estimate for unread tokens."""
        queries, scaling = self._query.states.shape[2], self._query.scaling
        grouped, out, lse, read_lse = (
            part.unflatten(2, (-1, queries))[chosen.row, chosen.head]
            for part in (self._grouped, self.out, self.lse, self.read_lse)
        )
        states = grouped[:, chosen.queries]
        arguments: dict[str, Any] = {"scaling": scaling, "mask": chosen.seen, "softcap": self._query.softcap}
        over_read = partial_attention(states, keys[0], values[0], **arguments)
        rest = estimate_unread(states, sketch[chosen.row, chosen.head], chosen.tilt, scaling=scaling)
        read_lse[:, chosen.queries] = over_read[1]
        out[:, chosen.queries], lse[:, chosen.queries] = merge_partials(*over_read, rest, chosen.log_unread)

    def merge(self, out: Tensor, lse: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
        """Merge local attention, `out` and `lse`, with this of the bulk for flagged heads.

        Returns the output float32 `[batch, kv_heads, group * queries, value_dim]`, and the log-sum-exp of the scores of
        all tokens read.
        """
        bulk_lse, read_lse = (part.masked_fill(~flags.flatten(2), -torch.inf) for part in (self.lse, self.read_lse))
        return merge_partials(out, lse, self.out, bulk_lse)[0], torch.logaddexp(lse, read_lse)
