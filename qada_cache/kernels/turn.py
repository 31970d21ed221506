"""The tokens of a short turn, or of a draft, by a kernel for single ones: as rows that share what one row holds."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from .operands import Operands, Query, Rows


def attend_to_turn(kernel: Callable, query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
    """What `kernel`, a `fused_decode` that takes such rows, computes of each query of one row's call.

    Returns `[1, heads, queries, value_dim]` in the query's dtype, and bool flags `[1, kv_heads, group, queries]`.
    """
    mass = query.log_bulk
    assert mass is not None
    if mass.shape[3] > 1:  # [1, kv_heads, group, queries]
        mass = mass.permute(3, 1, 2, 0).contiguous()
    states = query.states.transpose(0, 2).contiguous()  # [queries, heads, 1, dim]
    out, flags = kernel(replace(query, states=states, valid=None, log_bulk=mass), rows.by_query, layer)
    return out.transpose(0, 2), flags.permute(3, 1, 2, 0)
