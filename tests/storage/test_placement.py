"""A budget chooses the bulks that are on the device: by shares, by bytes, and by free memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from devices import devices
from scenarios import small_buffers

from qada_cache.storage import placement
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.placement import Placement, find_free


def test_shares_are_of_bytes_and_of_each_device() -> None:
    """Rounded down, and spread over the layers, whatever each of them takes. Growth changes nothing."""
    for share, sizes, wanted in (
        (0.0, [2] * 8, []),
        (0.25, [2] * 8, [3, 7]),
        (0.5, [2] * 8, [1, 3, 5, 7]),
        (0.99, [2] * 8, [1, 2, 3, 4, 5, 6, 7]),
        (1.0, [2] * 8, list(range(8))),
        (0.5, [4, 4, 1, 1, 1, 1], [1, 3, 5]),
        (0.5, [4, 1, 1, 1, 1, 1], [1, 2, 3, 4]),
    ):
        with devices(), small_buffers(), mock.patch.object(torch.accelerator, "synchronize"):
            shared, stores = Placement(share), []
            for index, heads in enumerate(sizes):
                for place in ("maia:0", "maia:1"):
                    like = torch.ones(1, heads, 5, 4, device=place)
                    stores.append(Bulk(like, like, offloading=True, placement=shared, layer=index))
                    stores[-1].append(slice(0, 1), like, like)
            for store in stores:
                like = torch.ones(1, store.tensors[0].shape[1], 90, 4, device=store.device)
                store.append(slice(0, 1), like, like)
        for place in ("maia:0", "maia:1"):
            assert [store.layer for store in stores if store.placed and str(store.device) == place] == wanted
        assert all((str(store.keys.device) == "cpu") == store.offloaded for store in stores)


@pytest.mark.parametrize("budget", [0, 3_000, 6_000, 1.0, 0.5])
def test_a_bulk_that_moves_to_another_device_is_placed_there(budget: int | float) -> None:
    """Also an empty one, which decides nothing before its first flush."""
    with devices(), small_buffers(), mock.patch.object(torch.accelerator, "synchronize"):
        shared, keys = Placement(budget), torch.randn(1, 2, 40, 4)
        for tokens in (0, 40):
            stores = [
                Bulk(keys[:, :, :0], keys[:, :, :0], offloading=True, placement=shared, layer=at) for at in (0, 1)
            ]
            moved = []
            for store in stores:
                store.append(slice(0, 1), keys[:, :, :tokens], keys[:, :, :tokens]) if tokens else None
                assert not store.placed  # on a CPU host and device are one
                like = keys[:, :, :0].to("maia:0")
                moved.append(Bulk(like, like, offloading=True, placement=shared, layer=store.layer))
                moved[-1].take(store)
                if not tokens:
                    moved[-1].append(slice(0, 1), keys.to("maia:0"), keys.to("maia:0"))
            del store, stores
            assert [store.placed for store in moved] == {
                0: [False, False], 3_000: [True, False], 6_000: [True, True], 1.0: [True, True], 0.5: [False, True],
            }[budget]  # fmt: skip
            assert all(torch.equal(store.keys[:, :, :40].cpu(), keys) for store in moved)
            del moved


def test_auto_leaves_a_reserve() -> None:
    for free, left in ((2**40, 2**40 - int(0.1 * 2**40)), (2**31, 2**30), (2**29, -(2**29))):
        with mock.patch.object(placement, "get_max_memory", return_value={"cpu": free}):
            assert find_free(torch.device("cpu")) == left


def test_auto_counts_what_torch_keeps_as_free() -> None:
    """After a prefill torch keeps most of what its activations took, which the device counts as taken. It asks only the
    device that it is about: to ask opens a context, which takes some hundred MiB."""
    asked = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 2**32, 2**35

    with (
        mock.patch.object(torch.cuda, "mem_get_info", mem_get_info),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=7 * 2**32),
        mock.patch.object(torch.cuda, "memory_allocated", return_value=5 * 2**32),
        mock.patch.object(placement, "get_max_memory", side_effect=AssertionError("of every device")),
    ):
        assert find_free(torch.device("cuda", 1)) == 3 * 2**32 - int(0.1 * 2**35)
    assert asked == [torch.device("cuda", 1)]
