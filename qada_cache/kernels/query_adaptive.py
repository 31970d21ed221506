"""Query-adaptive attention in plain torch, step by step: what kernels are held to, and what serves without one.

`score_near`, `decide`, `attend_near`; `select` what to read of the bulk, and `BulkAttention` over what was gathered.
Where a bulk lies is no affair of these functions.
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

BLOCK_SCORES = 1 << 22  # estimates of scores that are held at once


class Chosen(NamedTuple):
    """Tokens of one KV head that some queries of a call read, and what stands for the rest, as in `Selection`."""

    row: int
    head: int
    queries: Tensor  # int64, the numbers of these queries
    tokens: Tensor  # int64, on the query's device: those that any query of the call chose of this head
    seen: Tensor  # bool `[queries, tokens]`, by each of them
    log_unread: Tensor
    tilt: Tensor


def group_queries(query: Query, kv_heads: int) -> Tensor:
    """`[batch, kv_heads, group * queries, dim]`: the query heads of a KV head share its keys."""
    batch, _, _, dim = query.states.shape
    return query.states.reshape(batch, kv_heads, -1, dim)


def score_near(grouped: Tensor, near_keys: Tensor, query: Query) -> Tensor:
    """Scores over the near buffer, `[batch, kv_heads, group, queries, columns]` float32, of keys that are finite."""
    scores = torch.matmul(grouped.float(), near_keys.float().mT) * query.scaling
    return criterion.soft_cap(scores, query.softcap).unflatten(2, (-1, query.states.shape[2]))


def sum_local(scores: Tensor, rows: Rows, sink_logits: Tensor | None) -> Tensor:
    """`log A_local` `[batch, kv_heads, group, queries]`, a learned sink included."""
    log_local = criterion.log_mass(scores, rows.local)
    return log_local if sink_logits is None else torch.logaddexp(log_local, _view_sinks(sink_logits, log_local))


def _view_sinks(sink_logits: Tensor, like: Tensor) -> Tensor:
    return sink_logits.float().view(*like.shape[1:3], 1)


def decide(log_local: Tensor, log_bulk: Tensor, rows: Rows, layer: Operands) -> Tensor:
    """The long-context heads, bool `[batch, kv_heads, group, queries]`: of queries with a bulk."""
    flags = criterion.find_long_context(log_local, log_bulk, layer.logit_threshold)
    decided = rows.decided & (rows.bulk_tokens > 0)
    return criterion.decide_for_groups(flags, layer.group_rule) & decided.unsqueeze(2)


def attend_near(
    scores: Tensor, near_values: Tensor, rows: Rows, flags: Tensor, sink_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every head over its sinks and window, long-context heads over their pending tokens too: `out` `[batch, kv_heads,
    group * queries, value_dim]` and `lse` float32. A learned sink is a token whose value is zero."""
    visible = rows.local.unsqueeze(1) | (rows.pending.unsqueeze(1) & flags.unsqueeze(-1))
    out, lse = softmax_average(scores.masked_fill(~visible, -torch.inf).flatten(2, 3), near_values)
    if sink_logits is None:
        return out, lse
    sinks = _view_sinks(sink_logits, flags).expand(flags.shape).flatten(2, 3)
    return merge_partials(out, lse, torch.zeros_like(out), sinks)


def select(
    grouped: Tensor, flags: Tensor, lse: Tensor, lengths: list[int], query: Query, rows: Rows, layer: Operands
) -> tuple[list[list[bool]], list[list[bool]], list[Chosen]]:
    """What to read of bulks of `lengths` tokens, by `flags` as `decide` returns them and `lse` of `attend_near`:
    whether each row and KV head reads its whole bulk, whether it selects tokens, and these. It may do both: each query
    of a call reads what it would alone, all if its own estimates are unreliable.

    To read flags on the host is where a step waits for the device.
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
        parts, found = selects[row, head].nonzero()[:, 0].split(block), []
        for part in parts:
            options |= {"log_buffer": log_buffer[:, part], "bulk_tokens": bulk_tokens[row, 0, part]}
            options["flags"] = flags[row, head, :, part]
            found.append(select_tokens(states[:, part], layer.sketch[row, head], lengths[row], **options))
        tokens = torch.stack([one.tokens.any(dim=0) for one in found]).any(dim=0).nonzero()[:, 0]
        for part, one in zip(parts, found, strict=True):
            chosen.append(Chosen(row, head, part, tokens, one.tokens[:, tokens], one.log_unread, one.tilt))
    return whole, selecting, chosen


class BulkAttention:
    """Attention over the bulk, as much of it as was added, for queries `[batch, kv_heads, group * queries, dim]`."""

    def __init__(self, grouped: Tensor, query: Query, value_dim: int, partial: Callable = partial_attention) -> None:
        """Over nothing yet; `partial` is `partial_attention`, or what computes the same."""
        self._grouped, self._query, self._partial = grouped, query, partial
        # float32; what stands for unread tokens is in `out` and `lse`, what was read alone in `read_lse`.
        self.out = grouped.new_zeros(*grouped.shape[:-1], value_dim, dtype=torch.float32)
        self.lse = grouped.new_full(grouped.shape[:-1], -torch.inf, dtype=torch.float32)
        self.read_lse = self.lse.clone()

    def add_whole(self, rows: slice, heads: slice, keys: Tensor, values: Tensor) -> None:
        """All queries over the whole bulk of rows and KV heads `[rows, heads, tokens, dim]`."""
        at, scaling, softcap = (rows, heads), self._query.scaling, self._query.softcap
        self.out[at], self.lse[at] = self._partial(self._grouped[at], keys, values, scaling=scaling, softcap=softcap)
        self.read_lse[at] = self.lse[at]

    def add_chosen(self, chosen: Chosen, keys: Tensor, values: Tensor, sketch: Sketch) -> None:
        """Some queries over tokens chosen for them `[1, 1, tokens, dim]`, and what stands for the rest."""
        queries, scaling = self._query.states.shape[2], self._query.scaling
        grouped, out, lse, read_lse = (
            part.unflatten(2, (-1, queries))[chosen.row, chosen.head]
            for part in (self._grouped, self.out, self.lse, self.read_lse)
        )
        states = grouped[:, chosen.queries]
        arguments: dict[str, Any] = {"scaling": scaling, "mask": chosen.seen, "softcap": self._query.softcap}
        found = partial_attention(states, keys[0], values[0], **arguments)
        rest = estimate_unread(states, sketch[chosen.row, chosen.head], chosen.tilt, scaling=scaling)
        read_lse[:, chosen.queries] = found[1]
        out[:, chosen.queries], lse[:, chosen.queries] = merge_partials(*found, rest, chosen.log_unread)

    def merge(self, out: Tensor, lse: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
        """The output `[batch, kv_heads, group * queries, value_dim]` float32 of local attention and, for flagged heads,
        of this; and the log-sum-exp of the scores of all that was read."""
        bulk_lse, read_lse = (part.masked_fill(~flags.flatten(2), -torch.inf) for part in (self.lse, self.read_lse))
        return merge_partials(out, lse, self.out, bulk_lse)[0], torch.logaddexp(lse, read_lse)
