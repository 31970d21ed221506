"""Models of latent attention that transformers' tensor parallelism splits over two processes. Each has all latents; it
has its part of the query heads, or all, as the model's plan says. Nothing else changes that each does by itself."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import latent_parallel_scene as scene
import pytest
import torch
from models import rounding
from ranks import torchrun
from transformers import PreTrainedModel

from qada_cache import KeyMoments

KINDS = ("deepseek_v2", "minicpm3", "repeated", "deepseek_v3")
EXACT = (*KINDS, scene.INDEXED)
# Each process that has a part of the heads stores and reads its own copy of the latents for them.
COPIED = ("host_bytes", "dense_bulk_bytes", "streamed_bytes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, PreTrainedModel]:
    made = {kind: scene.make(kind) for kind in KINDS}
    with suppress(pytest.skip.Exception):  # older transformers cache other keys of it
        made[scene.INDEXED] = scene.make(scene.INDEXED)
    for kind, model in made.items():
        model.save_pretrained(folder / kind)
        if kind != scene.INDEXED:
            moments = KeyMoments.collect(model, prompt="random-tokens", tokens=200, progress=False)
            moments.save(folder / f"moments-{kind}.safetensors")
    scene.make("deepseek_v2", num_attention_heads=3, num_key_value_heads=3, hidden_size=48).save_pretrained(
        folder / "odd"
    )
    return made


@pytest.fixture(scope="module")
def ranks(folder: Path, models: dict[str, PreTrainedModel]) -> list[dict[str, Any]]:
    """The results of each of two processes, in the order of ranks."""
    script = Path(__file__).with_name("latent_parallel_ranks.py")
    return torchrun(script, folder, *models, QADA_KERNELS="torch")


def check(budget: float, whole: dict[str, Any], split: dict[str, Any], *, copies: int) -> None:
    """Tokens and statistics are those of one process, and logits up to `budget`."""
    for figure, wanted in json.loads(json.dumps(whole)).items():
        got = split[figure]
        if figure == "logits":
            assert measure(got, wanted) <= budget
        elif figure in COPIED:
            assert got == copies * wanted
        elif figure == "bulk_read_bytes":
            assert wanted <= got <= copies * wanted
        elif figure == "kv_local_share" and copies > 1:  # a copy counts as a KV head
            assert torch.tensor(got).shape == (2, copies)
        elif figure.endswith("local_share") and not whole["steps"]:
            assert torch.tensor(got).isnan().all()
        else:
            assert got == wanted, figure


def measure(got: list[Any], wanted: list[Any]) -> float:
    """The largest difference."""
    return float((torch.tensor(got) - torch.tensor(wanted)).abs().max())


@pytest.fixture(params=EXACT)
def kind(request: pytest.FixtureRequest, models: dict[str, PreTrainedModel]) -> str:
    if request.param not in models:
        pytest.skip("this transformers caches other keys of it")
    return str(request.param)


def test_all_is_read(kind: str, ranks: list[dict[str, Any]], models: dict[str, PreTrainedModel]) -> None:
    """Both processes read everything as one does: prompts in one piece and in chunks, long and short turns, and after a
    crop, in 16, 8 and 4 bits."""
    whole = scene.read_exactly(models[kind])
    assert whole["exact"]["tokens"] == whole["dynamic"]["tokens"]
    exact = 4 * rounding(models[kind], scene.text())
    for rank in ranks:
        for name, found in whole.items():
            budget = exact
            if name in ("8 bits", "4 bits"):  # a number that rounding turns may get the next code, one of very many
                budget += 1e-2 * measure(found["logits"], whole["16 bits"]["logits"])
                if kind == scene.INDEXED:  # and then the next layer's indexer may pick another token
                    picked = "logits", "bulk_read_bytes"
                    found = {figure: part for figure, part in found.items() if figure not in picked}
            check(budget, found, rank[kind][name], copies=1 + (kind in scene.SPLIT))


@pytest.mark.parametrize("kind", KINDS)
def test_decisions(kind: str, ranks: list[dict[str, Any]], models: dict[str, PreTrainedModel], folder: Path) -> None:
    """Each head's own are those of one process. A group is of one process's heads."""
    whole = scene.decide(models[kind], KeyMoments.load(folder / f"moments-{kind}.safetensors"))
    assert 0.1 < torch.tensor(whole["own"]["local_share"]).mean() < 0.9
    assert whole["selected"]["bulk_read_bytes"] < 0.5 * whole["selected"]["dense_bulk_bytes"]
    copies, exact = 1 + (kind in scene.SPLIT), 4 * rounding(models[kind], scene.text())
    # A sketch rounds: a number that rounding turns may be another integer. That is nothing beside what selection costs.
    coded = 1e-3 * measure(whole["selected"]["logits"], whole["all selected"]["logits"])
    shared = ("together", "selected")
    for rank in ranks:
        for name, found in whole.items():
            if name not in shared or kind in ("repeated", "deepseek_v3"):
                check(coded if name == "selected" else exact, found, rank[kind][name], copies=copies)
        for name in shared:
            split = {figure: torch.tensor(rank[kind][name][figure]) for figure in ("local_share", "kv_local_share")}
            assert torch.equal(split["local_share"], split["kv_local_share"].repeat_interleave(4 // copies, dim=1))
    told = [whole["together"], ranks[0][kind]["together"]]
    if kind == "minicpm3":
        assert told[0]["local_share"] != told[1]["local_share"]
    if kind == "repeated":
        assert told[1]["bulk_read_bytes"] == 2 * told[0]["bulk_read_bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_collected_moments(kind: str, ranks: list[dict[str, Any]], folder: Path) -> None:
    """Every process collects moments of latents, and query energies of all heads. If one has no kept moments, all
    collect."""
    whole, *own = (
        KeyMoments.load(folder / f"{name}.safetensors")
        for name in (f"moments-{kind}", f"moments-{kind}-0", f"moments-{kind}-1")
    )
    for each in own:
        assert each.rotations == whole.rotations
        for name in ("mean", "covariance", "query_energies"):
            torch.testing.assert_close(getattr(each, name), getattr(whole, name), rtol=1e-4, atol=1e-4)
            assert getattr(each, name).equal(getattr(own[0], name))
    assert [rank[kind]["collections"] for rank in ranks] == [[1, 0, 1]] * 2


def test_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "(tensor parallelism over 2, where 3 query heads have no 2 equal parts)" in rank["odd"]
        for kind in KINDS:  # also of one whose attention is whole in every process
            assert "(tensor parallelism over 2, of which config= says nothing)" in rank[kind]["config"]
            for message in rank[kind]["refused"]:
                assert "each of 2 processes has a part of this cache's model" in message
