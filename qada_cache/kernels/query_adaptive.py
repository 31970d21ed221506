"""Query-adaptive attention in plain torch: the definition that kernels are held to, and what serves without one.

It knows nothing of where a bulk lies: it requests keys and values head by head.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import criterion
from ..sketch import MIN_TOKENS
from ..sketch.codec import Sketch
from ..sketch.selection import Selection, select_tokens, unread_value, unreliable
from .decode_call import Rule
from .reference import merge_partials, partial_attention, softmax_average

BLOCK_SCORES = 1 << 22  # estimates of scores that are held at once


@dataclass(frozen=True, eq=False)
class Masks:
    """What the queries of one call see; `rows` is their number, or 1 where all are alike."""

    local: Tensor  # bool `[rows, 1, queries, columns]`: of the local buffer, the query's sinks and window, itself too
    pending: Tensor  # bool, same shape: tokens of the query's bulk that still lie in the local buffer
    bulk_tokens: Tensor  # int64 `[rows, 1, queries]`, the paper's `T_bulk` of each query
    decided: Tensor  # bool `[rows, 1, queries]`, real queries that have a bulk: the ones a criterion decides about


@dataclass(eq=False)
class Step:
    """One call of one layer: several queries a row."""

    grouped_queries: Tensor  # `[batch, kv_heads, group * queries, dim]`: query heads of a KV head share its keys
    local_keys: Tensor  # `[batch, kv_heads, columns, dim]`, finite
    local_values: Tensor  # likewise, of `value_dim`
    masks: Masks
    rule: Rule
    lengths: list[int]  # tokens of each row's bulk, all of which precede every query's window
    sketch: Sketch | None  # of rows of `MIN_TOKENS` and more; None: long-context heads read all of the bulk
    partial: Callable = partial_attention  # or what computes the same
    scores: Tensor = field(init=False)  # over the local buffer, `[batch, kv_heads, group, queries, columns]` float32

    def __post_init__(self) -> None:
        scores = torch.matmul(self.grouped_queries.float(), self.local_keys.float().mT) * self.rule.scaling
        self.scores = criterion.soft_cap(scores, self.rule.softcap).unflatten(2, (-1, self.masks.local.shape[2]))


class Request(NamedTuple):
    """Tokens of one KV head (int64, on the query's device), selected for some queries of the call."""

    row: int
    head: int
    tokens: Tensor
    queries: slice
    selection: Selection


class Part(NamedTuple):
    """A part of the bulk on the query's device, and what it cost."""

    rows: slice
    heads: slice
    keys: Tensor  # `[rows, heads, tokens, dim]`
    values: Tensor  # likewise, of `value_dim`
    request: Request | None = None  # what asked for it; None: a head is there whole, or the next block of it
    bulk_read_bytes: int = 0  # from the bulk's own memory; prefetched ones were counted before
    resident_hit_bytes: int = 0  # from a resident instead


# Parts in any order: of rows and KV heads that are read whole, and of requests, which are made as they are asked for,
# None without a sketch.
Read = Callable[[list[list[bool]], Iterator[Request] | None], Iterable[Part]]

# `(out, lse)` over the bulk, what stands for unread tokens included, and `lse` of what was read alone.
BulkAttention = tuple[Tensor, Tensor, Tensor]


def decide(step: Step, log_bulk: Tensor) -> Tensor:
    """The long-context heads, bool `[batch, kv_heads, group, queries]`, by `log_bulk`, which broadcasts to that."""
    log_local = criterion.log_mass(step.scores, step.masks.local)
    flags = criterion.long_context(log_local, log_bulk, step.rule.logit_threshold)
    return criterion.group_decision(flags, step.rule.group_rule) & step.masks.decided.unsqueeze(2)


def attend(
    step: Step, flags: Tensor, read: Read, whole: BulkAttention | None = None
) -> tuple[Tensor, Tensor, list[list[bool]]]:
    """Every head over its sinks and window, long-context heads over their bulk too, or what matters of it.

    `flags` are as `decide` returns them; reading them on the host is where a step waits for the device. `whole` is what
    `attend_bulk` says of all of the bulk, if that is known.

    Returns the output `[batch, kv_heads, group * queries, value_dim]` float32, the log-sum-exp of the scores of all
    that was read, and whether each row and KV head read selected tokens; empty without a bulk or a sketch.
    """
    visible = step.masks.local.unsqueeze(1) | (step.masks.pending.unsqueeze(1) & flags.unsqueeze(-1))
    out, lse = softmax_average(step.scores.masked_fill(~visible, -torch.inf).flatten(2, 3), step.local_values)
    if not any(step.lengths):
        return out, lse, []
    long_heads, selecting = flags.flatten(2), []
    if whole is None:
        wanted, requests = long_heads.any(dim=-1), None  # [batch, kv_heads]
        if step.sketch is None:
            wanted_heads = wanted.tolist()
        else:
            # A KV head that is unreliable for one query is read whole for all queries of the call.
            unreliable_heads = unreliable(step.grouped_queries, step.sketch, scaling=step.rule.scaling) & long_heads
            sketched = torch.tensor([length >= MIN_TOKENS for length in step.lengths], device=flags.device)
            selects = wanted & sketched[:, None] & ~unreliable_heads.any(dim=-1)
            selecting, wanted_heads = torch.stack([selects, wanted & ~selects]).tolist()
            requests = _requests(step, step.sketch, flags, lse, selecting)
        whole = attend_bulk(step, read, wanted_heads, requests)
    bulk_out, *found = whole
    bulk_lse, read_lse = (part.masked_fill(~long_heads, -torch.inf) for part in found)
    return merge_partials(out, lse, bulk_out, bulk_lse)[0], torch.logaddexp(lse, read_lse), selecting


def attend_bulk(
    step: Step, read: Read, wanted: list[list[bool]], requests: Iterator[Request] | None = None
) -> BulkAttention:
    """All queries of the wanted rows and KV heads over the whole bulk, those of requests over what they select of it,
    and what stands for the rest; the others over nothing."""
    grouped, group, scaling, softcap = step.grouped_queries, step.scores.shape[2], step.rule.scaling, step.rule.softcap
    out = grouped.new_zeros(*grouped.shape[:-1], step.local_values.shape[-1], dtype=torch.float32)
    lse = grouped.new_full(grouped.shape[:-1], -torch.inf, dtype=torch.float32)
    read_lse = lse.clone()
    queries, outs, masses, read_masses = (part.unflatten(2, (group, -1)) for part in (grouped, out, lse, read_lse))
    for part in read(wanted, requests):
        if part.request is None:
            place = part.rows, part.heads
            out[place], lse[place] = step.partial(grouped[place], part.keys, part.values, scaling=scaling)
            read_lse[place] = lse[place]
            continue
        row, head, tokens, which, selection = part.request
        at = row, head, slice(None), which
        query, mask = queries[at], selection.tokens[:, tokens]
        found = partial_attention(query, part.keys[0], part.values[0], scaling=scaling, mask=mask, softcap=softcap)
        assert step.sketch is not None
        rest = unread_value(query, step.sketch[row, head], selection.tilt, scaling=scaling)
        read_masses[at] = found[1]
        outs[at], masses[at] = merge_partials(*found, rest, selection.log_unread)
    return out, lse, read_lse


def _requests(
    step: Step, sketch: Sketch, flags: Tensor, buffer_lse: Tensor, selecting: list[list[bool]]
) -> Iterator[Request]:
    """What the selecting KV heads ask for, some queries of one at a time."""
    shape, rule = flags.shape[2:], step.rule  # [group, queries]
    options: Any = {"scaling": rule.scaling, "token_threshold": rule.token_threshold, "softcap": rule.softcap}
    bulk_tokens = step.masks.bulk_tokens.expand(len(flags), -1, -1)
    for row, head in [(row, head) for row, heads in enumerate(selecting) for head, does in enumerate(heads) if does]:
        query, log_buffer = (tensor[row, head].unflatten(0, shape) for tensor in (step.grouped_queries, buffer_lse))
        block = max(1, BLOCK_SCORES // (shape[0] * step.lengths[row]))
        for first in range(0, shape[1], block):
            part = slice(first, first + block)
            options |= {"log_buffer": log_buffer[:, part], "bulk_tokens": bulk_tokens[row, 0, part]}
            options["flags"] = flags[row, head, :, part]
            selection = select_tokens(query[:, part], sketch[row, head], step.lengths[row], **options)
            yield Request(row, head, selection.tokens.any(dim=0).nonzero()[:, 0], part, selection)
