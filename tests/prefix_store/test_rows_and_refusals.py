"""Rows that are stored and found together, and what a store refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import forced, generate, logits_of, prompt, tiny
from test_prefix_store import DOCUMENT, EXACT, read
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, Kosmos2Config, Kosmos2ForConditionalGeneration, PreTrainedModel

from qada_cache import PrefixStore, QAdACache
from qada_cache.versions import pass_cache


def test_rows_with_a_common_beginning(store: PrefixStore, model: PreTrainedModel) -> None:
    document, _ = prompt(DOCUMENT)
    cache = QAdACache(model, **EXACT)
    read(model, document, cache)
    store.keep(cache, document)
    questions = [prompt(tokens, seed=tokens)[0] for tokens in (30, 12, 25)]
    texts = [torch.cat([document, question], dim=1)[0] for question in questions]
    ids, mask = (pad_sequence(row, True, padding_side="left") for row in (texts, [torch.ones_like(t) for t in texts]))
    cache = store.cache(model, ids, attention_mask=mask, **EXACT)
    assert cache.get_seq_length() == DOCUMENT  # of the row without padding
    assert cache.layers[0].store.lengths == [DOCUMENT, DOCUMENT - 18, DOCUMENT - 5]
    got = generate(model, ids, cache, attention_mask=mask)
    wanted = generate(model, ids, DynamicCache(), attention_mask=mask)
    assert torch.equal(got.sequences, wanted.sequences)
    torch.testing.assert_close(logits_of(got), logits_of(wanted), rtol=1e-4, atol=2e-4)
    assert store.stats().saved_tokens == 3 * DOCUMENT - 23


def test_rows_that_have_nothing_in_common(store: PrefixStore, model: PreTrainedModel) -> None:
    one, other = prompt(300, seed=2)[0], prompt(300, seed=3)[0]
    cache = QAdACache(model, **EXACT)
    read(model, one, cache)
    store.keep(cache, one)
    assert store.cache(model, torch.cat([one, other]), **EXACT).get_seq_length() == 0
    cache = QAdACache(model, **EXACT)
    read(model, torch.cat([one, other]), cache)
    store.keep(cache, torch.cat([one, other]))
    both = torch.cat([other, one])
    cache = store.cache(model, both, **EXACT)
    assert cache.get_seq_length() == 299
    got = forced(model, both[:, 299:], [1], cache)
    torch.testing.assert_close(got[:, 0], forced(model, both, [300], None)[:, -1], rtol=1e-4, atol=2e-4)


def test_a_short_row_without_anything_stored(store: PrefixStore, model: PreTrainedModel) -> None:
    """It may be padding as far as the longer one is held."""
    one, other = prompt(300, seed=2)[0], prompt(40, seed=3)[0]
    cache = QAdACache(model, **EXACT)
    read(model, one[:, :200], cache)
    store.keep(cache, one[:, :200])
    ids = torch.cat([one, torch.cat([torch.zeros(1, 260, dtype=torch.long), other], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :260] = 0
    cache = store.cache(model, ids, attention_mask=mask, **EXACT)
    assert cache.get_seq_length() == 200
    got, wanted = (generate(model, ids, each, attention_mask=mask) for each in (cache, DynamicCache()))
    assert torch.equal(got.sequences, wanted.sequences)


def test_models_without_full_attention(store: PrefixStore) -> None:
    model = tiny("mistral_sliding")
    with pytest.raises(NotImplementedError, match="which has no full-attention layers"):
        store.cache(model, [1, 2, 3], moments="current")
    with pytest.raises(NotImplementedError, match="save"):
        store.keep(QAdACache(model, moments="current"), [1, 2, 3])


def test_prompts_that_their_tokens_do_not_tell(store: PrefixStore, model: PreTrainedModel) -> None:
    growing = tiny(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(NotImplementedError, match="rotary frequencies"):
        store.cache(growing, [1, 2, 3], moments="current")
    names = ("image_token_id", "video_token_index", "audio_token_id", "vision_start_token_id", "speech_token_index")
    for token, name in enumerate(names, start=7):
        setattr(model.config, name, token)
        with pytest.raises(NotImplementedError, match=rf"images or sound \(token {token}\)"):
            store.cache(model, [1, token, 3], moments="current")
    assert store.cache(model, [1, 20, 3], moments="current").get_seq_length() == 0
    sizes = {"vocab_size": 97, "embed_dim": 32, "layers": 1, "ffn_dim": 48, "attention_heads": 4}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    unnamed = Kosmos2ForConditionalGeneration(Kosmos2Config(text_config=sizes, vision_config=vision)).eval()
    with pytest.raises(NotImplementedError, match=r"kosmos-2, whose config does not say which tokens stand for images"):
        store.cache(unnamed, [1, 2, 3], moments="current")


def test_prompts_that_are_read_by_selection(store: PrefixStore, model: PreTrainedModel) -> None:
    """Wherever caches come from: others would take what they hold for exact."""
    options: dict[str, Any] = {"moments": "current", "prefill_threshold": 4.4}
    with pytest.raises(NotImplementedError, match=r"read by selection \(prefill_threshold=4.4\)"):
        store.cache(model, [1, 2, 3], **options)
    cache = QAdACache(model, **options, bulk_bits=16)
    with torch.no_grad():
        model(prompt(30)[0], **pass_cache(cache))
    with pytest.raises(NotImplementedError, match="read by selection"):
        store.keep(cache, prompt(30)[0])
    assert store.cache(model, [1, 2, 3], moments="current").get_seq_length() == 0


def test_wrong_arguments(store: PrefixStore, model: PreTrainedModel) -> None:
    cache = QAdACache(model, **EXACT)
    assert store.keep(cache, [1]) == 0
    ids, mask = prompt(30, 20)
    with torch.no_grad():
        model(ids, attention_mask=mask, **pass_cache(cache))
    with pytest.raises(NotImplementedError, match="padding"):
        store.keep(cache, ids)
    for wrong in (ids[:, 1:], ids[:1]):
        with pytest.raises(ValueError, match="the cache holds 2 rows of 30"):
            store.keep(cache, wrong)
    for wrong in ([], [[]], [0.5], [True], [[[1]]]):
        with pytest.raises(ValueError, match="token ids are ints"):
            store.cache(model, wrong, **EXACT)
    with pytest.raises(ValueError, match="attention_mask of"):
        store.cache(model, ids, attention_mask=mask[:, 1:], **EXACT)
    with pytest.raises(ValueError, match="on the left"):
        store.cache(model, ids, attention_mask=mask.flip(1), **EXACT)
    with pytest.raises(TypeError, match="key must be a str"):
        store.cache(model, ids, key=7, **EXACT)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="thresold"):
        store.cache(model, ids, thresold=1)
    for limits in ({"max_bytes": -1}, {"max_bytes": 1.5}, {"max_age": -1}, {"max_age": "a"}):
        with pytest.raises(ValueError, match="must be"):
            PrefixStore(**limits)
    of_a_config = QAdACache(config=model.config, **EXACT)
    read(model, ids, of_a_config)
    with pytest.raises(ValueError, match="build it with the model"):
        store.keep(of_a_config, ids)


def test_under_autocast_nothing_is_kept(
    store: PrefixStore, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    text, _ = prompt(300)
    cache = QAdACache(model, **EXACT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        read(model, text, cache)
    assert store.keep(cache, text) == 0
    assert "autocast" in caplog.text
    cache = QAdACache(model, **EXACT)
    read(model, text, cache)
    store.keep(cache, text)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = store.cache(model, text, **EXACT)
        generate(model, text, cache)
    assert cache.get_seq_length() == 323
    assert store.stats().saved_tokens == 0
