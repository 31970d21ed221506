"""Masks that a cache refuses, and rows and images that come with some."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from models import dynamic, exact, generate, logits_of, prompt, tiny
from test_masks import PROMPT, call, four_dimensional, tree
from torch import Tensor
from transformers import Cache, Gemma3Config, Gemma3ForConditionalGeneration

from qada_cache.versions import pass_cache


def wrong_masks() -> dict[str, tuple[int, Tensor, str]]:
    """Masks, how many tokens of a text of `PROMPT + 5` were cached before, and what is said of them."""
    tokens = PROMPT + 5
    causal = torch.zeros(1, 1, tokens, tokens).masked_fill(~torch.ones(tokens, tokens).bool().tril(), -torch.inf)
    distances = torch.arange(tokens) - torch.arange(tokens)[:, None]
    alibi = causal + 0.1 * distances
    unknown, one = causal.clone(), causal.clone()
    unknown[..., -3, 5], one[..., -1, 5] = torch.nan, -50.0
    heads = (causal == 0).expand(1, 4, -1, -1).clone()
    heads[:, 1, -1, -2] = False
    past = causal == 0
    past[..., -2, 30] = False
    last = causal == 0
    last[..., -1, 30] = False
    masks = {"alibi": alibi, "nan": unknown, "a bias": one, "ints": (causal == 0).long(), "heads": heads}
    numbers, shape, cached = "adds numbers to scores", "cannot read .*one for all heads", "does not agree"
    said = {"alibi": numbers, "nan": numbers, "a bias": numbers, "ints": numbers, "heads": shape}
    cases = {
        f"{name} after {before}": (before, mask[..., before:, :], said[name])
        for before in (0, PROMPT, tokens - 1)
        for name, mask in masks.items()
        if (name, before) != ("nan", tokens - 1)  # it is not in the last row
    }
    cases["hides the past from one query"] = PROMPT, past[..., PROMPT:, :], cached
    cases["one token, hides the past"] = tokens - 1, last[..., -1:, :], cached
    return cases


@pytest.mark.parametrize("wrong", wrong_masks())
def test_masks_that_are_refused(wrong: str) -> None:
    """A mask that cannot be served raises an error that names the reason, before anything is stored."""
    before, mask, message = wrong_masks()[wrong]
    model, ids = tiny(), prompt(PROMPT + 5)[0]
    cache = exact(model)
    if before:
        call(model, cache, ids[:, :before])
    with pytest.raises(ValueError, match=message):
        call(model, cache, ids[:, before:], mask)
    assert cache.get_seq_length() == before
    wanted = call(model, dynamic(model), ids)[:, before:]
    assert (call(model, cache, ids[:, before:]) - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma3n"])
def test_a_mask_that_is_shorter_than_the_text(family: str, attention: str, tokens: int) -> None:
    """A prompt's mask that is kept while decoding: new tokens would be padding, which is not stored. A wider one, made
    for all the text to come, is served."""
    model, (ids, padding) = tiny(family, attention=attention), prompt(PROMPT + tokens, PROMPT)
    cache, short = exact(model), padding[:, :PROMPT]
    call(model, cache, ids[:, :PROMPT], short)
    said = rf"shape \[2, {PROMPT}\] in a call of {tokens} tokens with {PROMPT + tokens} seen so far"
    with pytest.raises(ValueError, match=said):
        call(model, cache, ids[:, PROMPT:], short)
    assert cache.get_seq_length() == PROMPT
    wide = torch.cat([padding, torch.zeros(2, 9, dtype=torch.long)], dim=1)
    wanted = call(model, dynamic(model), ids, padding)[:, PROMPT:]
    got = call(model, cache, ids[:, PROMPT:], wide)
    assert (got - wanted)[padding[:, PROMPT:].bool()].abs().max() < 1e-3


@pytest.mark.parametrize(("attention", "form"), [("sdpa", "bool"), ("eager", "lowest")])
def test_a_token_that_sees_nothing(attention: str, form: str) -> None:
    """Its output would be zero under sdpa, the mean of all values under eager: of a row of padding so far."""
    model, (ids, padding) = tiny(attention=attention), prompt(40, 3)
    own, cache = torch.ones(10, 10).tril(-1).bool(), exact(model)
    call(model, cache, ids[:, :30], padding[:, :30])
    with pytest.raises(ValueError, match="sees nothing, but is seen: let it see itself, or hide it from all"):
        call(model, cache, ids[:, 30:], four_dimensional(padding[:, :30], own, form))
    wanted = call(model, dynamic(model), ids, padding)[:, 30:]
    got = call(model, cache, ids[:, 30:], padding)
    assert (got - wanted)[padding[:, 30:].bool()].abs().max() < 1e-3


def test_eager_attention_would_add_a_bool_mask() -> None:
    """DynamicCache's queries then see all tokens, the hidden ones a little less."""
    model, ids = tiny(attention="eager"), prompt(PROMPT)[0]
    bool_mask = torch.ones(1, 1, PROMPT, PROMPT, dtype=torch.bool).tril()
    for before in (0, 100):
        cache = exact(model)
        if before:
            call(model, cache, ids[:, :before])
        with pytest.raises(ValueError, match=r"adds a bool attention mask .*attn_implementation='sdpa'"):
            call(model, cache, ids[:, before:], bool_mask[..., before:, :])
        assert cache.get_seq_length() == before


@pytest.mark.parametrize("short", [True, False])
def test_the_second_image_of_gemma3(short: bool) -> None:
    """Its tokens see each other in a later turn, for which the user gives a 2-D mask alone."""
    text = {**tiny("gemma3").config.to_dict(), "sliding_window": 500}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=96)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
    ids = prompt(PROMPT + (9 if short else 40))[0] % 90
    ids[:, 10:14] = ids[:, PROMPT + 2 : PROMPT + 6] = 96
    images, kinds = torch.randn(2, 3, 32, 32), (ids == 96).long()
    logits = []
    with torch.no_grad():
        for cache in (dynamic(model), exact(model)):
            for turn, (start, stop) in enumerate(((0, PROMPT), (PROMPT, ids.shape[1]))):
                out = model(
                    ids[:, start:stop],
                    pixel_values=images[turn : turn + 1],
                    token_type_ids=kinds[:, :stop],
                    attention_mask=torch.ones(1, stop),
                    **pass_cache(cache),
                )
            logits.append(out.logits)
    assert (logits[1] - logits[0]).abs().max() < 1e-3


def test_rows_that_ended_go_on_after_a_crop() -> None:
    """Their padding behind the end was cached as real, as `generate` says; the next turn's mask hides it."""
    model, (ids, padding) = tiny(), prompt(60, 41)

    def chat(cache: Cache, crop: bool) -> Any:
        first = generate(model, ids, cache, attention_mask=padding, tokens=12, eos_token_id=list(range(1, 97, 9)))
        answered = (first.sequences[:, 60:] != 0).long()
        assert answered.sum(dim=-1).tolist() == [3, 12]
        if crop:
            cache.crop(60 - cache.get_seq_length())
        question = prompt(9, 9, seed=2)[0]
        mask = torch.cat([padding, answered, torch.ones_like(question)], dim=1)
        return generate(model, torch.cat([first.sequences, question], dim=1), cache, attention_mask=mask, tokens=8)

    wanted = chat(dynamic(model), crop=False)
    with pytest.raises(ValueError, match=r"hides some .*padding behind a row's end.*crop the cache .*cache.crop\(-n\)"):
        chat(exact(model), crop=False)
    got = chat(exact(model), crop=True)
    assert torch.equal(got.sequences, wanted.sequences)
    assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-3


def test_a_mask_is_not_kept_alive() -> None:
    model, ids = tiny(), prompt(PROMPT + 5)[0]
    cache, mask = exact(model), four_dimensional(torch.ones(1, PROMPT), tree(5)[0])
    call(model, cache, ids[:, :PROMPT])
    call(model, cache, ids[:, PROMPT:], mask)
    alive = weakref.ref(mask)
    del mask
    assert alive() is None
