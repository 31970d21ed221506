"""Which heads are kept on the device: those flagged most often and most recently, within the budget."""

from __future__ import annotations

import math
from unittest import mock

import torch
from stand_in import accelerator

from qada_cache.storage import reading, residents
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.residents import Head, LayerResidents, Residents
from qada_cache.storage.transfers import AsyncCopy

CPU = torch.device("cpu")


def keep(layer: LayerResidents, head: Head, keys: torch.Tensor, values: torch.Tensor, score: float) -> bool:
    return layer.keep(head, keys.nbytes + values.nbytes, score, lambda: AsyncCopy((keys, values)))


class Heads:
    """Layers of one cache, one row, whose heads all hold `tokens` tokens of 8 bytes; nothing is read."""

    def __init__(self, budget: int | float | str, *, layers: int = 2, heads: int = 4, tokens: int = 5) -> None:
        self.shared = Residents(budget)
        self.layers = [LayerResidents(self.shared, index, CPU, 1, heads) for index in range(layers)]
        self.tensors = torch.ones(1, 1, tokens, 1), torch.ones(1, 1, tokens, 1)
        for layer in self.layers:
            layer.bulk_bytes = heads * tokens * 8

    def step(self, *flagged: list[int]) -> int:
        """One call of every layer in turn, as `reading.read_parts` does it; how many flagged heads were resident."""
        hits = 0
        for layer, heads in zip(self.layers, flagged, strict=True):
            before = layer.flag([(0, head) for head in heads])
            missing = [head for head in before if layer.get(head, [self.tensors[0].shape[2]]) is None]
            hits += len(heads) - len(missing)
            for head in missing:
                keep(layer, head, *self.tensors, before[head])
            held = sum(resident.nbytes for each in self.layers for resident in each.held.values())
            assert held == sum(each.nbytes for each in self.layers) <= self.shared.find_budget(CPU)
        return hits

    def kept(self) -> list[list[int]]:
        return [sorted(head for _, head in layer.held) for layer in self.layers]


def test_layers_in_turn_do_not_push_each_other_out() -> None:
    """Where every head is flagged in every step, half the room gives half the hits: the least recently used would
    always be the next to be asked for."""
    heads = Heads(0.5)
    assert [heads.step([0, 1, 2, 3], [0, 1, 2, 3]) for _ in range(200)] == [0] + [4] * 199


def test_heads_in_turn_do_not_push_each_other_out() -> None:
    """Four heads, one a step, and room for two: what was read last is again what will not be needed for longest."""
    with accelerator() as copies:
        shared = Residents(2 * 5 * 2 * 4 * 4)
        store = Bulk(torch.ones(1, 4, 0, 4), torch.ones(1, 4, 0, 4), offloading=True, residents=shared, layer=0)
        store.append(slice(0, 1), torch.ones(1, 4, 5, 4), torch.ones(1, 4, 5, 4))
        hits = []
        for step in range(80):
            before = copies.count
            list(reading.read_parts(store, [[head == step % 4 for head in range(4)]]))
            hits.append(copies.count == before)
    assert hits[4:] == [True, True, False, False] * 19


def test_the_most_often_flagged_are_kept() -> None:
    """Heads flagged in 9, 5 and 1 of 10 steps; room for those of the first kind."""
    generator, heads = torch.Generator().manual_seed(0), Heads(4 * 40, layers=4)
    for _ in range(150):
        flagged = torch.rand(4, 4, generator=generator) < torch.tensor([0.1, 0.9, 0.1, 0.5])
        heads.step(*(row.nonzero()[:, 0].tolist() for row in flagged))
    assert heads.kept() == [[1]] * 4


def test_the_least_recently_flagged_spill() -> None:
    """Two heads with as many flags as a third, but longer ago; one of the two longer than the other."""
    heads = Heads(2 * 40, layers=1, heads=3)
    for head in (0, 1, 2):
        for _ in range(20):
            heads.step([head])
        assert heads.kept() == [[[0], [0, 1], [1, 2]][head]]


def test_others_give_way_to_a_larger_one_only_together() -> None:
    heads = Heads(2 * 40, layers=1)
    heads.step([0, 1])
    larger = torch.ones(1, 1, 10, 1)
    layer = heads.layers[0]
    keep(layer, (0, 2), larger, larger, -math.inf)  # never flagged before
    assert heads.kept() == [[0, 1]]
    layer.scores[0][1] = 5.0
    keep(layer, (0, 2), larger, larger, 4.0)  # one of the two is stronger
    assert heads.kept() == [[0, 1]]
    keep(layer, (0, 3), *heads.tensors, 4.0)
    assert heads.kept() == [[1, 3]]
    keep(layer, (0, 2), larger, larger, 6.0)
    assert heads.kept() == [[2]]
    keep(layer, (0, 0), torch.ones(1, 1, 11, 1), larger, 9.0)  # more than the budget
    assert heads.kept() == [[2]]


def test_growth_spills_the_weakest() -> None:
    heads = Heads(2 * 40 + 8, layers=1)
    heads.step([0, 1])
    heads.step([1])
    layer, new = heads.layers[0], torch.full((1, 4, 1, 1), 2.0)
    layer.append(slice(0, 1), new, new)
    assert heads.kept() == [[1]]
    assert layer.held[0, 1].tensors[0].flatten().tolist() == [1.0] * 5 + [2.0]
    assert layer.nbytes == 48


def test_rows_that_leave_take_their_share_of_the_budget_along() -> None:
    """Half of two rows' bulk is one row's; of a single row it is half. A row that comes twice is kept once."""
    with accelerator():
        store = Bulk(torch.ones(2, 2, 0, 4), torch.ones(2, 2, 0, 4), offloading=True, residents=Residents(0.5), layer=0)
        store.append(slice(0, 2), torch.ones(2, 2, 6, 4), torch.ones(2, 2, 6, 4))
        for wanted in ([False, True], [True, True]):
            list(reading.read_parts(store, [[False, False], wanted]))
        assert sorted(store.residents.held) == [(1, 0), (1, 1)]
        store.select_rows([1, 1])
        assert sorted(store.residents.held) == [(0, 0), (0, 1)]
        assert store.residents.nbytes == 2 * 6 * 2 * 4 * 4
        store.select_rows([1])
        assert not store.residents.held
        list(reading.read_parts(store, [[True, True]]))
        store.select_rows([0, 0])
        store.select_rows([0])
        assert sorted(store.residents.held) == [(0, 0)]
        assert store.residents.scores[0][1] > store.residents.scores[0][0]  # what the rows' heads were flagged


def test_a_copy_that_lost_tokens_is_not_read() -> None:
    """Should one ever differ from the host's, the host is right, and it is replaced."""
    with accelerator():
        store = Bulk(torch.ones(1, 1, 0, 4), torch.ones(1, 1, 0, 4), offloading=True, residents=Residents(1.0), layer=0)
        store.append(slice(0, 1), torch.ones(1, 1, 6, 4), torch.ones(1, 1, 6, 4))
        list(reading.read_parts(store, [[True]]))
        kept = store.residents.held[0, 0]
        kept.tensors = tuple(part[:, :, :5].clone() for part in kept.tensors)
        (part,) = reading.read_parts(store, [[True]])
        assert part.keys.shape[2] == 6
        assert part.resident_hit_bytes == 0
        assert store.residents.nbytes == store.residents.held[0, 0].nbytes == 6 * 2 * 4 * 4


def test_devices_have_budgets_of_their_own() -> None:
    shared = Residents(40)
    layers = [LayerResidents(shared, index, torch.device(device), 1, 1) for index, device in enumerate(("cpu", "meta"))]
    for layer in layers:
        keep(layer, (0, 0), torch.ones(1, 1, 5, 1), torch.ones(1, 1, 5, 1), 0.0)
    assert [layer.nbytes for layer in layers] == [40, 40]


def test_auto_leaves_a_reserve() -> None:
    for free, left in ((2**40, 2**40 - int(0.1 * 2**40)), (2**31, 2**30), (2**29, 0)):
        with mock.patch.object(residents, "get_max_memory", return_value={"cpu": free}) as measured:
            shared = Residents("auto")
            assert [shared.find_budget(CPU) for _ in range(3)] == [left] * 3
            assert measured.call_count == 1


def test_auto_counts_what_torch_keeps_as_free() -> None:
    """After a prefill torch keeps most of what its activations took, which the device counts as taken."""
    with (
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(2**32, 2**40)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=7 * 2**32),
        mock.patch.object(torch.cuda, "memory_allocated", return_value=5 * 2**32),
    ):
        assert Residents("auto").find_budget(torch.device("cuda", 1)) == 3 * 2**32 - int(0.1 * 3 * 2**32)


def test_auto_asks_only_the_device_it_is_about() -> None:
    """Asking opens a context, and that takes some hundred MiB on a device that nothing may be using."""
    free = {0: 2**32, 1: 2**33}
    asked = []

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return free[device.index], 2**40

    with (
        mock.patch.object(torch.cuda, "mem_get_info", mem_get_info),
        mock.patch.object(residents, "get_max_memory", side_effect=AssertionError("of every device")),
    ):
        shared = Residents("auto")
        assert [shared.find_budget(torch.device("cuda", 1)) for _ in range(2)] == [2**33 - 2**30] * 2
        assert asked == [torch.device("cuda", 1)]
        assert shared.find_budget(torch.device("cuda", 0)) == 2**32 - 2**30
        assert asked[1:] == [torch.device("cuda", 0)]
