"""Residents beside a kernel that reads heads where they lie: same outputs, copies that are late, and who is brought."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import SMALL, tiny
from scenarios import small_buffers
from stand_in import Copies, accelerator
from transformers import PreTrainedModel
from uses import Use, copied_and_saved, cropped, one_shot, padded, rows

from qada_cache import QAdACache
from qada_cache.storage import reading
from qada_cache.storage.bulk import FLAG_COPIES, Bulk
from qada_cache.storage.residents import Residents
from qada_cache.storage.transfers import HostCopy

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from qada_cache.kernels.triton.kernels import INTERPRETED

interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
FLAGS = torch.tensor([[True, False]])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(num_hidden_layers=1)  # Triton's interpreter is slow


@contextmanager
def fused(device: str = "cpu") -> Iterator[Copies]:
    """Offloaded, and the fused kernel asked for."""
    with accelerator(device) as copies, mock.patch.dict(os.environ, {"QADA_KERNELS": "triton"}):
        yield copies


@interpreter
@pytest.mark.parametrize(("use", "eager", "budgets"), [(cropped, False, (0, 1.0)), (rows, True, (0, 8_000, 1.0))])
def test_outputs_do_not_depend_on_the_budget(
    use: Use, eager: bool, budgets: tuple[float, ...], model: PreTrainedModel, tmp_path: Path
) -> None:
    """To the bit. A copy that is late holds nan until somebody has waited for it."""
    options: dict[str, Any] = {"threshold": 0.1, "moments": "current", **SMALL}
    outputs, bulk_read_bytes = [], []
    with small_buffers(), fused() as copies:
        copies.eager = eager
        for budget in budgets:
            cache = QAdACache(model, **options, device_budget=budget)
            outputs.append(use(model, cache, tmp_path))
            stats = cache.stats()
            assert 0.05 < stats.sparsity < 0.95
            assert (stats.resident_bytes > 0) == (budget > 0)
            assert eager <= ((stats.resident_hit_bytes > 0) == (budget > 0))
            bulk_read_bytes.append(stats.bulk_read_bytes)
    assert all(torch.equal(outputs[0], output) for output in outputs[1:])
    assert not eager or bulk_read_bytes[2] < bulk_read_bytes[1] < bulk_read_bytes[0]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device and TRITON_INTERPRET=0")
@pytest.mark.parametrize("use", [one_shot, padded, cropped, rows, copied_and_saved])
def test_outputs_do_not_depend_on_the_budget_on_a_gpu(use: Use, tmp_path: Path) -> None:
    model = tiny(num_hidden_layers=2).cuda()
    options: dict[str, Any] = {"threshold": 0.1, "moments": "current", **SMALL}
    with small_buffers(), fused("cuda"):
        outputs = [
            use(model, QAdACache(model, **options, device_budget=budget), tmp_path) for budget in (0, 8_000, 1.0)
        ]
        cache = QAdACache(model, **options, device_budget=1.0)
        one_shot(model, cache, tmp_path)
        assert cache.stats().resident_hit_bytes > 0
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def store_of(tokens: int, budget: float) -> Bulk:
    store = Bulk(torch.ones(1, 2, 0, 4), torch.ones(1, 2, 0, 4), offloading=True, residents=Residents(budget), layer=0)
    store.append(slice(0, 1), torch.ones(1, 2, tokens, 4), torch.ones(1, 2, tokens, 4))
    return store


def test_a_head_is_brought_once_and_used_when_it_is_whole() -> None:
    with accelerator() as copies:
        store = store_of(6, 1.0)
        assert reading.update_residency(store, FLAGS) == 6 * 2 * 4 * 4
        assert reading.update_residency(store, FLAGS) == 0
        assert copies.count == 1
        assert not store.residents.find_pointers(store.lengths).any()  # on its way
        kept = store.residents.held[0, 0]
        assert kept.tensors[0].isnan().all()
        kept.wait()
        places = store.residents.find_pointers(store.lengths)
        assert places.tolist() == [[[part.data_ptr() for part in kept.tensors], [0, 0]]]
        assert (kept.tensors[0] == 1).all()
        assert store.residents.find_pointers(store.lengths) is places
        assert not store.residents.find_pointers([7]).any()  # of another number of tokens
        store.append(slice(0, 1), torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
        assert store.residents.find_pointers(store.lengths)[0, 0, 0] == store.residents.held[0, 0].tensors[0].data_ptr()


def test_a_head_that_may_not_stay_is_not_brought() -> None:
    """Nor one that the device has no memory for."""
    with accelerator() as copies:
        store = store_of(6, 0.4)  # less than a head
        assert reading.update_residency(store, FLAGS) == 0
        assert copies.count == 0
        store = store_of(6, 0.5)
        copies.fail = torch.OutOfMemoryError("no room")
        assert reading.update_residency(store, FLAGS) == 0
        assert not store.residents.held
        assert store.residents.nbytes == 0


def test_flags_count_when_they_have_reached_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host never waits for them; of too many that are under way, the oldest are forgotten, and none is confused
    with another row's."""
    there = False
    monkeypatch.setattr(HostCopy, "read", lambda note: note._tensor.tolist() if there else None)
    with accelerator():
        store = store_of(6, 1.0)
        for _ in range(FLAG_COPIES + 3):
            assert reading.update_residency(store, FLAGS) == 0
        store.select_rows([0])
        assert not store.flag_copies
        for flags in (FLAGS, ~FLAGS):
            reading.update_residency(store, flags)
        there = True
        reading.update_residency(store, ~FLAGS)
        assert sorted(store.residents.held) == [(0, 0), (0, 1)]
        scores = store.residents.scores[0]
        assert scores[1] > scores[0]


def test_early_copies_are_let_go_of_by_a_kernel_that_does_not_use_them() -> None:
    with accelerator():
        store = store_of(6, 0)
        list(reading.read_parts(store, FLAGS.tolist()))
        assert reading.prefetch(store) > 0
        assert store.prefetched
        store.find_in_place()
        assert not store.prefetched
