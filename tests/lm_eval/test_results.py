"""Results that lm-eval gets beside scores, and arguments that it may give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needle
import pytest
import torch
from test_lm_eval import TASKS, evaluate, needle_lm, random_lm

from qada_cache import QAdACache, StaticHeads, tuned_choice
from qada_cache.lm_eval import make_metrics, split_arguments, startup
from qada_cache.state import TOKEN_THRESHOLD


def test_static_heads_come_from_a_file(tmp_path: Path) -> None:
    StaticHeads(torch.ones(4, 8, dtype=torch.bool)).save(tmp_path / "all")
    StaticHeads(torch.zeros(4, 4, dtype=torch.bool)).save(tmp_path / "none")
    everything = evaluate(needle_lm(cache="static", cache_heads=str(tmp_path / "all")), "needle")["needle"]
    nothing = evaluate(needle_lm(cache="static", cache_heads=str(tmp_path / "none")), "needle")["needle"]
    assert (everything["exact_match,none"], everything["cache_sparsity,none"]) == (1.0, 0.0)
    assert (nothing["exact_match,none"], nothing["cache_sparsity,none"]) == (0.0, 1.0)


def test_results_name_what_qada_tune_kept() -> None:
    """Results name the tuned choice, and every cache of the run uses it, whatever is kept meanwhile."""
    model = needle_lm().model
    path = tuned_choice.keep(model, replace(QAdACache(model).options, token_threshold=8.0), {})
    try:
        lm, without = needle_lm(cache_tuned=True), needle_lm()
        own = needle_lm(cache_token_threshold=3)
    finally:
        path.unlink()
    assert evaluate(lm, "needle")["needle"]["cache_tuned,none"] == "token_threshold=8"
    assert lm._make_cache().options.token_threshold == 8.0
    for other, token_threshold in ((without, TOKEN_THRESHOLD), (own, 3)):
        assert "cache_tuned,none" not in evaluate(other, "needle")["needle"]
        assert other._make_cache().options.token_threshold == token_threshold


def test_what_qada_tune_kept_in_few_bits_and_of_prompts(tmp_path: Path, default_bits: None) -> None:
    """Taken, but where a store keeps tokens as the model made them, of prompts read exactly."""
    model = needle_lm().model
    options = QAdACache(model, bulk_bits=4, prefill_threshold=12.0).options
    path = tuned_choice.keep(model, replace(options, token_threshold=8.0), {})
    try:
        lms = [needle_lm(cache_tuned=True, cache_store=store) for store in (None, str(tmp_path / "store"))]
    finally:
        path.unlink()
    few = 4 if QAdACache(model).options.codes_tokens else 16
    for lm, bits, prompts in zip(lms, (few, 16), (12.0, 0.0), strict=True):
        assert lm._cache_options["token_threshold"] == 8.0
        assert lm._cache_options["bulk_bits"] == bits
        assert lm._cache_options["prefill_threshold"] == lm._make_cache().options.prefill_threshold == prompts
        assert ("prefill_threshold=12" in lm.cache_tuned) == (prompts == 12.0)


def test_short_texts_have_no_sparsity() -> None:
    lm = needle_lm()
    lm._loglikelihood_tokens([(("", ""), [1, 5], [6, 7])], disable_tqdm=True)
    assert make_metrics(lm.cache_totals["none"])["cache_sparsity,none"] == "N/A"


def test_a_run_that_computes_nothing_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tasks whose responses lm-eval had kept have its scores, and one sentence names them."""
    options = {"use_cache": str(tmp_path / "kept")}
    first = evaluate(needle_lm(), "needle", **options)
    assert "nothing was computed" not in caplog.text
    again = evaluate(needle_lm(), "needle", "tiny_choice", **options)
    assert again["needle"]["exact_match,none"] == first["needle"]["exact_match,none"]
    assert not [name for name in again["needle"] if name.startswith("cache_")]
    assert "cache_read_share,none" in again["tiny_choice"]
    (said,) = [record.getMessage() for record in caplog.records if "nothing was computed" in record.getMessage()]
    assert said.startswith("nothing was computed for needle, as lm-eval had kept all responses (use_cache)")


def test_a_run_that_goes_on_says_what_it_reports(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Some of its responses are those of the run before it, here all but those of two documents."""
    evaluate(needle_lm(), *TASKS, limit=2, use_cache=str(tmp_path / "kept"))
    lm = needle_lm()
    found = evaluate(lm, *TASKS, use_cache=str(tmp_path / "kept"))
    assert all("cache_read_share,none" in found[task] for task in TASKS)
    (said,) = [record.getMessage() for record in caplog.records if "lm-eval had kept" in record.getMessage()]
    kept = ", ".join(f"{lm.responses[task]} of {task}" for task in ("needle", "tiny_choice", "tiny_perplexity"))
    assert said.startswith(f"lm-eval had kept {kept} responses (use_cache)")
    caplog.clear()
    evaluate(needle_lm(), *TASKS)
    assert "lm-eval had kept" not in caplog.text


def test_what_other_processes_computed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of other processes are reported, even if the first one computed nothing but had all its responses."""
    lm = needle_lm()
    evaluate(lm, "needle")
    elsewhere = dict(lm.cache_totals)
    monkeypatch.setattr(lm, "gather_object", lambda own: [own, elsewhere if own is lm.cache_totals else own])
    monkeypatch.setattr(lm, "_count", lambda stats: None)
    found = evaluate(lm, "needle")["needle"]
    assert found["cache_bulk_read_bytes,none"] == make_metrics(elsewhere["needle"])["cache_bulk_read_bytes,none"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache": "qda"}, "unknown cache=qda: use one of qada, gaussian, oracle, static, local, dense"),
        ({"cache_treshold": 1}, "unknown cache_treshold=1: use one of cache_threshold, cache_sink_tokens"),
        ({"cache": "static"}, "needs cache_heads=FILE"),
        ({"cache_heads": "file"}, "cache=static needs"),
        ({"cache": "static", "cache_heads": needle.FOLDER / "model.safetensors"}, "is not a qada-heads file"),
        ({"cache_threshold": 2}, "threshold must be in"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needle_lm(**arguments)


def test_arguments_of_a_cache_without_one_are_refused() -> None:
    """Transformers would say that a model does not know them."""

    class Stock:
        def __init__(self, **given: Any) -> None:
            self.given = given

    startup._teach_hflm(SimpleNamespace(HFLM=Stock))
    with pytest.raises(ValueError, match="cache_threshold, cache_heads without cache=: add cache=qada"):
        Stock(cache_heads="file", cache_threshold=1)
    others = {"cache_dir": "folder", "cache_implementation": "static"}
    assert Stock(**others).given == others


def test_arguments_of_transformers_pass() -> None:
    options, rest = split_arguments("oracle", {"cache_dir": "d", "dtype": "auto", "cache_update_moments": False})
    assert options == {"criterion": "oracle", "update_moments": False}
    assert rest == {"cache_dir": "d", "dtype": "auto"}


def test_latents_decide_if_that_is_asked_for() -> None:
    """Latents are read whole by default; a criterion that is asked for is used."""
    assert split_arguments("qada", {})[0] == {"criterion": None}
    assert split_arguments("gaussian", {})[0] == {"criterion": "gaussian"}
    random_lm("deepseek_v3", cache="gaussian", cache_threshold=0.5)


@pytest.mark.parametrize("cache", ["qada", "dense"])
def test_bytes_of_latents_that_are_read_whole(cache: str) -> None:
    """No head decides about them, and exact calls read them."""
    lm = random_lm("deepseek_v3", cache=cache)
    lm._loglikelihood_tokens([(("", ""), [1] * 150, [6, 7])], disable_tqdm=True)
    found = make_metrics(lm.cache_totals["none"])
    layers, channels, bulk = 2, 24, 150 - 1 - 20  # the prompt's last token is read with the answer
    assert found["cache_streamed_bytes,none"] == layers * channels * bulk * 4  # float32
    assert found["cache_bulk_read_bytes,none"] == 0
    assert found["cache_read_share,none"] == "N/A"


def test_unsupported_models_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="reads all tokens of latent attention"):
        random_lm("deepseek_v3", cache_threshold=0.5)
