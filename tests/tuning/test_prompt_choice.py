"""Figures of prompts read by selection against an independent computation; choices and sentences, on numbers."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from compilers import LEAST, needs_compiler, needs_vectors
from models import prompt as words
from models import tiny

from qada_cache import QAdACache, restore_attention
from qada_cache.kernels.cpu import prompt
from qada_cache.tuning import prompts
from qada_cache.tuning.estimates import Estimate
from qada_cache.tuning.prompts import PromptFigures, PromptOutcome, PromptSetting, choose, summarize
from qada_cache.versions import pass_cache


def small(**changes: Any) -> Any:
    return tiny("llama", head_dim=16, max_position_embeddings=2048, **changes)


@needs_compiler
@needs_vectors
@torch.no_grad()
def test_figures_are_those_of_an_independent_computation() -> None:
    """Figures equal those of transformers alone in float64, and of a cache of the test's own. The first of the measured
    positions select."""
    model, ids = small(), words(1500)[0]
    everything, low, high = prompts.measure_prompt(model, ids, (1e-9, 60.0), moments="current")
    cache = QAdACache(model, moments="current", prefill_threshold=60.0)
    guess = model(ids, **pass_cache(cache)).logits[0, -512:].double().log_softmax(dim=-1)
    exact = copy.deepcopy(model).double()
    restore_attention(exact)
    full = exact(ids, use_cache=False).logits[0, -512:].log_softmax(dim=-1)
    divergence = float(torch.nn.functional.kl_div(guess, full, log_target=True, reduction="none").sum(dim=-1).mean())
    assert everything[:3] == (0.0, 1.0, 1.0)
    assert low.kl < 1e-8
    assert low.pairs > high.pairs
    assert high.kl == pytest.approx(divergence, rel=1e-3)
    assert divergence > 1e-6
    assert high.top1 == float((guess.argmax(-1) == full.argmax(-1)).double().mean())
    computed, pairs = cache.stats().prompt_read_pairs, 2 * 4 * 1500 * 1501 // 2  # of layers and heads
    assert high.pairs == computed / pairs < 1
    assert min(everything.seconds, low.seconds, high.seconds) > 0


@needs_compiler
@needs_vectors
def test_prompts_that_are_read_exactly_whatever_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that selects needs 64 sinks in a whole segment, 1,024 far keys, 111 of the window, and 113 queries more."""
    model, ids = small(), words(1400)[0]
    prompts.check_selects(model, ids[:, :1312])
    with pytest.raises(ValueError, match=r"of 1311 tokens is read exactly .* give --tokens of at least 1312"):
        prompts.check_selects(model, ids[:, :1311])
    for missing in LEAST:
        left = LEAST - {missing}
        monkeypatch.setattr(prompt, "read_instructions", lambda left=left: left)
        with pytest.raises(ValueError, match="selection needs a CPU with AVX2 and FMA or NEON, a compiler"):
            prompts.check_selects(model, ids)


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [({"dtype": torch.float16}, "auto"), ({"attention": "eager"}, "auto"), ({}, "torch")],
    ids=["dtype", "implementation", "kernels"],
)
def test_models_that_selection_does_not_serve(
    changes: dict[str, Any], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QADA_KERNELS", kernels)
    with pytest.raises(ValueError, match=r"prompts of this llama model in torch\.float\d\d are read exactly here"):
        prompts.check_selects(small(**changes), words(1400)[0])


@pytest.mark.parametrize(("device", "expected"), [("cpu", (4.4, 12.0, 30.0)), ("cuda:1", (12.0, 25.0, 60.0))])
def test_devices_have_thresholds_of_their_own(
    device: str, expected: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "find_inputs_device", lambda model: torch.device(device))
    assert prompts.find_thresholds(small()) == expected


def setting(threshold: float, kl: float, time: float, *, error: float = 0.0) -> PromptSetting:
    return PromptSetting(threshold, Estimate(kl, kl - error, kl + error), top1=0.99, pairs=0.3, seconds=2.0, time=time)


EXACT = setting(0.0, 0.0, 1.0)
CAREFUL, MIDDLE, BOLD = setting(4.4, 0.001, 0.8), setting(12.0, 0.002, 0.7), setting(30.0, 0.004, 0.6)


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.002, MIDDLE), (0.0019, CAREFUL), (0.01, BOLD), (0.0009, None)], ids=str
)
def test_the_fastest_within_the_kl_is_chosen(kl: float, expected: PromptSetting | None) -> None:
    assert choose([CAREFUL, MIDDLE, BOLD], kl) is expected


def test_it_has_to_be_faster_and_surely_within_the_kl() -> None:
    assert choose([replace(CAREFUL, time=0.91)], 1.0) is None
    assert choose([replace(CAREFUL, time=0.9)], 1.0) is not None
    assert choose([setting(4.4, 0.0015, 0.5, error=0.001)], 0.002) is None


def outcome(chosen: PromptSetting | None, again: PromptSetting | None, *settings: PromptSetting) -> PromptOutcome:
    return PromptOutcome([EXACT, *settings], 0.002, chosen, again, pieces=4, held_out=2, tokens=8192)


@pytest.mark.parametrize(
    ("found", "recommended", "said"),
    [
        (outcome(MIDDLE, replace(MIDDLE, kl=Estimate(0.0018, 0, 9)), MIDDLE), 12.0, "It is recommended for prompts of"),
        (outcome(MIDDLE, replace(MIDDLE, kl=Estimate(0.0021, 0, 9)), MIDDLE), 0.0, "is not confirmed. On 2 held-out"),
        (outcome(MIDDLE, replace(MIDDLE, time=0.95), MIDDLE), 0.0, "and 0.95 of the exact reading's time."),
        (outcome(None, None, BOLD), 0.0, "is recommended: none is surely within KL 0.002"),
        (
            outcome(None, None, replace(CAREFUL, time=1.1), replace(MIDDLE, time=0.93), BOLD),
            0.0,
            "within KL 0.002 the fastest, 12, takes 0.93 of the exact reading's time, and 0.9 is the most",
        ),
    ],
)
def test_what_is_recommended_and_why_not(found: PromptOutcome, recommended: float, said: str) -> None:
    measured, verdict = prompts.write_sentences(found)
    assert found.recommended == recommended
    assert said in verdict
    assert ("No prefill_threshold is recommended" in verdict) == (not recommended)
    assert "the same 4 pieces, each read at once, over its last 512 tokens" in measured


def test_prompts_together() -> None:
    """Times over those of the same prompt's exact reading: one that is slow as a whole counts like another."""
    exact = [PromptFigures(0.0, 1.0, 1.0, seconds) for seconds in (2.0, 20.0, 4.0)]
    read = zip((0.1, 0.3, 0.2), (1.0, 0.5, 0.9), (0.2, 0.4, 0.3), (1.0, 12.0, 3.6), strict=True)
    found = summarize(12.0, list(map(PromptFigures._make, read)), exact)
    assert (found.threshold, found.kl.mean, found.top1) == (12.0, pytest.approx(0.2), pytest.approx(0.8))
    assert (found.pairs, found.seconds, found.time) == (pytest.approx(0.3), 3.6, 0.6)
    assert not math.isinf(found.kl.high)
    row = prompts.make_table(outcome(None, None, found))[1]
    assert (row["prefill_threshold"], row["pairs computed"], row["of exact"]) == ("12", "30.0%", "0.60")
