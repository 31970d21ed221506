"""The measuring tools: one prefill for many variants changes nothing, and tables go on where they stopped."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, prompt, tiny

from eval.forking import forked
from qada_cache import KeyMoments, QAdACache, StaticHeads

VARIANTS: dict[str, dict[str, Any]] = {
    "current": {"moments": "current", "threshold": 0.12},
    "random words": {"threshold": 0.12},
    "group rule": {"moments": "current", "threshold": 0.12, "group_rule": "mean"},
    "oracle": {"criterion": "oracle", "threshold": 0.5},
    "static": {"criterion": StaticHeads(torch.tensor([[True, False, False, True], [False, True, False, False]]))},
    "dense": {"criterion": "dense"},
}


def test_forked_equals_a_cache_of_its_own() -> None:
    """Tokens and counters, whichever order they are made in; what was read stays as it was."""
    model, ids = tiny(), prompt(150)[0]
    read = QAdACache(model, moments="current", **SMALL)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=read)
    for options in [*VARIANTS.values(), *reversed(VARIANTS.values())]:
        caches = forked(read, model, **options, **SMALL), QAdACache(model, **options, **SMALL)
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=caches[1])
        texts = [model.generate(ids, past_key_values=cache, max_new_tokens=25, do_sample=False) for cache in caches]
        assert torch.equal(texts[0], texts[1])
        ours, theirs = (cache.stats() for cache in caches)
        assert ours.decisions == theirs.decisions > 0
        assert torch.equal(ours.heads, theirs.heads)
        assert ours.pulled_bytes == theirs.pulled_bytes
    assert read.get_seq_length() == 149
    assert read.stats().decisions == 0


def test_static_heads_from_the_oracle() -> None:
    """The share alpha of heads that were local most often is local; ties and unknown heads stay long-context last."""
    share = torch.tensor([[0.9, 0.1, 0.5], [1.0, torch.nan, 0.2]])
    for alpha, local in ((0.0, []), (1 / 6, [3]), (0.34, [0, 3]), (0.5, [0, 2, 3]), (1.0, [0, 1, 2, 3, 4, 5])):
        table = StaticHeads.from_oracle(share, alpha).long_context
        assert (~table).flatten().nonzero().squeeze(-1).tolist() == local
    assert not StaticHeads.from_oracle(share, 0.84).long_context[0, 1]
    assert StaticHeads.from_oracle(share, 0.84).long_context[1, 1]
    for wrong in ((share, 1.5), (share, -0.1), (share[0], 0.5)):
        with pytest.raises(ValueError, match="from_oracle takes shares"):
            StaticHeads.from_oracle(*wrong)


def test_sweep(tmp_path: Path) -> None:
    """Every criterion on the needle task, then more thresholds into the same table."""
    pytest.importorskip("lm_eval", reason="the sweep runs on lm-eval")
    from eval import sweep

    table = tmp_path / "sweep.csv"
    arguments = ["--lengths", "1024", "--limit", "2", "--alphas", "0.5", "--out", str(table), "--moments"]

    def rows() -> list[dict[str, str]]:
        with table.open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    assert sweep.main([*arguments, "current", "--thresholds", "1"]) == 0
    found = {row["criterion"]: row for row in rows()}
    assert list(found) == ["dense", "local", "oracle", "qada", "static oracle"]
    assert {row["documents"] for row in rows()} == {"2"}
    assert found["dense"]["score"] == found["oracle"]["score"] == found["qada"]["score"]
    assert float(found["local"]["score"]) < float(found["dense"]["score"])
    assert [float(found[name]["q_heads_local"]) for name in ("dense", "local", "qada")] == [0, 1, 0]
    assert float(found["static oracle"]["q_heads_local"]) == 0.5
    before = rows()
    assert sweep.main([*arguments, "current", "random-words", "--thresholds", "1", "0.3"]) == 0
    assert rows()[: len(before)] == before
    added = [(row["criterion"], row["moments"], row["threshold"]) for row in rows()[len(before) :]]
    assert added == [
        ("oracle", "", "0.3"),
        ("qada", "current", "0.3"),
        ("qada", "random-words", "1.0"),
        ("qada", "random-words", "0.3"),
    ]


def test_haystack_moments_are_the_needle_models() -> None:
    pytest.importorskip("lm_eval", reason="the sweep runs on lm-eval")
    from eval.sweep import SweepLM, text_moments
    from qada_cache import needle

    lm = SweepLM(str(needle.FOLDER), device="cpu")
    assert text_moments(lm, "single-word") == "single-word"
    assert isinstance(text_moments(lm, "haystack"), KeyMoments)
