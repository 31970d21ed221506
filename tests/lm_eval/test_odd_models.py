"""Models whose layers, positions or rotary frequencies are odd score as in lm-eval alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install qada-cache[eval])")

import needle
from lm_eval.models.huggingface import HFLM
from test_lm_eval import token_requests
from transformers import PreTrainedModel

from eval import families
from qada_cache.lm_eval import QAdALM


def build(kind: str) -> PreTrainedModel:
    return families.build(kind)[0].eval()


def score(lm: HFLM, *lengths: tuple[int, int]) -> list[float]:
    """Log-likelihoods of random continuations, by the lengths of context and continuation."""
    requests = [
        (names, [1 + token % 95 for token in context], [1 + token % 95 for token in answer])
        for names, context, answer in token_requests(*lengths)
    ]
    return [score for score, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]


def make(kind: type[HFLM], model: PreTrainedModel, **options: Any) -> HFLM:
    own = {f"cache_{name}": value for name, value in families.EXACT.items()} if kind is QAdALM else {}
    return kind(model, tokenizer=needle.load_tokenizer(), max_length=512, **own, **options)


@pytest.mark.parametrize(
    ("kind", "batch_size"),
    [
        ("jamba", 1),  # whose first kind of Mamba forgets states in calls of several tokens
        ("roberta", 1),  # which numbers positions from behind padding's
        ("roberta", 4),
        ("deepseek_v4", 4),  # which compresses blocks of columns
    ],
)
def test_scores_are_lm_evals_own(kind: str, batch_size: int) -> None:
    model, lengths = build(kind), [(60, 5), (30, 20), (1, 25), (70, 4)]
    wanted = score(make(HFLM, model), *lengths)
    assert score(make(QAdALM, model, batch_size=batch_size), *lengths) == pytest.approx(wanted, abs=5e-3)


def test_texts_that_roberta_goes_on_with() -> None:
    """`generate` gives it positions from 0 on, also behind a cache."""
    model = build("roberta")
    ids = torch.arange(1, 41)[None]
    given = {"max_length": 46, "stop": [], "attention_mask": torch.ones_like(ids), "do_sample": False}
    ours, stock = (make(kind, model)._model_generate(ids, **given) for kind in (QAdALM, HFLM))
    assert torch.equal(ours, stock)


def test_texts_that_pass_a_change_of_rotary_frequencies(caplog: pytest.LogCaptureFixture) -> None:
    """They are read whole, so that all keys are of the same frequencies; no batch has rows by both."""
    model = build("phi3")
    lengths = [(90, 4), (95, 5), (95, 6), (95, 12), (98, 4), (102, 30), (1, 110), (1, 100), (60, 5)]
    wanted = score(make(HFLM, model), *lengths)
    for batch_size in (1, 4):
        lm = make(QAdALM, model, batch_size=batch_size)
        caplog.clear()
        assert score(lm, *lengths) == pytest.approx(wanted, abs=5e-3)
        assert "3 of 9 texts pass 100 tokens, where this model's rotary frequencies change" in caplog.text
    caplog.clear()
    assert score(lm, (90, 4), (110, 4))
    assert "frequencies" not in caplog.text
