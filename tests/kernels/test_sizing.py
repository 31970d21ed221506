"""Into how many programs a bulk's tokens are cut."""

from __future__ import annotations

import pytest
import torch

from qada_cache.kernels.triton import sizing

CORES, AT_ONCE = sizing.MOST_CORES, {168: 3, 128: 4, None: 2}  # programs of so many registers on a core


@pytest.mark.parametrize("registers", AT_ONCE)
def test_programs_fill_whole_rounds(registers: int | None) -> None:
    """A long bulk is cut into 8 splits or more, and at most an eighth of the device's last round is idle."""
    device, slots = torch.device("cpu"), AT_ONCE[registers] * CORES
    for groups in range(1, 3000):
        splits = sizing.count_splits(10**9, 1, 10**9, groups, device, {"maxnreg": registers})
        rounds = -(-groups * splits // slots)
        assert splits >= 8
        assert 7 / 8 * rounds * slots <= groups * splits <= rounds * slots
        assert (rounds - 1) * slots < 8 * groups  # as few rounds as hold 8 splits


def test_a_bulk_is_cut_no_finer_than_asked() -> None:
    device, told = torch.device("cpu"), {"maxnreg": 128}
    assert sizing.count_splits(4096, 1024, 64, 8, device, told) == 4
    assert sizing.count_splits(10**6, 1024, 64, 1, device, told) == 64
