"""The tokens of a short turn, or of a draft, by the kernels of a decode step, without a word between host and device.

Every query decides, selects and reads for itself, so what several need is read several times. It counts once: kernels
write the bytes of a token, or of a head's sketch, to one place for all queries, and these are summed afterwards. At
least two queries are computed at once, and more if their estimates are `BLOCK_SCORES` at most. Heads that share a key,
of more than `cpu.MAX_QUERIES`, are such queries too, in equal parts.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..cpu import split_heads
from ..operands import Operands, Query, Rows
from ..query_adaptive import BLOCK_SCORES
from ..turn import attend_to_turn
from . import fused_decode


def fused_turn(query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
    """As `fused_decode`, for several queries a row, or for many heads that share a key: `[batch, heads, queries,
    value_dim]`, and bool flags `[batch, kv_heads, group, queries]`."""
    (batch, heads), tokens = query.states.shape[:2], layer.bulk_keys.shape[2]
    parts = heads // split_heads(heads) if layer.shares_keys and layer.kv_heads == 1 else 1
    if layer.sketch is not None:
        tokens = layer.sketch.scales.shape[2]
    shape, device = (batch, layer.kv_heads, 2 + tokens), query.states.device
    marks = torch.zeros(shape, dtype=torch.int32, device=device)
    # For one query Triton would compile anew, as a text grows long.
    at_once = max(2, BLOCK_SCORES // max(1, batch * heads * tokens))
    if not isinstance(layer.bound, Operands):
        layer.bound = replace(layer, bulk_read_bytes=None, sketch_read_bytes=None)
    marking: Operands = layer.bound
    marking.marks = marks
    found = attend_to_turn(fused_decode, query, rows, marking, at_once, parts)
    marking.marks = None
    if layer.sketch_read_bytes is not None:
        layer.sketch_read_bytes += marks[:, :, 0].sum()
    if layer.bulk_read_bytes is not None:
        layer.bulk_read_bytes += marks[:, :, 1:].sum()
    return found
