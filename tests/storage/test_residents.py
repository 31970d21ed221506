"""Heads kept on the device: the same outputs at any budget, who is kept, and what happens when memory runs out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import SMALL, forced, generate, logits_of, prompt, tiny
from scenarios import small_buffers
from stand_in import accelerator
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import QAdACache, StaticHeads
from qada_cache.attention import decode, far
from qada_cache.storage import bulk, reading, residents
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.residents import Residents

CPU = torch.device("cpu")
BUDGETS: list[int | float | str] = [0, 16_000, 0.4, "auto", 1.0]
Use = Callable[[PreTrainedModel, QAdACache, Path], Tensor]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(num_hidden_layers=3)


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without an accelerator, so that outputs can be compared to the bit."""
    monkeypatch.setenv("QADA_KERNELS", "torch")


def one_shot(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    return logits_of(generate(model, prompt(90)[0], cache, tokens=30))


def chunked(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    """Chunks longer than the window, which stream the bulk; then a second turn in chunks, over residents."""
    generate(model, prompt(90)[0], cache, tokens=30, prefill_chunk_size=25)
    return forced(model, prompt(70)[0].to(model.device), [25, 25, 1], cache)


def padded(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    ids, mask = prompt(90, 41, 10)
    return logits_of(generate(model, ids, cache, tokens=30, attention_mask=mask))


def beams(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    return logits_of(generate(model, prompt(90)[0], cache, tokens=20, num_beams=3))


def cropped(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    """Into staging, then into the bulk, and built upon again."""
    text = generate(model, prompt(90)[0], cache, tokens=20).sequences
    cache.crop(-5)
    text = generate(model, text[:, :110], cache, tokens=5).sequences
    cache.crop(-40)
    return logits_of(generate(model, text[:, :80], cache, tokens=20))


def rows(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    """Repeated, reordered and dropped."""
    generate(model, prompt(90)[0], cache, tokens=10)
    cache.batch_repeat_interleave(3)
    ids = prompt(105, 105, 105)[0]
    generate(model, ids, cache, tokens=10)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    return logits_of(generate(model, prompt(120, 120)[0], cache, tokens=10))


def copied_and_saved(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    """A copy goes on by itself; so does the original, and what was read back from its file."""
    text = generate(model, prompt(90)[0], cache, tokens=20).sequences
    twin = copy.deepcopy(cache)
    cache.save(folder / "cache.safetensors")
    loaded = QAdACache.load(folder / "cache.safetensors", model)
    assert loaded.options.device_budget == cache.options.device_budget
    outputs = [logits_of(generate(model, text, each, tokens=20)) for each in (twin, cache, loaded)]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    held = [
        {id(old.keys) for layer in each.layers for old in layer.store.bulk.residents.held.values()}
        for each in (twin, cache)
    ]
    assert not held[0] & held[1]
    return outputs[0]


def used_again(model: PreTrainedModel, cache: QAdACache, folder: Path) -> Tensor:
    generate(model, prompt(60, 60)[0], cache, tokens=20)
    cache.reset()
    stats = cache.stats()
    assert (stats.resident_bytes, stats.spared_bytes, stats.device_bytes) == (0, 0, 0)
    return one_shot(model, cache, folder)


@pytest.mark.parametrize("use", [one_shot, chunked, padded, beams, cropped, rows, copied_and_saved, used_again])
def test_outputs_do_not_depend_on_the_budget(use: Use, model: PreTrainedModel, tmp_path: Path) -> None:
    """To the bit: at any budget, with the bulk on the device, and on a CPU, where nothing is copied."""
    options: dict[str, Any] = {"threshold": 0.04, "moments": "current", **SMALL}
    memory = {"cpu": 2**30 + 30_000}
    with small_buffers(), mock.patch.object(bulk, "STREAM_TOKENS", 7):
        wanted = use(model, QAdACache(model, **options), tmp_path)
        pulled = {}
        with accelerator(), mock.patch.object(residents, "get_max_memory", return_value=memory):
            for budget in [*BUDGETS, None]:
                kept = {"offloading": False} if budget is None else {"device_budget": budget}
                cache = QAdACache(model, **options, **kept)
                assert torch.equal(use(model, cache, tmp_path), wanted), f"budget {budget}"
                stats = cache.stats()
                bytes_used = sum(layer.store.bulk.residents.bulk_bytes for layer in cache.layers)
                limit = {0: 0, None: 0, "auto": 30_000, 0.4: int(0.4 * bytes_used), 1.0: bytes_used}.get(budget, budget)
                assert stats.resident_bytes <= limit
                assert (stats.resident_bytes > 0) == (stats.spared_bytes > 0) == (limit > 0)
                assert 0.05 < stats.sparsity < 0.95
                pulled[budget] = stats.pulled_bytes
    assert pulled[1.0] < pulled[16_000] < pulled[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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


# -- who is kept --------------------------------------------------------------------------------------------------


class Heads:
    """Layers of one cache, one row, whose heads all hold `tokens` tokens of 8 bytes; nothing is read."""

    def __init__(self, budget: int | float | str, *, layers: int = 2, heads: int = 4, tokens: int = 5) -> None:
        self.shared = Residents(budget)
        self.layers = [self.shared.layer(index, CPU, 1, heads) for index in range(layers)]
        self.tensors = torch.ones(1, 1, tokens, 1), torch.ones(1, 1, tokens, 1)
        for layer in self.layers:
            layer.bulk_bytes = heads * tokens * 8

    def step(self, *flagged: list[int]) -> int:
        """One call of every layer in turn, as `reading.flagged` does it; how many flagged heads were resident."""
        hits = 0
        for layer, heads in zip(self.layers, flagged, strict=True):
            before = layer.flag([(0, head) for head in heads])
            missing = [head for head in before if layer.get(head, self.tensors[0].shape[2]) is None]
            hits += len(heads) - len(missing)
            for head in missing:
                layer.keep(head, *self.tensors, before[head])
            held = sum(resident.nbytes for each in self.layers for resident in each.held.values())
            assert held == sum(each.nbytes for each in self.layers) <= self.shared.limit(CPU)
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
            list(reading.flagged(store, [[head == step % 4 for head in range(4)]]))
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
    layer.keep((0, 2), larger, larger, -math.inf)  # never flagged before
    assert heads.kept() == [[0, 1]]
    layer.scores[0][1] = 5.0
    layer.keep((0, 2), larger, larger, 4.0)  # one of the two is stronger
    assert heads.kept() == [[0, 1]]
    layer.keep((0, 3), *heads.tensors, 4.0)
    assert heads.kept() == [[1, 3]]
    layer.keep((0, 2), larger, larger, 6.0)
    assert heads.kept() == [[2]]
    layer.keep((0, 0), torch.ones(1, 1, 11, 1), larger, 9.0)  # more than the budget
    assert heads.kept() == [[2]]


def test_growth_spills_the_weakest() -> None:
    heads = Heads(2 * 40 + 8, layers=1)
    heads.step([0, 1])
    heads.step([1])
    layer, new = heads.layers[0], torch.full((1, 4, 1, 1), 2.0)
    layer.append(slice(0, 1), new, new)
    assert heads.kept() == [[1]]
    assert layer.held[0, 1].keys.flatten().tolist() == [1.0] * 5 + [2.0]
    assert layer.nbytes == 48


def test_rows_that_leave_take_their_share_of_the_budget_along() -> None:
    """Half of two rows' bulk is one row's; of a single row it is half. A row that comes twice is kept once."""
    with accelerator():
        store = Bulk(torch.ones(2, 2, 0, 4), torch.ones(2, 2, 0, 4), offloading=True, residents=Residents(0.5), layer=0)
        store.append(slice(0, 2), torch.ones(2, 2, 6, 4), torch.ones(2, 2, 6, 4))
        for wanted in ([False, True], [True, True]):
            list(reading.flagged(store, [[False, False], wanted]))
        assert sorted(store.residents.held) == [(1, 0), (1, 1)]
        store.select([1, 1])
        assert sorted(store.residents.held) == [(0, 0), (0, 1)]
        assert store.residents.nbytes == 2 * 6 * 2 * 4 * 4
        store.select([1])
        assert not store.residents.held
        list(reading.flagged(store, [[True, True]]))
        store.select([0, 0])
        store.select([0])
        assert sorted(store.residents.held) == [(0, 0)]
        assert store.residents.scores[0][1] > store.residents.scores[0][0]  # what the rows' heads were flagged


def test_a_copy_that_lost_tokens_is_not_read() -> None:
    """Should one ever differ from the host's, the host is right, and it is replaced."""
    with accelerator():
        store = Bulk(torch.ones(1, 1, 0, 4), torch.ones(1, 1, 0, 4), offloading=True, residents=Residents(1.0), layer=0)
        store.append(slice(0, 1), torch.ones(1, 1, 6, 4), torch.ones(1, 1, 6, 4))
        list(reading.flagged(store, [[True]]))
        kept = store.residents.held[0, 0]
        kept.keys, kept.values = kept.keys[:, :, :5].clone(), kept.values[:, :, :5].clone()
        store.residents.nbytes = kept.nbytes
        (part,) = reading.flagged(store, [[True]])
        assert part.keys.shape[2] == 6
        assert part.spared == 0
        assert store.residents.nbytes == store.residents.held[0, 0].nbytes == 6 * 2 * 4 * 4


def test_devices_have_budgets_of_their_own() -> None:
    shared = Residents(40)
    layers = [shared.layer(index, torch.device(device), 1, 1) for index, device in enumerate(("cpu", "meta"))]
    for layer in layers:
        layer.keep((0, 0), torch.ones(1, 1, 5, 1), torch.ones(1, 1, 5, 1), 0.0)
    assert [layer.nbytes for layer in layers] == [40, 40]


def test_auto_leaves_a_reserve() -> None:
    for free, left in ((2**40, 2**40 - int(0.1 * 2**40)), (2**31, 2**30), (2**29, 0)):
        with mock.patch.object(residents, "get_max_memory", return_value={"cpu": free}) as measured:
            shared = Residents("auto")
            assert [shared.limit(CPU) for _ in range(3)] == [left] * 3
            assert measured.call_count == 1


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
        assert [shared.limit(torch.device("cuda", 1)) for _ in range(2)] == [2**33 - 2**30] * 2
        assert asked == [torch.device("cuda", 1)]
        assert shared.limit(torch.device("cuda", 0)) == 2**32 - 2**30
        assert asked[1:] == [torch.device("cuda", 0)]


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

    def prefetch(store: Bulk) -> int:
        early.append(store)
        moved = reading.prefetch(store)
        early.pop()
        return moved

    def fetching(*_: Any) -> str:
        return "prefetch" if early else "read" if cache.stats().resident_bytes else ""

    def growing(parts: Any, *_: Any) -> str:
        return "grow" if len(parts) == 2 and parts[0].dim() == 4 and parts[0].shape[1] == 1 else ""

    with small_buffers():
        wanted = one_shot(model, QAdACache(model, **options), Path())
        with accelerator() as copies:
            cache = QAdACache(model, **options)
            monkeypatch.setattr(decode, "prefetch", prefetch)
            monkeypatch.setattr(bulk, "fetch", fails(fetching, copies.fetch))
            monkeypatch.setattr(torch, "cat", fails(growing, torch.cat))
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


# -- heads fetched early ------------------------------------------------------------------------------------------


def test_heads_fetched_early(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last step flagged in the next layer is under way before that layer asks for it, and counted once."""
    heads = torch.tensor([[False, True], [True, False], [False, False]])
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    original = far.flagged

    def spy(store: Bulk, wanted: list[list[bool]], **kwargs: Any) -> Any:
        seen[store.residents.index].append(list(store.early))
        return original(store, wanted, **kwargs)

    monkeypatch.setattr(far, "flagged", spy)
    with accelerator() as copies:
        cache = QAdACache(model, criterion=StaticHeads(heads), **SMALL)
        one_shot(model, cache, Path())
        steps = cache.stats().steps
        assert seen == {0: [[]] * steps, 1: [[]] + [[(0, 0)]] * (steps - 1), 2: [[]] * steps}
        assert cache.stats().pulled_bytes == copies.bytes
        assert copies.count == 2 * steps
        assert not any(layer.store.bulk.early for layer in cache.layers)
        early = QAdACache(model, criterion=StaticHeads(heads), device_budget=1.0, **SMALL)
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
    assert stats.pulled_bytes + stats.streamed_bytes == copies.bytes > 0
    with small_buffers():
        plain = QAdACache(model, threshold=0.04, moments="current", **SMALL)
        use(model, plain, tmp_path)
        needed = plain.stats().pulled_bytes + plain.stats().streamed_bytes
    dropped = copies.bytes + stats.spared_bytes - needed  # heads fetched early that were not asked for
    assert 0 < dropped < needed / 2


def test_what_changes_the_bulk_drops_what_was_fetched_early() -> None:
    """Else it would hold another number of tokens."""
    with accelerator(), small_buffers():
        store = Bulk(torch.ones(1, 2, 0, 4), torch.ones(1, 2, 0, 4), offloading=True, residents=Residents(0), layer=0)
        for change in (
            lambda: store.append(slice(0, 1), torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)),
            lambda: store.truncate([2]),
            lambda: store.select([0]),
            lambda: store.reserve(100),
        ):
            store.append(slice(0, 1), torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4))
            list(reading.flagged(store, [[True, False]]))
            assert reading.prefetch(store) == store.lengths[0] * 2 * 4 * 4
            assert reading.prefetch(store) == 0
            change()
            assert not store.early
