"""`python -m eval.families`: what it says of a model type of each kind."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path

import pytest
import torch

from eval import families
from qada_cache import QAdACache, watched
from qada_cache.attention import forward
from qada_cache.prefix_store import filling

FOUND = {"llama": "served", "phi3": "served", "mpt": "refused", "mistral": "nothing to do", "dbrx": "not run"}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command silences transformers and warnings for its process."""
    monkeypatch.setattr(families.transformers.logging, "set_verbosity_error", lambda: None)
    monkeypatch.setattr(families.warnings, "filterwarnings", lambda *_: None)


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    families.main(["--types", *FOUND, "--out", str(tmp_path / "t.csv")])
    with (tmp_path / "t.csv").open(encoding="utf-8") as file:
        rows = {row["model_type"]: row for row in csv.DictReader(file)}
    assert {name: row["verdict"] for name, row in rows.items()} == FOUND
    assert rows["llama"]["layers"] == "6 of 6"
    assert rows["mpt"]["words"].startswith("NotImplementedError: this model computes attention without transformers")
    assert "2 served, 1 nothing to do, 1 refused, 0 differs, 0 dropped, 1 not run" in capfd.readouterr().out


def test_another_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache whose answers are not DynamicCache's."""

    def wrong(*arguments: object, **options: object) -> families.QAdACache:
        return original(*arguments, **{**options, "threshold": 0.0})

    original = families.QAdACache
    monkeypatch.setattr(families, "QAdACache", wrong)
    row = families.judge("llama")
    assert row["verdict"] == "differs"
    assert "of the largest logit" in row["words"]


def test_a_cache_that_is_dropped_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropped cache is reported if the package neither finds it again nor warns."""
    monkeypatch.setattr(forward.generation, "drops_caches", lambda _: False)
    monkeypatch.setattr(forward.generation, "warn_of_unused", lambda *_: None)
    assert families.judge("phi3")["words"] == "without a word, by generate of 98 tokens"


def test_states_that_are_forgotten_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgotten states are reported if stores lack the check by which they refuse Jamba."""
    assert families.judge("jamba")["verdict"] == "served"
    for module in (filling, watched):
        monkeypatch.setattr(module, "forgets_states", lambda _: False)
    row = families.judge("jamba")
    assert row["verdict"] == "differs"
    assert row["words"].startswith("from a store, by ")


@pytest.mark.slow
def test_no_type_drops_a_cache() -> None:
    found = [families.judge_within(60, model_type) for model_type in sorted(families.TYPES)]
    assert sum(row["verdict"] == "served" for row in found) > 100
    assert [row["model_type"] for row in found if row["verdict"] in ("dropped", "differs")] == []


@pytest.mark.parametrize(
    ("work", "words"),
    [(lambda *_: time.sleep(60), "not done in 1 s"), (lambda *_: os._exit(3), "its process ended with 3")],
)
def test_processes_that_hang_or_die(work: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_work", work)
    assert families.judge_within(1, "llama")["words"] == words


def test_wrong_types_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        families.main(["--types", "lama"])
    assert "no causal language model lama" in capsys.readouterr().err


def test_latent_attention_is_latent() -> None:
    """A tiny config keeps what makes its type one of its own."""
    config = families.make_tiny_config(families.CONFIG_MAPPING["deepseek_v3"])
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert config.kv_lora_rank < config.hidden_size
    assert torch.get_num_threads() == 1


def test_multi_query_attention_has_one_head_of_keys() -> None:
    """GPTBigCode's layers go by another setting, and the config would say otherwise."""
    with torch.no_grad():
        model, _ = families.build("gpt_bigcode")
    cache = QAdACache(model, moments="current")
    with torch.no_grad():
        families.compute_logits(model, cache)
    assert cache.layers[0].store.near_keys.shape[1] == model.config.num_key_value_heads
