"""A model that transformers' tensor parallelism splits over two processes by KV heads: nothing else may change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needle
import pytest
import torch
from models import tiny
from ranks import torchrun
from tensor_parallel_scene import NEW, TOKENS, found_by, heads_table, text
from transformers import DynamicCache, PreTrainedModel

from qada_cache import KeyMoments, StaticHeads
from qada_cache.versions import pass_cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return needle.load_model()


@pytest.fixture(scope="module")
def ranks(folder: Path, model: PreTrainedModel) -> list[dict[str, Any]]:
    """The results of each of two processes, in the order of ranks."""
    moments = folder / "moments.safetensors"
    KeyMoments.collect(model, tokens=300, seed=4, progress=False).save(moments)
    for name in ("phi3", "llama", "qwen3"):
        tiny(name, vocab_size=96).save_pretrained(folder / name)
    tiny(vocab_size=96, num_key_value_heads=1).save_pretrained(folder / "one_kv_head")
    script = Path(__file__).with_name("tensor_parallel_ranks.py")
    return torchrun(script, folder, moments, QADA_KERNELS="torch")  # but where others are asked for


def same(whole: dict[str, Any], ranks: list[dict[str, Any]], name: str) -> None:
    """Tokens and statistics of both ranks, gathered, are those of one process."""
    whole = json.loads(json.dumps(whole))
    for rank in ranks:
        split = rank[name]
        for figure in whole.keys() - {"device_bytes", "audit"}:
            assert split[figure] == whole[figure], figure
        # The missed mass is 1 minus a float32 share, so rounding is no small part of it.
        assert (split["audit"] or {}) == pytest.approx(whole["audit"] or {}, rel=1e-4, abs=1e-6)


def test_exact_attention(ranks: list[dict[str, Any]], model: PreTrainedModel) -> None:
    dynamic = model.generate(text(), **pass_cache(DynamicCache(config=model.config)), **TOKENS)[0, -NEW:].tolist()
    assert [rank["dynamic"] for rank in ranks] == [rank["exact"]["generated"] for rank in ranks] == [dynamic] * 2
    same(found_by(model, gather=True, threshold=1.0, moments="current"), ranks, "exact")


def test_moments_of_a_file(ranks: list[dict[str, Any]], model: PreTrainedModel, folder: Path) -> None:
    whole = found_by(model, gather=True, moments=folder / "moments.safetensors")
    assert 0.1 < torch.tensor(whole["kv_local_share"]).mean() < 0.9
    same(whole, ranks, "file")


def test_static_heads(ranks: list[dict[str, Any]], model: PreTrainedModel) -> None:
    same(found_by(model, gather=True, criterion=StaticHeads(heads_table())), ranks, "heads")


@pytest.mark.usefixtures("default_bits")  # as the processes have it
def test_collected_moments(ranks: list[dict[str, Any]], model: PreTrainedModel, folder: Path) -> None:
    """Every process collects moments of all heads. If one has no kept moments, all collect."""
    whole = KeyMoments.collect(model, progress=False)
    first, second = (KeyMoments.load(folder / f"moments-{rank}.safetensors") for rank in range(2))
    assert first.rotations == whole.rotations
    for name in ("mean", "covariance", "query_energies"):
        torch.testing.assert_close(getattr(first, name), getattr(whole, name), rtol=1e-4, atol=1e-4)
        assert getattr(first, name).equal(getattr(second, name))
    assert [rank["collections"] for rank in ranks] == [[1, 0, 0, 1]] * 2
    same(found_by(model, gather=True, audit_every=1), ranks, "default")
    same(found_by(model, gather=True, kernels="auto"), ranks, "compiled")


def test_statistics_of_one_process(ranks: list[dict[str, Any]]) -> None:
    """Without being asked, a process tells of its own heads and waits for no other."""
    heads = [torch.tensor(rank["own"]["kv_local_share"]) for rank in ranks]
    gathered = torch.tensor(ranks[0]["default"]["kv_local_share"])
    assert torch.equal(torch.cat(heads, 1), gathered)
    assert sum(rank["own"]["bulk_read_bytes"] for rank in ranks) == ranks[0]["default"]["bulk_read_bytes"]


def test_refused(ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(ranks):
        assert "(tensor parallelism over 2, where layers 0, 1 make keys by no projection of their own)" in rank["phi3"]
        assert f"(pipeline parallelism: layers {1 - number} are not in this one)" in rank["llama"]
        assert "(FSDP)" in rank["qwen3"]
        assert "over 2, where 1 KV heads and 4 query heads have no 2 equal parts)" in rank["one_kv_head"]
        assert 'distributed_config=DistributedConfig(tp_plan="auto")' in rank["one_kv_head"]
        for name in ("save", "load"):
            assert "each of 2 processes has a part of this cache's model" in rank[name]
        assert "of which config= says nothing" in rank["config"]
        assert "built as QAdACache(model)" in rank["config"]
        assert "its parameters are DTensors" in rank["split"]
