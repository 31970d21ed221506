"""Kernels of torch's operations in place of Triton's, for tests of the code around them: Triton's interpreter takes
seconds for a few steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from qada_cache.attention import plan
from qada_cache.kernels import choice
from qada_cache.kernels.decode_reference import find_log_bulk
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.kernels.query_adaptive import attend_near, decide, group_queries, score_near, sum_local
from qada_cache.kernels.reference import merge_partials, softmax_average


def quick_decode(query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
    """As `decode_reference.decode_step`, for one query or several, and a layer without a sketch. It never waits for the
    device, so that a graph can capture it."""
    assert layer.sketch is None
    assert query.log_bulk is not None
    # Sums go over the whole buffer, as in a graph: sums over fewer columns may be rounded in another way.
    room = 0, layer.near_keys.shape[2] - rows.columns
    rows = replace(rows, local=pad(rows.local, room), pending=pad(rows.pending, room))
    grouped = group_queries(query, layer.kv_heads)
    seen = (rows.local | rows.pending).any(dim=2).unsqueeze(3)
    keys, values = (near.masked_fill(~seen, 0.0) for near in (layer.near_keys, layer.near_values))
    scores = score_near(grouped, keys, query)
    flags = decide(sum_local(scores, rows, None), query.log_bulk, rows, layer)
    local = attend_near(scores, values, rows, flags)
    columns = torch.arange(layer.bulk_keys.shape[2], device=grouped.device)
    stored = (columns < rows.bulk_lengths[:, None])[:, None, None]
    visible = stored & flags.flatten(2).unsqueeze(3)  # [batch, kv_heads, group * queries, tokens]
    needed = visible.any(dim=2).unsqueeze(3)
    keys, values = (bulk.masked_fill(~needed, 0.0) for bulk in (layer.bulk_keys, layer.bulk_values))
    bulk = softmax_average(score_near(grouped, keys, query).flatten(2, 3).masked_fill(~visible, -torch.inf), values)
    out, _ = merge_partials(*local, *bulk)
    if layer.bulk_read_bytes is not None:
        token_bytes = sum(part.shape[3] * part.element_size() for part in (keys, values))
        layer.bulk_read_bytes += (flags.any(dim=(2, 3)) * rows.bulk_lengths[:, None]).sum() * token_bytes
    return out.reshape(*query.states.shape[:3], -1).to(query.states.dtype), flags


class QuickStorer:
    """Stands in for `triton.storing.Storer`: stores a step's new token in the near buffer."""

    def __init__(self, near_keys: Tensor, near_values: Tensor, heads: int) -> None:
        self._near = near_keys, near_values

    def store(self, query: Query, place: int | Tensor) -> None:
        """Store the token in column `place`, which is a tensor if a graph is captured, and estimate `log_bulk` if the
        query has moments."""
        assert query.unstored is not None
        column = torch.tensor([place]) if isinstance(place, int) else place
        for near, new in zip(self._near, query.unstored, strict=True):
            near.index_copy_(2, column.to(near.device), new)
        if query.moments:
            query.log_bulk, query.moments = find_log_bulk(query, self._near[0].shape[1]), ()
        query.unstored = None


def serve(patch: pytest.MonkeyPatch) -> None:
    """Have `quick_decode` and `QuickStorer` compute every step."""

    def choose(*_: Any, **__: Any) -> Any:
        return quick_decode

    patch.setattr(choice, "choose_kernel", choose)
    patch.setattr(plan, "make_storer", lambda _, *made: QuickStorer(*made))
