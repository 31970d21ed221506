"""Memory that was never written, or that holds removed tokens, must not be read: here it is made to show."""

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from scenarios import MIXED, SCENARIOS, play, small_buffers
from torch import Tensor

from qada_cache.storage import TokenStore
from qada_cache.storage.bulk import Bulk


@pytest.fixture
def poison() -> Iterator[list[int]]:
    """Uninitialised memory and truncated bulk tokens are nan; near buffers begin as large finite garbage.

    Finite, because a masked near column is multiplied by a weight of 0. Yields the shapes poisoned, so that a test
    can tell that something was.
    """
    poisoned: list[int] = []
    empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty
    truncate, initialise = Bulk.truncate, TokenStore.__init__

    def fill(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.numel():
            poisoned.append(tensor.numel())
            tensor.fill_(torch.nan)
        return tensor

    def poisoned_truncate(bulk: Bulk, lengths: list[int], held: list[int]) -> None:
        truncate(bulk, lengths, held)
        for row, length in enumerate(lengths):
            fill(bulk.keys[row, :, length:])
            fill(bulk.values[row, :, length:])

    def poisoned_init(store: TokenStore, *args: Any, **kwargs: Any) -> None:
        initialise(store, *args, **kwargs)
        store.near_keys.fill_(1e4)
        store.near_values.fill_(-1e4)

    with (
        mock.patch.object(torch, "empty", lambda *args, **kwargs: fill(empty(*args, **kwargs))),
        mock.patch.object(torch, "empty_like", lambda *args, **kwargs: fill(empty_like(*args, **kwargs))),
        mock.patch.object(Tensor, "new_empty", lambda *args, **kwargs: fill(new_empty(*args, **kwargs))),
        mock.patch.object(Bulk, "truncate", poisoned_truncate),
        mock.patch.object(TokenStore, "__init__", poisoned_init),
        small_buffers(),
    ):
        yield poisoned


OPTIONS: list[dict[str, Any]] = [{"update_moments": False}, {"criterion": "oracle"}, {"criterion": "dense"}]


@pytest.mark.parametrize(
    ("scenario", "options"), [*((each, {}) for each in SCENARIOS), *itertools.product(MIXED, OPTIONS)], ids=str
)
def test_nothing_uninitialised_is_read(scenario: str, options: dict[str, Any], poison: list[int]) -> None:
    pair = play(scenario, **options)
    assert poison
    assert pair.tally.local + pair.tally.long_context > 20


@pytest.mark.parametrize("value_dim", [16, 24])
def test_half_precision_and_value_dimension(value_dim: int, poison: list[int]) -> None:
    play("crops_with_padding", dtype=torch.bfloat16, value_dim=value_dim)
    assert poison
