"""Figures of settings against plain attention in float64, and the text that they are measured on."""

from __future__ import annotations

import copy
import itertools
from dataclasses import asdict

import pytest
import torch
from models import prompt, tiny
from readable import english_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import QAdACache, restore_attention
from qada_cache.key_moments.prompts import ARTICLE
from qada_cache.tuned_choice import Thresholds
from qada_cache.tuning.measuring import Figures, Piece, compare_logits, cut, hold_out, measure, read_default_text
from qada_cache.versions import pass_cache

TOKENS, FOLLOWING = 1400, 6
SETTINGS = (Thresholds(1e-30), Thresholds(1.0), Thresholds(20.0, 0.5))


@pytest.fixture(scope="module")
def measured() -> tuple[PreTrainedModel, Tensor, Figures, list[Figures]]:
    model = tiny(max_position_embeddings=2048)
    ids = prompt(TOKENS + FOLLOWING)[0]
    everything, *found = measure(model, Piece(ids[:, :TOKENS], ids[:, TOKENS:]), SETTINGS)
    return model, ids, everything, found


@torch.no_grad()
def plain(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probabilities `[FOLLOWING, vocabulary]` of what follows, by transformers alone, in float64."""
    exact = copy.deepcopy(model).double()
    restore_attention(exact)
    return exact(ids, use_cache=False).logits[0, TOKENS - 1 : -1].log_softmax(dim=-1)


def test_figures_are_those_of_an_independent_computation(
    measured: tuple[PreTrainedModel, Tensor, Figures, list[Figures]],
) -> None:
    """A cache of its own for each setting, not a fork; divergence from attention over everything, without a cache."""
    model, ids, everything, found = measured
    full = plain(model, ids)
    assert (everything.kl, everything.top1, everything.bytes_read) == (0.0, 1.0, 1.0)
    for setting, figures in zip(SETTINGS, found, strict=True):
        cache, logits = QAdACache(model, **asdict(setting)), []
        with torch.no_grad():
            model(ids[:, : TOKENS - 1], **pass_cache(cache))
            for place in range(TOKENS - 1, TOKENS + FOLLOWING - 1):
                logits.append(model(ids[:, place : place + 1], **pass_cache(cache)).logits[0, -1])
        guess = torch.stack(logits).double().log_softmax(dim=-1)
        divergence = torch.nn.functional.kl_div(guess, full, log_target=True, reduction="none").sum(dim=-1).mean()
        assert figures.kl == pytest.approx(float(divergence), rel=1e-3, abs=1e-8)
        assert figures.top1 == float((guess.argmax(-1) == full.argmax(-1)).double().mean())
        stats = cache.stats()
        read = (stats.bulk_read_bytes / 4 + stats.sketch_read_bytes / 2) / (
            stats.dense_bulk_bytes / 4
        )  # in values of 16 bits
        assert figures.bytes_read == pytest.approx(read)
        assert figures.seconds > 0


def test_records_have_the_same_bytes_in_any_dtype() -> None:
    """So their share of a bulk in 16 bits does not depend on the model's dtype."""
    ids, shares = prompt(TOKENS + FOLLOWING)[0], []
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(max_position_embeddings=2048, dtype=dtype)
        piece = Piece(ids[:, :TOKENS], ids[:, TOKENS:])
        _, all_tokens = measure(model, piece, SETTINGS[:1], bulk_bits=8)
        shares.append(all_tokens.bytes_read)
    assert shares[0] == pytest.approx(shares[1])
    assert 0.5 < shares[0] < 1.0


def test_more_careful_settings_read_more_and_lose_less(
    measured: tuple[PreTrainedModel, Tensor, Figures, list[Figures]],
) -> None:
    _, _, _, (all_tokens, some, few) = measured
    assert all_tokens.kl < 1e-6 < some.kl <= few.kl
    assert all_tokens.bytes_read > 1.0  # everything, and the sketch
    assert few.bytes_read < some.bytes_read < 1.0


def test_divergence_of_a_pair_by_hand() -> None:
    full, found = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    by_hand = (0.9 * torch.tensor(0.9 / 0.5).log() + 0.1 * torch.tensor(0.1 / 0.5).log()) / 2
    assert compare_logits(full + 3, found - 1) == (pytest.approx(float(by_hand), rel=1e-6), 1.0)
    assert compare_logits(full, found.flip(0) + torch.tensor([0.0, 1.0]))[1] == 0.0


def test_a_model_without_full_attention_is_refused() -> None:
    model = tiny("mistral_sliding", max_position_embeddings=2048)
    ids = prompt(TOKENS + FOLLOWING)[0]
    with pytest.raises(ValueError, match="there is nothing to tune"):
        list(measure(model, Piece(ids[:, :TOKENS], ids[:, TOKENS:]), (Thresholds(1.0),)))


def test_pieces_are_spread_over_the_text_and_never_overlap() -> None:
    tokenizer = english_tokenizer()
    text = ARTICLE.read_text()
    words = tokenizer(text, add_special_tokens=False).input_ids
    pieces = cut(text, tokenizer, count=6, tokens=100, following=20)
    texts = [torch.cat([piece.prompt, piece.following], dim=1)[0].tolist() for piece in pieces]
    assert {(piece.prompt.shape[1], piece.following.shape[1]) for piece in pieces} == {(100, 20)}
    starts = [next(at for at in range(len(words)) if words[at : at + 120] == found) for found in texts]
    assert (starts[0], starts[-1]) == (0, len(words) - 120)
    assert all(after - before >= 120 for before, after in itertools.pairwise(starts))
    by, apart = hold_out(pieces, 2)
    assert apart == [pieces[2], pieces[5]]
    assert by == [pieces[0], pieces[1], pieces[3], pieces[4]]


def test_texts_that_will_not_do() -> None:
    tokenizer = english_tokenizer()
    with pytest.raises(ValueError, match=r"the text has 3 tokens, and 2 pieces of 100 \+ 20 take 240"):
        cut("only three words", tokenizer, count=2, tokens=100, following=20)
    with pytest.raises(ValueError, match="does not know the words of the text"):
        cut(read_default_text(), tokenizer, count=2, tokens=100, following=20)
