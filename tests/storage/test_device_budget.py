"""Whole layers on the device within a budget: how many, with the same outputs, and what happens as room runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ReferenceType, ref

import pytest
import torch
from models import SMALL, forced, generate, prompt, tiny
from scenarios import small_buffers
from small_sketch import small_sketch
from stand_in import accelerator, on_gpu
from torch import Tensor
from transformers import PreTrainedModel
from uses import Use, beams, chunked, copied_and_saved, cropped, one_shot, padded, rows, used_again

from qada_cache import QAdACache
from qada_cache.attention import by_torch, exact
from qada_cache.state import layer as state_layer
from qada_cache.storage import bulk, placement
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.bulk_sketch import BulkSketch
from qada_cache.storage.placement import Placement
from qada_cache.storage.row_tensors import RowTensors

BUDGETS: list[int | float | str] = [0, 40_000, 0.4, "auto", 1.0]
OPTIONS: dict[str, Any] = {"threshold": 0.04, "moments": "current", **SMALL}
LEFT = 40_000  # bytes that are free under "auto", beside the reserve
SOME = [0.4, 40_000, 1.0], [0.4, "auto", None]
USES = {one_shot: [*BUDGETS, None], chunked: SOME[0], padded: SOME[1], beams: SOME[0], cropped: SOME[1]}
USES |= {rows: SOME[0], copied_and_saved: SOME[1], used_again: SOME[0]}


class DeviceBytes:
    """Bytes of bulks' living tensors on the device: for each placement now, and the most at any time."""

    def __init__(self) -> None:
        self.tensors: list[tuple[Placement, ReferenceType]] = []
        self.most: dict[Placement, int] = {}

    def count(self, within: Placement | None = None) -> int:
        alive = [part() for owner, part in self.tensors if within in (None, owner)]
        return sum(part.untyped_storage().nbytes() for part in alive if part is not None)

    def add(self, owner: Placement, made: Tensor) -> None:
        self.tensors.append((owner, ref(made)))
        self.most[owner] = max(self.most.get(owner, 0), self.count(owner))


@contextmanager
def device(*, left: int = LEFT, fails: bool = False) -> Iterator[DeviceBytes]:
    """Offloads as on an accelerator, whose free memory shrinks with what lies there; or it has none for a bulk."""
    held, original = DeviceBytes(), RowTensors._allocate

    def allocate(store: Bulk, *args: Any, offloaded: bool | None = None, **kwargs: Any) -> Tensor:
        there = store.offloaded if offloaded is None else offloaded
        if fails and args[1] and not there:
            raise torch.OutOfMemoryError("no room")
        made = original(store, *args, offloaded=offloaded, **kwargs)
        if not there:
            held.add(store.placement, made)
        return made

    def measure() -> dict[str, int]:
        return {"cpu": 2**30 + left - held.count()}

    with (
        small_buffers(),
        mock.patch.object(bulk, "STREAM_TOKENS", 7),
        accelerator(),
        mock.patch.object(placement, "get_max_memory", measure),
        mock.patch.object(RowTensors, "_allocate", allocate),
    ):
        yield held


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(num_hidden_layers=3)


@pytest.fixture
def turns_as_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes turns of more than 8 tokens exactly, whatever the budget; a CPU those of more than a window."""
    monkeypatch.setattr(state_layer, "DRAFT_TOKENS", 16)


@pytest.mark.usefixtures("turns_as_on_cpus")
@pytest.mark.parametrize("use", USES)
def test_outputs_do_not_depend_on_the_budget(use: Use, model: PreTrainedModel, tmp_path: Path) -> None:
    """Outputs are the same to the bit at any budget, with the bulk on the device, and on a CPU, where nothing is
    copied. Bytes are within the budget at any time, also while a bulk moves to a larger block."""
    with small_buffers(), mock.patch.object(bulk, "STREAM_TOKENS", 7):
        cache = QAdACache(model, kernels="torch", **OPTIONS)
        wanted, read = use(model, cache, tmp_path), cache.stats().bulk_read_bytes
    placed = {}
    for budget in USES[use]:
        kept = {"offloading": False} if budget is None else {"device_budget": budget}
        with device() as held:
            cache = QAdACache(model, **OPTIONS, **kept)
            assert torch.equal(use(model, cache, tmp_path), wanted), f"budget {budget}"
            stats = cache.stats()
            limit = {0: 0, 40_000: 40_000, "auto": LEFT}.get(budget, 2**30)
            assert max(held.most.values(), default=0) <= limit
        placed[budget] = stats.device_layers
        assert stats.bulk_read_bytes == read
        assert (stats.host_bytes == 0) == (placed[budget] == 3)
    expected = {0: 0, 0.4: 1, 1.0: 3, None: 3} | ({40_000: 2, "auto": 2} if use is one_shot else {})
    assert all(placed[budget] == layers for budget, layers in expected.items() if budget in placed)


@on_gpu
@pytest.mark.parametrize("use", [one_shot, chunked, padded, cropped, copied_and_saved])
def test_outputs_do_not_depend_on_the_budget_on_a_gpu(use: Use, tmp_path: Path) -> None:
    model = tiny(num_hidden_layers=3).cuda()
    with small_buffers(), mock.patch.object(bulk, "STREAM_TOKENS", 7):
        wanted = use(model, QAdACache(model, **OPTIONS), tmp_path)
        for budget in BUDGETS[1:]:
            found = use(model, QAdACache(model, device_budget=budget, **OPTIONS), tmp_path)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def list_placed(cache: QAdACache) -> list[bool]:
    return [layer.store.bulk.placed for layer in cache.layers]


def test_places_are_decided_at_the_first_flush(model: PreTrainedModel) -> None:
    """A measured budget is once the prompt has been read: what reading it takes is not known before."""
    ids = prompt(90)[0]
    for budget, after_prompt, after_token in (
        (25_000, [True, True, False], [True, True, False]),
        (0.7, [False, True, True], [False, True, True]),
        ("auto", [False] * 3, [True, True, False]),
    ):
        with device(left=25_000):
            cache = QAdACache(model, device_budget=budget, **OPTIONS)
            forced(model, ids[:, :89], [89], cache)
            assert (list_placed(cache), cache.stats().device_layers) == (after_prompt, sum(after_prompt))
            forced(model, ids[:, 89:], [1], cache)
            assert (list_placed(cache), cache.stats().device_layers) == (after_token, sum(after_token))


@pytest.mark.parametrize("budget", [30_000, "auto"])
def test_layers_that_outgrow_the_budget_leave_for_good(budget: int | str, model: PreTrainedModel) -> None:
    """Token by token from the first flush on, when all of them fit; also after a crop, which leaves room."""
    ids, placed = prompt(300)[0], []
    with device() as held:
        cache = QAdACache(model, device_budget=budget, **OPTIONS)
        forced(model, ids[:, :30], [30], cache)
        for at in range(30, 300):
            forced(model, ids[:, at : at + 1], [1], cache)
            placed.append(list_placed(cache))
            assert held.count() <= (LEFT if budget == "auto" else budget)
        assert max(held.most.values()) <= (LEFT if budget == "auto" else budget)
        assert [len({*map(tuple, placed)}), sum(placed[0]), sum(placed[-1])] == [4, 3, 0]
        assert all(new <= old for before, after in pairwise(placed) for old, new in zip(before, after, strict=True))
        cache.crop(-250)
        forced(model, ids[:, 50:60], [1] * 10, cache)
        assert cache.stats().device_layers == 0
        cache.reset()
        forced(model, ids[:, :60], [59, 1], cache)
        assert cache.stats().device_layers == 3


# -- when memory runs out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["attend", "attend_exactly", "sketch"])
def test_an_allocation_that_fails_is_tried_again_with_a_layer_less(
    place: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a decode step, in a second turn of many tokens, when the sketch grows. A layer's memory is free at once."""
    options = {**OPTIONS, "token_threshold": 4.4}
    module, name = {
        "attend": (by_torch, "attend_bulk"),
        "attend_exactly": (exact, "stream"),
        "sketch": (BulkSketch, "_grow"),
    }[place]
    original, before = getattr(module, name), []

    def turns(cache: QAdACache) -> Tensor:
        generate(model, prompt(90)[0], cache, tokens=4)
        return generate(model, prompt(150)[0], cache, tokens=12).sequences

    with device() as held, small_sketch(40):
        wanted = turns(QAdACache(model, **options))
        cache = QAdACache(model, device_budget=1.0, **options)

        def fails(*args: Any, **kwargs: Any) -> Any:
            if cache.stats().device_layers > 1:
                before.append(held.count(cache._shared.placement))
                raise torch.OutOfMemoryError("no room")
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, fails)
        assert torch.equal(turns(cache), wanted)
        assert list_placed(cache) == [True, False, False]
    assert len(before) == 2
    assert before[1] < before[0]


@pytest.mark.parametrize("budget", [40_000, "auto", 1.0])
def test_bulks_without_device_memory_lie_on_the_host(budget: int | float | str, model: PreTrainedModel) -> None:
    with device():
        wanted = one_shot(model, QAdACache(model, **OPTIONS), Path())
    with device(fails=True):
        cache = QAdACache(model, device_budget=budget, **OPTIONS)
        assert torch.equal(one_shot(model, cache, Path()), wanted)
        assert cache.stats().device_layers == 0
        cache = QAdACache(model, offloading=False, **OPTIONS)
        with pytest.raises(torch.OutOfMemoryError):
            one_shot(model, cache, Path())


def test_out_of_memory_without_placed_layers_is_raised(model: PreTrainedModel) -> None:
    with accelerator() as copies:
        cache = QAdACache(model, threshold=1.0, moments="current", **SMALL)
        generate(model, prompt(90)[0], cache, tokens=2)
        copies.fail = torch.OutOfMemoryError("no room")
        with pytest.raises(torch.OutOfMemoryError):
            generate(model, prompt(95)[0], cache, tokens=2)
        with pytest.raises(RuntimeError, match=r"interrupted.*reset\(\)"):
            generate(model, prompt(100)[0], cache, tokens=2)
