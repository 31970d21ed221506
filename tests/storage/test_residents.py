"""Heads kept on the device: the same outputs at any budget, also when memory runs out, and heads fetched early."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import SMALL, generate, prompt, tiny
from scenarios import small_buffers
from small_sketch import small_sketch
from stand_in import accelerator, on_gpu
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from uses import Use, beams, chunked, copied_and_saved, cropped, one_shot, padded, rows, used_again

from qada_cache import QAdACache, StaticHeads
from qada_cache.attention import by_torch, exact
from qada_cache.storage import bulk, reading, residents
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.bulk_sketch import BulkSketch
from qada_cache.storage.residents import Residents

BUDGETS: list[int | float | str] = [0, 16_000, 0.4, "auto", 1.0]


class CopiedBytes(TorchDispatchMode):
    """Bytes that operations write."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = function(*args, **kwargs or {})
        if function in (torch.ops.aten.copy_.default, torch.ops.aten.cat.default, torch.ops.aten.clone.default):
            self.bytes += found.nbytes
        return found


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(num_hidden_layers=3)


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without an accelerator, so that outputs can be compared to the bit."""
    monkeypatch.setenv("QADA_KERNELS", "torch")


@pytest.mark.parametrize("use", [one_shot, chunked, padded, beams, cropped, rows, copied_and_saved, used_again])
def test_outputs_do_not_depend_on_the_budget(use: Use, model: PreTrainedModel, tmp_path: Path) -> None:
    """To the bit: at any budget, with the bulk on the device, and on a CPU, where nothing is copied."""
    options: dict[str, Any] = {"threshold": 0.04, "moments": "current", **SMALL}
    memory = {"cpu": 2**30 + 30_000}
    with small_buffers(), mock.patch.object(bulk, "STREAM_TOKENS", 7):
        wanted = use(model, QAdACache(model, **options), tmp_path)
        bulk_read_bytes = {}
        with accelerator(), mock.patch.object(residents, "get_max_memory", return_value=memory):
            for budget in [*BUDGETS, None]:
                kept = {"offloading": False} if budget is None else {"device_budget": budget}
                cache = QAdACache(model, **options, **kept)
                assert torch.equal(use(model, cache, tmp_path), wanted), f"budget {budget}"
                stats = cache.stats()
                bytes_used = sum(layer.store.bulk.residents.bulk_bytes for layer in cache.layers)
                limit = {0: 0, None: 0, "auto": 30_000, 0.4: int(0.4 * bytes_used), 1.0: bytes_used}.get(budget, budget)
                assert stats.resident_bytes <= limit
                assert (stats.resident_bytes > 0) == (stats.resident_hit_bytes > 0) == (limit > 0)
                assert 0.05 < stats.sparsity < 0.95
                bulk_read_bytes[budget] = stats.bulk_read_bytes
    assert bulk_read_bytes[1.0] < bulk_read_bytes[16_000] < bulk_read_bytes[0]


@on_gpu
@pytest.mark.parametrize("use", [one_shot, chunked, padded, cropped, copied_and_saved])
def test_outputs_do_not_depend_on_the_budget_on_a_gpu(use: Use, tmp_path: Path) -> None:
    """To the bit at any budget; to rounding with the bulk on the device, where neighbouring heads are read as one."""
    model = tiny(num_hidden_layers=3).cuda()
    options: dict[str, Any] = {"threshold": 0.04, "moments": "current", **SMALL}
    with small_buffers(), mock.patch.object(bulk, "STREAM_TOKENS", 7):
        wanted = use(model, QAdACache(model, **options), tmp_path)
        for budget in BUDGETS[1:]:
            assert torch.equal(use(model, QAdACache(model, device_budget=budget, **options), tmp_path), wanted)
        on_device = use(model, QAdACache(model, offloading=False, **options), tmp_path)
    torch.testing.assert_close(on_device, wanted, rtol=1e-3, atol=1e-3)


# -- when memory runs out -----------------------------------------------------------------------------------------


def test_out_of_memory_costs_residents_only(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """In growing one, in reading a head, in fetching one early: each time the same outputs, and the cache goes on."""
    options: dict[str, Any] = {"threshold": 0.04, "moments": "current", "device_budget": 16_000, **SMALL}
    failures, early = {"grow": 0, "read": 0, "prefetch": 0}, []

    def fails(name: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            place = name(*args)
            if failures.get(place, 2) < 2:
                failures[place] += 1
                raise torch.OutOfMemoryError("no room")
            return function(*args, **kwargs)

        return wrapper

    prefetched = reading.prefetch

    def prefetch(store: Bulk) -> int:
        early.append(store)
        moved = prefetched(store)
        early.pop()
        return moved

    def fetching(*_: Any) -> str:
        return "prefetch" if early else "read" if cache.stats().resident_bytes else ""

    with small_buffers():
        wanted = one_shot(model, QAdACache(model, **options), Path())
        with accelerator() as copies:
            cache = QAdACache(model, **options)
            monkeypatch.setattr(reading, "prefetch", prefetch)
            monkeypatch.setattr(bulk, "fetch", fails(fetching, copies.fetch))
            monkeypatch.setattr(residents, "_lengthen", fails(lambda *_: "grow", residents._lengthen))
            assert torch.equal(one_shot(model, cache, Path()), wanted)
    assert failures == {"grow": 2, "read": 2, "prefetch": 2}


def test_out_of_memory_without_residents_is_raised(model: PreTrainedModel) -> None:
    with accelerator() as copies:
        cache = QAdACache(model, threshold=1.0, moments="current", **SMALL)
        generate(model, prompt(90)[0], cache, tokens=2)
        copies.fail = torch.OutOfMemoryError("no room")
        with pytest.raises(torch.OutOfMemoryError):
            generate(model, prompt(95)[0], cache, tokens=2)
        with pytest.raises(RuntimeError, match=r"interrupted.*reset\(\)"):
            generate(model, prompt(100)[0], cache, tokens=2)


@pytest.mark.parametrize("place", ["attend", "attend_exactly", "sketch"])
def test_an_allocation_that_fails_is_tried_again_without_residents(
    place: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: in a decode step, in a second turn of many tokens, when the sketch grows."""
    options: dict[str, Any] = {"threshold": 0.04, "moments": "current", "token_threshold": 4.4, **SMALL}
    module, name = {
        "attend": (by_torch, "attend_bulk"),
        "attend_exactly": (exact, "stream"),
        "sketch": (BulkSketch, "_reserve"),
    }[place]
    original, failed = getattr(module, name), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        if cache.stats().resident_bytes:
            failed.append(cache)
            raise torch.OutOfMemoryError("no room")
        return original(*args, **kwargs)

    def turns(cache: QAdACache) -> torch.Tensor:
        generate(model, prompt(90)[0], cache, tokens=4)
        return generate(model, prompt(150)[0], cache, tokens=12).sequences

    with small_buffers(), small_sketch(40), accelerator():
        wanted = turns(QAdACache(model, **options))
        cache = QAdACache(model, device_budget=1.0, **options)
        monkeypatch.setattr(module, name, fails)
        assert torch.equal(turns(cache), wanted)
    assert failed


def test_residents_grow_in_place() -> None:
    """Bytes copied on the device grow with the tokens, not with tokens times flushes."""
    keys, values = torch.randn(2, 1, 2, 4000, 4).unbind()
    shared, flush = Residents(1.0), 16
    with accelerator(), small_buffers():
        store = Bulk(keys[:, :, :0], values[:, :, :0], offloading=True, residents=shared, layer=0)
        store.append(slice(0, 1), keys[:, :, :400], values[:, :, :400])
        list(reading.read_parts(store, [[True, True]]))
        with CopiedBytes() as copied:
            for start in range(400, 4000, flush):
                stop = start + flush
                store._set_lengths([stop])
                store.residents.append(slice(0, 1), keys[:, :, start:stop], values[:, :, start:stop])
                assert shared.find_budget(store.device) >= store.residents.nbytes
    assert len(store.residents.held) == 2
    for (_, head), kept in store.residents.held.items():
        assert torch.equal(kept.tensors[0][0, 0], keys[0, head])
        assert torch.equal(kept.tensors[1][0, 0], values[0, head])
    assert copied.bytes < 12 * (keys.nbytes + values.nbytes)


@pytest.mark.parametrize("verb", ["append", "truncate"])
def test_one_resident_at_a_time_takes_its_memory_twice(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = torch.randn(2, 1, 4, 400, 4).unbind()
    alive: list[int] = []
    with accelerator():
        store = Bulk(keys[:, :, :0], values[:, :, :0], offloading=True, residents=Residents(2**20), layer=0)
        store.append(slice(0, 1), keys, values)
        list(reading.read_parts(store, [[True] * 4]))
        old = [weakref.ref(kept) for kept in store.residents.held.values()]
        put = store.residents.put

        def spy(*args: Any) -> None:
            put(*args)
            alive.append(sum(kept() is not None for kept in old))

        monkeypatch.setattr(store.residents, "put", spy)
        if verb == "append":
            store.residents.append(slice(0, 1), keys[:, :, :8], values[:, :, :8])
        else:
            store.truncate([200])
    assert alive == [4, 4, 3, 3, 2, 2, 1, 1]


# -- heads fetched early ------------------------------------------------------------------------------------------


def test_heads_fetched_early(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last step flagged in the next layer is under way before that layer asks for it, and counted once."""
    heads = torch.tensor([[False, True], [True, False], [False, False]])
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    original = reading.read_parts

    def spy(store: Bulk, *args: Any, **kwargs: Any) -> Any:
        seen[store.residents.index].append(list(store.prefetched))
        return original(store, *args, **kwargs)

    monkeypatch.setattr(reading, "read_parts", spy)
    with accelerator() as copies:
        cache = QAdACache(model, criterion=StaticHeads(heads), token_threshold=0.0, **SMALL)
        one_shot(model, cache, Path())
        steps = cache.stats().steps
        assert seen == {0: [[]] * steps, 1: [[]] + [[(0, 0)]] * (steps - 1), 2: [[]] * steps}
        assert cache.stats().bulk_read_bytes == copies.bytes
        assert copies.count == 2 * steps
        assert not any(layer.store.bulk.prefetched for layer in cache.layers)
        early = QAdACache(model, criterion=StaticHeads(heads), token_threshold=0.0, device_budget=1.0, **SMALL)
        copies.count = 0
        one_shot(model, early, Path())
        assert copies.count == 2  # residents are not fetched


@pytest.mark.parametrize("use", [one_shot, padded, chunked])
@pytest.mark.parametrize("budget", [0, 16_000])
def test_every_byte_copied_is_counted(use: Use, budget: int, model: PreTrainedModel, tmp_path: Path) -> None:
    with small_buffers(), accelerator() as copies:
        cache = QAdACache(model, threshold=0.04, moments="current", device_budget=budget, **SMALL)
        use(model, cache, tmp_path)
        stats = cache.stats()
    assert stats.bulk_read_bytes + stats.streamed_bytes == copies.bytes > 0
    with small_buffers():
        plain = QAdACache(model, threshold=0.04, moments="current", **SMALL)
        use(model, plain, tmp_path)
        needed = plain.stats().bulk_read_bytes + plain.stats().streamed_bytes
    dropped = copies.bytes + stats.resident_hit_bytes - needed  # heads fetched early that were not asked for
    assert 0 < dropped < needed / 2


def test_what_changes_the_bulk_drops_what_was_fetched_early() -> None:
    """Else it would hold another number of tokens."""
    with accelerator(), small_buffers():
        store = Bulk(torch.ones(1, 2, 0, 4), torch.ones(1, 2, 0, 4), offloading=True, residents=Residents(0), layer=0)
        for change in (
            lambda: store.append(slice(0, 1), torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)),
            lambda: store.truncate([2]),
            lambda: store.select_rows([0]),
            lambda: store.reserve(100),
        ):
            store.append(slice(0, 1), torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4))
            list(reading.read_parts(store, [[True, False]]))
            assert reading.prefetch(store) == store.lengths[0] * 2 * 4 * 4
            assert reading.prefetch(store) == 0
            change()
            assert not store.prefetched
