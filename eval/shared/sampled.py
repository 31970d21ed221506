"""Prompts read by a sample, as GPUs read them (`qada_cache/kernels/triton/selected_prompt.py`), by torch: so what that
loses is measured without a GPU. Shares are estimated in float32, or float64, and not rounded to the kernel's 8 bits."""

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from qada_cache.attention import exact

FIRST, STRIDE, FEW, FLOOR = 64, 16, 1024, 1 / 64  # as the kernels have them
BLOCK, SHORT, SHORT_BLOCK, TILE = 128, 8192, 64, 64  # likewise
WHOLE = 256  # in these parts a probability is told
NEXT_BLOCK, NEXT_HEAD = 159, 97  # steps of where sums of probabilities begin


@torch.inference_mode()
def sampled_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, threshold: float, sinks: int, window: int,
    out: Tensor, end: int = 0,
) -> Tensor:  # fmt: skip
    """As `triton.selected_prompt.selected_attention`, of one row; that says what it is told."""
    (heads, queries), (kv_heads, tokens) = query.shape[1:3], key.shape[1:3]
    group, past, pairs = heads // kv_heads, tokens - queries, 0
    together = SHORT_BLOCK if max(end, tokens) < SHORT else BLOCK
    rest = max(end, tokens) - past
    whole = min(-(-max(0, rest - window) // together), (rest - 1) // together)  # the first that reads everything
    query, key, value = (part[0].to(torch.promote_types(part.dtype, torch.float32)) for part in (query, key, value))
    for head, (keys, values) in enumerate(zip(key - key.mean(dim=1, keepdim=True), value, strict=True)):
        own = slice(head * group, (head + 1) * group)
        for block, first in enumerate(range(0, queries, together)):
            begin, size = past + first, min(together, queries - first)
            # Less the keys' mean, which no softmax shows.
            scores = scaling * (query[own, first : first + size] @ keys[: begin + size].T)
            scores[:, :, begin:].masked_fill_(torch.ones(size, size, dtype=torch.bool).triu(1), -torch.inf)
            read = group * begin
            if begin and block < whole:
                start, capacity = NEXT_BLOCK * (begin // together) + NEXT_HEAD * own.start, tokens // (2 * TILE) * TILE
                lift = find_lift(scores, begin, threshold, sinks, start=start, capacity=max(BLOCK, capacity))
                scores[:, :, :begin] += lift[:, None]
                read = int(lift.isfinite().sum())
            out[0, own, first : first + size] = (scores.softmax(dim=2) @ values[: begin + size]).to(out.dtype)
            pairs += read * size + group * size * (size + 1) // 2
    return torch.tensor(pairs)


def find_lift(scores: Tensor, begin: int, threshold: float, sinks: int, *, start: int, capacity: int) -> Tensor:
    """What is added to the scores of the `begin` tokens before a block, of `scores` `[group, queries, tokens]`: the
    logarithm of how often one counts, `-inf` if it is not taken, `[group, begin]`. The group's first head has passed
    `start` parts."""
    far, near = scores[:, :, :begin], scores[:, :, begin:]
    rest = far[:, :, FIRST + STRIDE // 2 :: STRIDE] + math.log(STRIDE)
    met = torch.cat([near, far[:, :, :FIRST], rest], dim=2).logsumexp(dim=2, keepdim=True)
    shares = (far - met).exp().amax(dim=1)
    parts = (WHOLE * shares * max(begin, FEW) / threshold).clamp(WHOLE * FLOOR, WHOLE).ceil()
    parts[:, :sinks] = WHOLE
    starts = (start + NEXT_HEAD * torch.arange(len(far))) % WHOLE
    passed = starts[:, None] + parts.long().cumsum(dim=1)
    taken = passed // WHOLE > (passed - parts.long()) // WHOLE
    lift = (WHOLE / parts).log().masked_fill(~taken, -torch.inf)
    crowded = taken.sum(dim=1, keepdim=True) > capacity
    return lift.masked_fill(crowded, 0.0)


@contextlib.contextmanager
def read_as_gpus_do() -> Iterator[None]:
    """Have a `prefill_threshold` read prompts on a CPU so. Numbers that are next to none become none meanwhile: a
    processor may take a hundred times as long for them."""
    torch.set_flush_denormal(True)
    with mock.patch.object(exact, "find_selected_attention", return_value=sampled_attention):
        try:
            yield
        finally:
            torch.set_flush_denormal(False)
