"""Weights that accelerate keeps in host memory or on disk until a module is called: nothing else may change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import needle
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from models import SMALL
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from qada_cache import KeyMoments, QAdACache, prepare
from qada_cache.versions import pass_cache

NEW = 24
CPU = torch.device("cpu")
LAYERS = [f"model.layers.{index}" for index in range(4)]
BESIDE = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"]
# As `device_map="auto"` lays a model out whose last layers, or whose embeddings, find no room.
LAST = dict.fromkeys((*BESIDE, *LAYERS[:2]), "cpu") | dict.fromkeys(LAYERS[2:], "disk")
FIRST = LAST | {"model.embed_tokens": "disk"}


def loaded(folder: Path, device_map: dict[str, str]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        needle.FOLDER, device_map=device_map, offload_folder=folder, dtype=torch.float32
    )


def dispatched(folder: Path) -> PreTrainedModel:
    """A loaded needle model that is then spread over CPU and disk, as `device_map` does."""
    device_map = dict.fromkeys((*BESIDE, *LAYERS), "cpu") | {LAYERS[1]: "disk"}
    return dispatch_model(needle.load_model(), device_map, main_device="cpu", offload_dir=folder, force_hooks=True)


PLACED: dict[str, Callable[[Path], PreTrainedModel]] = {
    "cpu_offload": lambda folder: cpu_offload(needle.load_model(), CPU),
    "cpu_offload with buffers": lambda folder: cpu_offload(needle.load_model(), CPU, offload_buffers=True),
    "disk_offload": lambda folder: disk_offload(needle.load_model(), folder, CPU),
    "dispatch_model": dispatched,
    "device_map, last layers": lambda folder: loaded(folder, LAST),
    "device_map, embeddings": lambda folder: loaded(folder, FIRST),
}


@pytest.fixture(scope="module")
def whole() -> PreTrainedModel:
    return needle.load_model()


@pytest.fixture(params=PLACED)
def placed(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    model = PLACED[request.param](tmp_path)
    assert any(weight.is_meta for weight in model.parameters())
    return model


def text() -> torch.Tensor:
    prompt = needle.make_prompt(tokens=300, facts=16, questions=1)
    return needle.load_tokenizer()(f"{prompt.context} {prompt.questions[0]}", return_tensors="pt").input_ids


def generated(model: PreTrainedModel, cache: DynamicCache) -> list[int]:
    ids = text()
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, **pass_cache(cache), **options)[0, ids.shape[1] :].tolist()


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # the oldest transformers: weights are on "meta"
def test_the_same_tokens_and_decisions(placed: PreTrainedModel, whole: PreTrainedModel, tmp_path: Path) -> None:
    exact = generated(placed, QAdACache(placed, threshold=1.0, **SMALL))
    assert exact == generated(whole, DynamicCache(config=whole.config))

    prepare(placed, **SMALL)  # reads a prompt, whose tokens are drawn by the embeddings' norms
    caches = [QAdACache(model, **SMALL) for model in (whole, placed)]
    moments = [cache.options.other_moments for cache in caches]
    assert moments[1].rotations == moments[0].rotations
    torch.testing.assert_close(moments[1].mean, moments[0].mean)
    tokens = [generated(model, cache) for model, cache in zip((whole, placed), caches, strict=True)]
    assert tokens[0] == tokens[1]
    stats = [cache.stats() for cache in caches]
    assert 0.2 < stats[0].kv_sparsity < 0.8
    assert torch.equal(stats[0].local_share, stats[1].local_share)


def test_a_saved_cache_goes_on(placed: PreTrainedModel, tmp_path: Path) -> None:
    ids = text()
    caches = [QAdACache(placed, **SMALL)]
    with torch.no_grad():
        token = placed(ids, **pass_cache(caches[0])).logits[:, -1:].argmax(-1)
        caches[0].save(tmp_path / "cache.safetensors")
        caches.append(QAdACache.load(tmp_path / "cache.safetensors", placed))
        one, other = (placed(token, **pass_cache(cache)).logits for cache in caches)
    assert torch.equal(one, other)


@pytest.mark.parametrize("scheme", ["analytic", "spread", "prompt"])
def test_collecting(whole: PreTrainedModel, tmp_path: Path, scheme: str) -> None:
    options = {"tokens": 200, "scheme": scheme, "progress": False}
    alone = KeyMoments.collect(whole, **options)
    elsewhere = KeyMoments.collect(loaded(tmp_path, FIRST), **options)
    torch.testing.assert_close(elsewhere.mean, alone.mean)
    torch.testing.assert_close(elsewhere.covariance, alone.covariance)
    assert elsewhere.lengths == alone.lengths
