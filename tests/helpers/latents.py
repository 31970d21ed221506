"""Models with latent attention, and comparisons that their tests share."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from models import FAMILIES, dynamic, exact, forced, prompt, rounding, tiny
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import QAdACache
from qada_cache.attention.latent_attention import LatentAttention
from qada_cache.models.latent import has_indexers
from qada_cache.versions import pass_cache

TOPK = 12  # tokens that an indexer picks
_PICKING = {"index_topk": TOPK, "index_head_dim": 16, "index_n_heads": 2}
_SHARED = {"num_hidden_layers": 3, "mlp_layer_types": ["dense"] * 3, "indexer_types": ["full", "shared", "full"]}
INDEXED = {  # kinds of models with an indexer
    "DeepseekV32": {**_PICKING},
    "HYV4": {**_PICKING, **_SHARED},  # with learned sinks, and eager attention alone
}
SPLIT = [100, 30, 3, 1, 40, 1]  # tokens: a prompt, a long turn and a short one, a token, another long turn, a token


def make_indexed(kind: str, **changes: Any) -> PreTrainedModel:
    """A tiny model of a kind of `INDEXED`; skips the test if this transformers lacks it. `changes` go to its config."""
    if not hasattr(transformers, f"{kind}ForCausalLM"):
        pytest.skip("this transformers does not have it")
    own = {**FAMILIES["deepseek_v3"][1], **INDEXED[kind]}
    with patch.dict(FAMILIES, {kind: (kind, own)}):
        model = tiny(kind, attention="eager" if kind == "HYV4" else changes.pop("attention", "sdpa"), **changes)
    if not has_indexers(model.config):
        pytest.skip("this transformers caches expanded keys of it")
    return model


def assert_near(model: PreTrainedModel, got: Tensor, wanted: Tensor) -> None:
    """Assert that logits differ by at most four times the model's own rounding."""
    budget = 4 * rounding(model, prompt(sum(SPLIT))[0])
    assert budget < 1e-3  # or it would say nothing
    torch.testing.assert_close(got, wanted, rtol=0, atol=budget)


def note_ways(monkeypatch: pytest.MonkeyPatch, how: str) -> list[str]:
    """Have latent attention compute by `how`: "absorbed", "expanded" or the "cheaper" of both. Returns a list, to which
    each call adds the way that it took."""
    found: list[str] = []
    for name in ("absorbed", "expanded"):
        original = getattr(LatentAttention, f"_attend_{name}")

        def noted(*given: Any, name: str = name, original: Callable = original) -> Any:
            found.append(name)
            return original(*given)

        monkeypatch.setattr(LatentAttention, f"_attend_{name}", noted)
    if how != "cheaper":
        monkeypatch.setattr(LatentAttention, "_is_cheaper_absorbed", lambda *_: how == "absorbed")
    return found


def check_copies_files_crops_and_rows(model: PreTrainedModel, folder: Path) -> list[QAdACache]:
    """Assert that a copy, a fork and a loaded file continue a text as `DynamicCache` does, after a crop into the bulk
    and a reordering of rows. Returns these caches, and last the one that they come from."""
    ids, mask = prompt(150, 131)
    rest = prompt(30, 30, seed=9)[0]
    seen = torch.cat([mask, torch.ones_like(rest)], dim=1)
    cache, plain = exact(model), dynamic(model)
    for each in (cache, plain):
        forced(model, torch.cat([ids, rest[:, :20]], dim=1), [150, 20], each, seen[:, :170])
    cache.save(folder / "cache")
    others = [copy.deepcopy(cache), cache.fork(criterion="dense")]
    others += [QAdACache.load(folder / "cache", model, mmap=mmap) for mmap in (False, True)]
    others += [QAdACache.load(folder / "cache", config=model.config), cache]
    held = [each.layers[-1].store.copy_tokens(slice(0, 1), 0, 170)[0] for each in others]
    assert all(torch.equal(part, held[-1]) for part in held)
    wanted, again = None, torch.cat([ids[:, 110:], rest], dim=1)[[1, 0]]
    for each in (plain, *others):
        each.crop(-60)
        assert each.get_seq_length() == 110
        each.reorder_cache(torch.tensor([1, 0]))
        found = []
        for start, stop in itertools.pairwise((0, 40, 43, 69, 70)):
            with torch.no_grad():
                part = model(again[:, start:stop], attention_mask=seen[[1, 0], : 110 + stop], **pass_cache(each))
            found.append(part.logits)
        got = torch.cat(found, dim=1)
        wanted = got if wanted is None else wanted
        assert_near(model, got, wanted)
    return others
