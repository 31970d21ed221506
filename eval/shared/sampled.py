"""Prompts read by a sample, as GPUs read them (`qada_cache/kernels/triton/selected_prompt.py`), by torch: so what that
loses is measured without a GPU."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from qada_cache.attention import exact
from qada_cache.kernels.sampled_prompt import (
    NEXT_BLOCK,
    NEXT_HEAD,
    SHARES,
    encode,
    find_block,
    find_capacity,
    find_probabilities,
    find_sum_stride,
    find_whole,
)

CODES = torch.float8_e4m3fn  # of queries and keys, as GPUs of capability 8.9 and above have them


@torch.inference_mode()
def sampled_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, threshold: float, sinks: int, window: int,
    out: Tensor, end: int = 0,
) -> Tensor:  # fmt: skip
    """As `triton.selected_prompt.selected_attention`, for one row; its docstring explains the arguments."""
    (heads, queries), (kv_heads, tokens) = query.shape[1:3], key.shape[1:3]
    group, past, length, pairs = heads // kv_heads, tokens - queries, max(end, tokens), 0
    together = find_block(length, max(query.shape[3], value.shape[3]))
    whole, capacity = find_whole(length - past, window, together), find_capacity(tokens)
    arguments = {"scaling": scaling, "threshold": threshold, "sinks": sinks, "stride": find_sum_stride(length)}
    query, key, value = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (query, key, value))
    codes, steps = encode(key, CODES)
    for kv_head, (keys, values) in enumerate(zip(key[0], value[0], strict=True)):
        group_heads = slice(kv_head * group, (kv_head + 1) * group)
        for block, first in enumerate(range(0, queries, together)):
            begin, rows = past + first, query[0, group_heads, first : first + together]
            parts = torch.full((group, begin), SHARES, dtype=query.dtype, device="cpu")
            if begin and block < whole:
                parts = find_probabilities(rows, codes[0, kv_head], steps[0, kv_head], begin, **arguments)
            for head, head_queries, each in zip(range(heads)[group_heads], rows, parts, strict=True):
                sampled, weights = draw(each, NEXT_BLOCK * (begin // together) + NEXT_HEAD * head)
                if len(sampled) > capacity:
                    sampled, weights = draw(torch.full_like(each, SHARES), 0)
                attended = attend(scaling * head_queries, keys, values, begin, sampled, weights)
                out[0, head, first : first + together] = attended.to(out.dtype)
                pairs += len(sampled) * len(head_queries) + len(head_queries) * (len(head_queries) + 1) // 2
    return torch.tensor(pairs)


def attend(queries: Tensor, keys: Tensor, values: Tensor, begin: int, taken: Tensor, times: Tensor) -> Tensor:
    """The attention `[queries, dim]` of a block of queries, over the block's own tokens, from `begin` on, and over the
    tokens `taken` before it. Each of these counts `times` as often."""
    size = len(queries)
    read = torch.cat([taken, torch.arange(begin, begin + size, device="cpu")])
    scores = queries @ keys[read].T
    scores[:, : len(taken)] += times.log()
    later = torch.ones(size, size, dtype=torch.bool, device="cpu").triu(1)
    scores[:, len(taken) :].masked_fill_(later, -torch.inf)
    return scores.softmax(dim=1) @ values[read]


def draw(parts: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """A systematic sample by probabilities `parts` `[tokens]`, in units of 1 / `SHARES`, from offset `start`: the
    indices of the sampled tokens, and the weight of each, its inverse probability."""
    passed = start % SHARES + parts.long().cumsum(dim=0)
    taken = (passed // SHARES > (passed - parts.long()) // SHARES).nonzero()[:, 0]
    return taken, SHARES / parts[taken]


@contextlib.contextmanager
def read_as_gpus_do() -> Iterator[None]:
    """Inside, a `prefill_threshold` reads prompts on a CPU by this sample. Denormal numbers are flushed to zero, as a
    processor may take a hundred times as long for them."""
    torch.set_flush_denormal(True)
    with mock.patch.object(exact, "find_selected_attention", return_value=sampled_attention):
        try:
            yield
        finally:
            torch.set_flush_denormal(False)
