"""A whole cache that chooses tokens does by the fused kernel what it does by the torch path, and counts the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import SMALL, forced, prompt, tiny
from scenarios import small_buffers
from small_sketch import small_sketch
from stand_in import accelerator
from steps import gpu, interpreter, small_splits
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import QAdACache, StaticHeads
from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.operands import Operands, Query, Rows
from qada_cache.sketch import selection

Use = Callable[[PreTrainedModel, QAdACache, Path], tuple[Tensor, QAdACache]]
COUNTED = (
    "decisions",
    "sketch_read_bytes",
    "dense_bulk_bytes",
    "read_share",
    "sparsity",
)
STATIC = StaticHeads(torch.tensor([[True, False]]))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(num_hidden_layers=1)  # Triton's interpreter is slow


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few tokens have a sketch, and are split; it may be rough, as this model's scores lie far apart."""
    monkeypatch.setattr(selection, "UNRELIABLE", 20.0)
    with small_sketch(32), small_splits(20, 16):
        yield


@contextmanager
def path(kernels: str, device: str | None) -> Iterator[list[bool]]:
    """Inside, caches use these `kernels`, and the bulk is on the host if there is a `device`. Yields a list that gets,
    for each step of the fused kernel, whether the step had a sketch."""
    seen, original = [], triton_decode.fused_decode

    def spy(query: Query, rows: Rows, layer: Operands) -> Any:
        seen.append(layer.sketch is not None)
        return original(query, rows, layer)

    with ExitStack() as stack:
        stack.enter_context(small_buffers())
        if device is not None:
            stack.enter_context(accelerator(device))
        stack.enter_context(mock.patch.dict(os.environ, {"QADA_KERNELS": kernels}))
        stack.enter_context(mock.patch.object(triton_decode, "fused_decode", spy))
        yield seen


def decoded(model: PreTrainedModel, cache: QAdACache, folder: Path) -> tuple[Tensor, QAdACache]:
    """Logits of decoded tokens, with turns of some tokens in between, and a crop into the bulk; and the cache."""
    text = prompt(110)[0].to(model.device)
    first = forced(model, text[:, :96], [65, 1, 1, 1, 20, 3, 1], cache)
    cache.crop(-10)
    return torch.cat([first, forced(model, text[:, 86:90], [1], cache)], dim=1), cache


def padded(model: PreTrainedModel, cache: QAdACache, folder: Path) -> tuple[Tensor, QAdACache]:
    """A row with a sketch, one that gets one, one without a bulk."""
    ids, mask = (tensor.to(model.device) for tensor in prompt(100, 58, 15))
    return forced(model, ids, [90, 1], cache, mask) * mask[:, :, None], cache


def saved(model: PreTrainedModel, cache: QAdACache, folder: Path) -> tuple[Tensor, QAdACache]:
    text = prompt(110)[0].to(model.device)
    first = forced(model, text[:, :90], [80, 1], cache)
    cache.save(folder / "cache.safetensors")
    loaded = QAdACache.load(folder / "cache.safetensors", model)
    return torch.cat([first, forced(model, text[:, 90:94], [1], loaded)], dim=1), loaded


def compare(use: Use, model: PreTrainedModel, folder: Path, device: str | None, **options: Any) -> None:
    options = {"threshold": 0.1, "moments": "current", "token_threshold": 0.7, **SMALL, **options}
    outputs, counted = [], []
    for kernels in ("torch", "triton"):
        with path(kernels, device) as seen:
            output, cache = use(model, QAdACache(model, **options), folder)
            stats = cache.stats()
        assert (sum(seen) > 8) == (kernels == "triton")
        outputs.append(output)
        counted.append({name: getattr(stats, name) for name in COUNTED})
        assert stats.device_layers == bool(options.get("device_budget"))
        assert stats.sketch_read_bytes > 0
        assert 0.02 < stats.read_share < 0.8
        assert 0.05 < stats.sparsity < 0.95
    assert counted[0] == counted[1]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)


CASES: list[tuple[Use, dict[str, Any]]] = [
    (decoded, {}),
    (decoded, {"device_budget": 1.0, "sketch_bits": 4, "group_rule": "any"}),
    (padded, {"criterion": STATIC, "sketch_bits": 1}),
    (saved, {"device_budget": 1.0}),
]
INTERPRETED_CASES = [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.slow), *CASES[2:]]


@interpreter
@pytest.mark.parametrize(("use", "options"), INTERPRETED_CASES)
def test_the_kernel_chooses_as_the_torch_path(
    use: Use, options: dict[str, Any], model: PreTrainedModel, tmp_path: Path
) -> None:
    """With the bulk on the host, but for the first case."""
    compare(use, model, tmp_path, "cpu" if options or use is not decoded else None, **options)


@pytest.mark.parametrize(
    ("use", "options"), [pytest.param(*case, marks=gpu) for case in CASES if "device_budget" not in case[1]]
)
def test_the_kernel_chooses_as_the_torch_path_on_a_gpu(use: Use, options: dict[str, Any], tmp_path: Path) -> None:
    compare(use, tiny(num_hidden_layers=1).cuda(), tmp_path, "cuda", **options)
