"""The tokens of a short turn, or of a draft, by a kernel for one query a row: each token becomes a row of its own, and
these rows share one row's buffers. So do equal parts of many heads that share one key."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .operands import Operands, Query, Rows


def attend_to_turn(
    kernel: Callable, query: Query, rows: Rows, layer: Operands, at_once: int | None = None, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """The result of `kernel`, a `fused_decode` that takes such rows, for each query of a call.

    One call of `kernel` takes up to `at_once` queries of a row, by default all. The heads of one KV head may be split
    into equal `parts`, each of which decides and selects for itself.

    Returns `[batch, heads, queries, value_dim]` in the query's dtype, and bool flags `[batch, kv_heads, group,
    queries]`.
    """
    batch, _, queries, _ = query.states.shape
    blocks = -(-queries // (at_once or queries))
    # All blocks have one size, as a kernel is bound to it: so the last one may overlap the one before it.
    size = -(-queries // blocks)
    outs, flags = [], []
    for start in range(0, blocks * size, size):
        first = min(start, queries - size)
        results = kernel(*_split(query, rows, slice(first, first + size), parts), layer)
        out, flag = (part.unflatten(0, (batch, size, parts))[:, start - first :] for part in results)
        outs.append(out.squeeze(4).flatten(2, 3))  # [batch, queries, heads, value_dim]
        flags.append(flag.squeeze(5).transpose(2, 3).flatten(3))  # [batch, queries, kv_heads, group]
    if blocks > 1:
        outs, flags = [torch.cat(outs, dim=1)], [torch.cat(flags, dim=1)]
    return outs[0].transpose(1, 2), flags[0].permute(0, 2, 3, 1)


def _split(query: Query, rows: Rows, block: slice, parts: int) -> tuple[Query, Rows]:
    """A block of each row's queries, and the tokens they see, as rows of one query each, or of a part of its heads.
    Those of one row are neighbours."""
    batch, mass = len(query.states), query.log_bulk
    assert mass is not None
    states = query.states[:, :, block].transpose(1, 2).unflatten(2, (parts, -1)).flatten(0, 2).unsqueeze(2).contiguous()
    if mass.shape[3] > 1 or parts > 1:  # [batch, kv_heads, group, queries]
        mass = mass.expand(batch, -1, -1, query.states.shape[2])[..., block].unflatten(2, (parts, -1))
        mass = mass.permute(0, 4, 2, 1, 3).flatten(0, 2).unsqueeze(3).contiguous()
    key = batch, block.start, block.stop, parts
    if key not in rows.split:
        rows.split[key] = _split_rows(rows, batch, block, parts)
    return replace(query, states=states, valid=None, log_bulk=mass), rows.split[key]


def _split_rows(rows: Rows, batch: int, block: slice, parts: int) -> Rows:
    """`rows` for a block of queries, a row for each query and part of heads. The layout is the same for one row and
    several, and for any block, so that kernels are compiled once for all."""
    local, pending, tokens, lengths, decided = (
        part if len(part) == batch else part.expand(batch, *part.shape[1:])
        for part in (rows.local, rows.pending, rows.bulk_tokens, rows.bulk_lengths, rows.decided)
    )
    local, pending, tokens, decided = (_lay_out(part, block, parts) for part in (local, pending, tokens, decided))
    lengths = lengths.repeat_interleave((block.stop - block.start) * parts)
    return Rows(local, pending, tokens, lengths, decided)


def _lay_out(part: Tensor, block: slice, parts: int) -> Tensor:
    split = part[:, :, block].transpose(1, 2).flatten(0, 1).unsqueeze(-2)
    return split.repeat_interleave(parts, dim=0).clone(memory_format=torch.contiguous_format)
