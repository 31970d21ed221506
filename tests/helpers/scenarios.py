"""Ways to fill and use a cache, each compared with the reference after every call, in any environment.

A scenario takes a `Pair` and its `Inputs`; the environment (poisoned memory, an offloaded bulk, another device) is
what the test around it sets up.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from harness import LOCAL, SINKS, WINDOW, Inputs
from pair import Pair
from torch import Tensor

from qada_cache import storage
from qada_cache.storage import row_tensors

Scenario = Callable[[Pair, Inputs], None]


@contextmanager
def small_buffers() -> Iterator[None]:
    """Inside, pending tokens of one window at most, room for 4 recent tokens at first, and a bulk that grows in steps
    of 8 tokens, so that short runs fill all of these often."""
    sizes = (storage, "PENDING_TOKENS", 0), (storage, "ROOM_TOKENS", 4), (row_tensors, "GRANULE", 8)
    with ExitStack() as stack:
        for place, name, tokens in sizes:
            stack.enter_context(mock.patch.object(place, name, tokens))
        yield


def left_padded(lengths: list[int], tokens: int) -> Tensor:
    """Bool `[batch, tokens]`: row `r` has `lengths[r]` real tokens, on the right."""
    return torch.arange(tokens)[None] >= tokens - torch.tensor(lengths)[:, None]


def poisoned_padding(tensors: tuple[Tensor, ...], valid: Tensor, fill: float = torch.nan) -> tuple[Tensor, ...]:
    """The tensors `[batch, heads, tokens, dim]` with `fill` where bool `valid [batch, tokens]` is False, so that
    padding which enters a result shows."""
    return tuple(tensor.masked_fill(~valid[:, None, :, None].to(tensor.device), fill) for tensor in tensors)


def prefill_and_decode(pair: Pair, inputs: Inputs) -> None:
    """One-shot prefill, then one token at a time until pending tokens have been flushed more than once."""
    pair.update(*inputs(57))
    for _ in range(30):
        pair.update(*inputs(1))


def from_the_first_token(pair: Pair, inputs: Inputs) -> None:
    """Token by token from nothing: sinks, then window, then the first bulk token, all by decoding."""
    for _ in range(45):
        pair.update(*inputs(1))


def chunked_prefill(pair: Pair, inputs: Inputs) -> None:
    """Chunks shorter than sinks, window, and longer than both; then decoding."""
    for tokens in (2, 9, 40, 13, 8, 1, 30, 1, 1):
        pair.update(*inputs(tokens))


def turns(pair: Pair, inputs: Inputs) -> None:
    """Short (adaptive) and long (exact) turns in between decoding."""
    for tokens in (40, 1, 1, 5, WINDOW, WINDOW, 3, WINDOW + 1, 1, WINDOW, 2, 33, 1, 7, WINDOW):
        pair.update(*inputs(tokens))


def left_padding(pair: Pair, inputs: Inputs) -> None:
    """Rows without a sink, with some, without a full window, and with a bulk, prefilled and decoded together."""
    valid = left_padded([1, SINKS - 1, LOCAL - 1, 40], 40)
    # Finite: the first call is the model's own attention, where 0 x nan of a masked token would be nan.
    pair.update(*poisoned_padding(inputs(40, 4), valid, 50.0), valid)
    for tokens in (1, 1, 4, WINDOW, 1, 17, *([1] * 12)):
        pair.update(*inputs(tokens, 4))


def holes(pair: Pair, inputs: Inputs) -> None:
    """Padding at the left, middle and right of later turns, short and long; once a row has no real token."""
    pair.update(*inputs(14, 3))
    generator = torch.Generator().manual_seed(5)
    for turn, tokens in enumerate((5, WINDOW, 1, 20, 4, 1, 31, 6, WINDOW, WINDOW, 1, 2)):
        valid = torch.rand(3, tokens, generator=generator) < 0.6
        valid[turn % 3] = False  # this row sits the turn out
        pair.update(*poisoned_padding(inputs(tokens, 3), valid), valid)
    for _ in range(3):
        pair.update(*inputs(1, 3))


def crops(pair: Pair, inputs: Inputs) -> None:
    """Crops within the window, into pending tokens, bulk and sinks, and to nothing; each built upon again."""
    pair.update(*inputs(60))
    for grow, crop in ((1, 1), (3, 2), (6, 5), (WINDOW, 0), (5, WINDOW + 3), (1, 25), (2, 20), (1, 12), (WINDOW, 11)):
        pair.update(*inputs(grow))
        pair.crop(crop)
    for tokens in (1, 4, 20, 1):
        pair.update(*inputs(tokens))
    pair.crop(pair.reference.length)
    pair.update(*inputs(30))
    pair.update(*inputs(1))


def crops_with_padding(pair: Pair, inputs: Inputs) -> None:
    """Crops that take unlike numbers of real tokens from the rows, of whole and of parts of padded turns."""
    valid = left_padded([6, 30, 20], 30)
    pair.update(*poisoned_padding(inputs(30, 3), valid, 50.0), valid)
    generator = torch.Generator().manual_seed(6)
    for tokens, crop in ((4, 2), (WINDOW, 3), (1, 1), (14, 9), (5, 0), (WINDOW, 12), (3, 20), (4, 13), (2, 1)):
        valid = torch.rand(3, tokens, generator=generator) < 0.7
        pair.update(*poisoned_padding(inputs(tokens, 3), valid), valid)
        pair.crop(crop)
        pair.update(*inputs(1, 3))


def rows(pair: Pair, inputs: Inputs) -> None:
    """Rows reordered, repeated and dropped while they differ in length and padding."""
    valid = left_padded([5, 30, 18], 30)
    pair.update(*poisoned_padding(inputs(30, 3), valid, 50.0), valid)
    for verb, argument in (
        ("reorder_cache", [2, 0, 0]),
        ("reorder_cache", [1, 0, 2]),
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", [5, 0, 2, 3]),
        ("batch_select_indices", [True, False, True, True]),
        ("batch_select_indices", [2]),
    ):
        argument = torch.tensor(argument) if isinstance(argument, list) else argument
        getattr(pair.layer, verb)(argument)
        if isinstance(argument, int):
            pair.reference.repeat(argument)
        else:
            pair.reference.select_rows(argument)
        pair.check_state()
        for tokens in (1, 3, 10, 1):
            pair.update(*inputs(tokens, pair.layer.store.batch))


def rows_meet(pair: Pair, inputs: Inputs) -> None:
    """Rows that reach the same length, stored the same way, by different ways: frozen moments tell them apart."""
    valid = left_padded([40, 26], 40)
    pair.update(*poisoned_padding(inputs(40), valid, 50.0), valid)
    for tokens in (7, 7, 5):  # the second row catches up by decoding, with small buffers through a flush
        valid = torch.tensor([[False], [True]]).expand(2, tokens)
        pair.update(*poisoned_padding(inputs(tokens), valid), valid)
    pair.crop(5)  # of the first row, only padding
    assert pair.reference.lengths == [40, 40]
    for tokens in (20, 1, WINDOW, 5, 20):
        pair.update(*inputs(tokens))


def reset(pair: Pair, inputs: Inputs) -> None:
    """Nothing of the first use is left in the second, which has another batch size."""
    pair.update(*inputs(50))
    pair.update(*inputs(1))
    pair.reset()
    pair.update(*inputs(20, 3))
    for _ in range(10):
        pair.update(*inputs(1, 3))


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        prefill_and_decode,
        from_the_first_token,
        chunked_prefill,
        turns,
        left_padding,
        holes,
        crops,
        crops_with_padding,
        rows,
        rows_meet,
        reset,
    )
}


MIXED = ["turns", "holes", "crops_with_padding", "rows"]  # enough for options that do not change the bulk's moments


def play(
    scenario: str,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    value_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    **options: Any,
) -> Pair:
    """Play a scenario through, with `options` of the cache. Returns the pair, whose `tally` tells what was compared."""
    inputs = Inputs(seed, heads=heads, kv_heads=kv_heads, value_dim=value_dim, dtype=dtype, device=device)
    pair = Pair(heads=heads, kv_heads=kv_heads, **options)
    SCENARIOS[scenario](pair, inputs)
    return pair
