"""A model whose layers `device_map` lays on two devices: each layer's tokens lie on its own, all else is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needle
import pytest
import torch
from accelerate import dispatch_model
from devices import KIND, devices
from models import SMALL, prompt, tiny
from stand_in import accelerator
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qada_cache import KeyMoments, PrefixStore, QAdACache
from qada_cache.attention import by_torch
from qada_cache.versions import pass_cache

ONE, OTHER = f"{KIND}:0", f"{KIND}:1"
MAP = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1"), ONE)
MAP |= dict.fromkeys(("model.layers.2", "model.layers.3", "model.norm", "lm_head"), OTHER)


def eager() -> PreTrainedModel:
    model = needle.load_model()
    model.set_attn_implementation("eager")  # torch's own attention makes tensors of its own, which say no device
    return model


@pytest.fixture(scope="module")
def whole() -> PreTrainedModel:
    return eager()


@pytest.fixture
def placed() -> Iterator[PreTrainedModel]:
    with devices():
        yield dispatch_model(eager(), MAP, main_device=ONE, force_hooks=True)


def text(seed: int = 0, tokens: int = 300) -> Tensor:
    prompt = needle.make_prompt(tokens=tokens, facts=16, questions=1, seed=seed)
    return needle.load_tokenizer()(f"{prompt.context} {prompt.questions[0]}", return_tensors="pt").input_ids


@torch.no_grad()
def greedy(
    model: PreTrainedModel, ids: Tensor, cache: DynamicCache, mask: Tensor | None = None, tokens: int = 8
) -> list[list[int]]:
    """So many tokens of each row."""
    device, found = model.device, []
    mask = torch.ones_like(ids) if mask is None else mask
    for _ in range(tokens):
        given = {
            "attention_mask": mask.to(device),
            "position_ids": (mask.cumsum(-1) - 1)[:, -ids.shape[1] :].to(device),
        }
        logits = model(ids.to(device), **pass_cache(cache), logits_to_keep=1, **given).logits
        ids = logits[:, -1:].argmax(-1).cpu()
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        found.append(ids)
    return torch.cat(found, dim=1).tolist()


def on_device(cache: QAdACache) -> list[str]:
    return [str(layer.store.near_keys.device) for layer in cache.layers]


def same(
    placed: PreTrainedModel,
    whole: PreTrainedModel,
    ids: Tensor,
    mask: Tensor | None = None,
    count: int = 8,
    **options: Any,
) -> QAdACache:
    """Tokens and decisions on two devices are those on one; returns the cache on two."""
    options = {**SMALL, "kernels": "torch", **options}
    caches = [QAdACache(model, **options) for model in (whole, placed)]
    tokens = [greedy(model, ids, cache, mask, count) for model, cache in zip((whole, placed), caches, strict=True)]
    assert tokens[0] == tokens[1]
    stats = [cache.stats() for cache in caches]
    assert torch.equal(stats[0].local_share, stats[1].local_share)
    assert 0.2 < stats[1].kv_sparsity < 0.8
    assert on_device(caches[1]) == [ONE, ONE, OTHER, OTHER]
    return caches[1]


def test_exact_attention(placed: PreTrainedModel, whole: PreTrainedModel) -> None:
    cache = QAdACache(placed, threshold=1.0, offloading=False, **SMALL)
    assert greedy(placed, text(), cache) == greedy(whole, text(), DynamicCache(config=whole.config))


@pytest.mark.parametrize("options", [{}, {"moments": "current", "audit_every": 1}], ids=str)
def test_decisions(placed: PreTrainedModel, whole: PreTrainedModel, options: dict[str, Any]) -> None:
    """Key moments are collected from keys on both devices, and each layer is given its own where it lies."""
    same(placed, whole, text(), offloading=False, **options)


def test_devices_without_float64(whole: PreTrainedModel, request: pytest.FixtureRequest) -> None:
    """Apple's, and some of Intel's: moments of other prompts and audits are computed in it, on the host then."""
    by_torch._has_float64.cache_clear()  # other tests' devices of these names have it
    request.addfinalizer(by_torch._has_float64.cache_clear)
    with devices(without=torch.float64):
        placed = dispatch_model(eager(), MAP, main_device=ONE, force_hooks=True)
        with pytest.raises(TypeError, match="has no"):
            torch.zeros(1, device=ONE).double()
        KeyMoments.collect(placed, needle.load_tokenizer(), "random-tokens", tokens=200, progress=False)
        cache = same(placed, whole, text(), offloading=False, audit_every=1, count=16)
    assert cache.stats().audit.decisions > 100


def test_padded_rows(placed: PreTrainedModel, whole: PreTrainedModel) -> None:
    rows = [text(seed=1, tokens=250)[0], text(seed=2, tokens=200)[0]]
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, 2, longest, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, longest - len(tokens) :], mask[row, longest - len(tokens) :] = tokens, 1
    same(placed, whole, ids, mask, offloading=False)


@pytest.mark.filterwarnings("ignore:the bulk lies in host memory that is not pinned")
@pytest.mark.parametrize("budget", [0, 600_000, 1.0])
def test_offloaded(placed: PreTrainedModel, whole: PreTrainedModel, budget: int | float) -> None:
    """Copies come as late as they may; the budget is that of each device."""
    with accelerator() as copies:
        cache = same(placed, whole, text(), device_budget=budget)
    bulks, held = [layer.store.bulk for layer in cache.layers], {ONE: [], OTHER: []}
    for bulk in bulks:
        held[str(bulk.device)] += [bulk.nbytes] * bulk.placed
        assert str(bulk.tensors[0].device) == ("cpu" if bulk.offloaded else str(bulk.device))
    assert (copies.count == 0) == (budget == 1.0)
    layers = {0: 0, 600_000: 1, 1.0: 2}[budget]
    assert list(map(len, held.values())) == [layers, layers]
    assert cache.stats().device_layers == 2 * layers
    assert isinstance(budget, float) or all(sum(sizes) <= budget for sizes in held.values())


def test_a_saved_cache_goes_on(placed: PreTrainedModel, tmp_path: Path) -> None:
    ids, cache = text().to(ONE), QAdACache(placed, offloading=False, kernels="torch", **SMALL)
    with torch.no_grad():
        placed(ids[:, :-1], **pass_cache(cache))
        cache.save(tmp_path / "cache.safetensors")
        again = QAdACache.load(tmp_path / "cache.safetensors", placed)
        one, other = (placed(ids[:, -1:], **pass_cache(held)).logits.cpu() for held in (cache, again))
    assert torch.equal(one, other)
    assert on_device(again) == [ONE, ONE, OTHER, OTHER]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_a_saved_and_a_stored_hybrid_go_on(family: str, tmp_path: Path) -> None:
    """States of transformers' own layers lie where these compute, and on one device where a config alone is given."""
    kind = {"gemma3": "sliding", "qwen3_next": "linear"}[family]
    types = {"num_hidden_layers": 4, "layer_types": [f"{kind}_attention", "full_attention"] * 2}
    dense = {"mlp_only_layers": [0, 1, 2, 3]} if kind == "linear" else {}
    ids, options = prompt(160)[0], {"threshold": 1.0, "moments": "current", "offloading": False, **SMALL}
    with devices(), torch.no_grad():
        model = tiny(family, attention="eager", **types, **dense)
        model = dispatch_model(model, MAP, main_device=ONE, force_hooks=True)
        store, cache = PrefixStore(tmp_path / "store"), QAdACache(model, kernels="torch", **options)
        greedy(model, ids[:, :150], cache, None, 1)
        cache.save(tmp_path / "cache.safetensors")
        store.keep(cache, ids[:, :150])
        found = {"loaded": QAdACache.load(tmp_path / "cache.safetensors", model)}
        found["stored"] = store.cache(model, ids, kernels="torch", **options)
        if kind == "sliding":
            found["by config"] = QAdACache.load(tmp_path / "cache.safetensors", config=model.config)
        read = [text_of.get_seq_length() for text_of in found.values()]
        assert read == [150] * len(read)
        wanted = greedy(model, ids[:, 150:], cache, torch.ones(1, 160, dtype=torch.long), 4)
        for again in found.values():
            assert greedy(model, ids[:, 150:], again, torch.ones(1, 160, dtype=torch.long), 4) == wanted
