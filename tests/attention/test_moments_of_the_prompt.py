"""The current prompt's moments are of stored keys: pending tokens are not in them."""

import pytest
import torch
from harness import Inputs
from pair import Pair
from scenarios import small_buffers


@pytest.mark.parametrize("threshold", [0.01, 0.9])
def test_a_bulk_that_is_mostly_pending_is_read(threshold: float) -> None:
    """Whatever moments of its first keys say; by a low threshold, they would say that hardly any head needs it."""
    pair, inputs = Pair(threshold=threshold), Inputs()
    pair.update(*inputs(12))
    for _ in range(40):
        pair.update(*inputs(1))
    assert pair.layer.store.bulk.lengths == [1, 1]
    assert (pair.tally.local, pair.tally.long_context) == (0, 40 * 8)
    pair.update(*inputs(60))  # an exact call stores all of it
    pair.update(*inputs(1))
    assert (pair.tally.local > 0) is (threshold < 0.5)


def test_moments_frozen_before_there_were_any() -> None:
    """They say nothing of their row, and what another row's say of its own counts."""
    pair, inputs = Pair(update_moments=False), Inputs()
    with small_buffers():
        valid = torch.ones(2, 40, dtype=torch.bool)
        valid[1, :35] = False
        pair.update(*inputs(40), valid)
        for _ in range(30):
            pair.update(*inputs(1))
    assert pair.layer.store.moments.count == [29, 0]
    assert pair.tally.local > 0
    assert pair.tally.long_context > 4 * 20
