"""Masks `[batch, 1, queries, tokens]` of a user's own or of image models, against DynamicCache's logits."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from models import SMALL, dynamic, exact, generate, logits_of, prompt, rounding, tiny, tiny_like
from torch import Tensor
from transformers import Cache, Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from qada_cache import QAdACache, kernels
from qada_cache.versions import pass_cache

PROMPT = 150  # tokens, of which 130 are in the bulk
WINDOW = SMALL["local_tokens"] - SMALL["sink_tokens"]
CALLS = (2, 7, WINDOW, WINDOW + 1, 60)  # tokens


def tree(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random tree of drafts, each behind the last cached token or an earlier draft: who sees whom, bool `[tokens,
    tokens]`, and how deep they are."""
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(-1, token, (), generator=generator)) if token > 1 else -1 for token in range(tokens)]
    sees = torch.eye(tokens, dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            sees[token] |= sees[parent]
    assert not sees[-1].all()
    return sees, sees.sum(dim=-1) - 1


def four_dimensional(past: Tensor, own: Tensor, form: str = "bool", dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask of calls whose queries all see `past` `[batch, cached]`, and of each other `own` `[tokens, tokens]`."""
    batch, tokens = len(past), len(own)
    mask = torch.cat([past.bool()[:, None].expand(-1, tokens, -1), own.expand(batch, -1, -1)], dim=-1)[:, None]
    hidden = {"bool": None, "infinity": -torch.inf, "lowest": torch.finfo(dtype).min, "-1e4": -1e4}[form]
    return mask if hidden is None else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


@torch.no_grad()
def call(
    model: PreTrainedModel, cache: Cache, ids: Tensor, mask: Any = None, positions: Tensor | None = None
) -> Tensor:
    return model(ids, attention_mask=mask, position_ids=positions, **pass_cache(cache)).logits


def verify(model: PreTrainedModel, cache: Cache, tokens: int, form: str = "bool", lengths: Any = (PROMPT,)) -> Tensor:
    """Logits of a tree of drafts behind a prompt, and of two calls behind all of them; as if they were one text."""
    ids, padding = prompt(*lengths)
    more = prompt(*[tokens + 4] * len(lengths), seed=2)[0]
    own, depth = tree(tokens)
    call(model, cache, ids, padding)
    positions = padding.sum(dim=-1, keepdim=True) + depth
    logits = [call(model, cache, more[:, :tokens], four_dimensional(padding, own, form, model.dtype), positions)]
    for start, stop in ((tokens, tokens + 3), (tokens + 3, tokens + 4)):
        seen = torch.cat([padding, torch.ones_like(more[:, :stop])], dim=1)
        logits.append(call(model, cache, more[:, start:stop], seen, seen.cumsum(dim=-1)[:, start - stop :] - 1))
    return torch.cat(logits, dim=1)


FORMS = [("sdpa", "bool"), ("sdpa", "infinity"), ("eager", "infinity"), ("eager", "lowest"), ("eager", "-1e4")]


@pytest.mark.parametrize("lengths", [(PROMPT,), (PROMPT, 100), (PROMPT, 3)], ids=str)
@pytest.mark.parametrize("tokens", CALLS)
@pytest.mark.parametrize(("attention", "form"), FORMS)
def test_a_tree_of_drafts(attention: str, form: str, tokens: int, lengths: tuple[int, ...]) -> None:
    model = tiny(attention=attention)
    wanted, cache = verify(model, dynamic(model), tokens, form, lengths), exact(model)
    got = verify(model, cache, tokens, form, lengths)
    assert (got - wanted).abs().max() < 8 * rounding(model, prompt(PROMPT)[0]) < 1e-3
    assert cache.layers[0].store.lengths == [length + tokens + 4 for length in lengths]


def test_a_tree_of_drafts_is_read_exactly_by_default() -> None:
    """Whatever the cache leaves unread in other calls."""
    model, tokens = tiny(), 9
    wanted = verify(model, dynamic(model), tokens)[:, :tokens]
    cache = QAdACache(model, criterion="local", **SMALL)
    got = verify(model, cache, tokens)
    assert (got[:, :tokens] - wanted).abs().max() < 1e-3
    assert cache.stats().sparsity == 1.0  # of the calls behind it


@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tree_in_half_precision(dtype: torch.dtype, tokens: int) -> None:
    model = tiny(dtype=dtype, initializer_range=0.1)
    twin = tiny_like(model, torch.float64)
    true = verify(twin, dynamic(twin), tokens)
    wanted, got = (verify(model, cache, tokens).double() for cache in (dynamic(model), exact(model)))
    assert (got - true).abs().max() <= 2 * (wanted - true).abs().max()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_soft_caps_and_learned_sinks(family: str) -> None:
    model, ids, own = tiny(family, sliding_window=200), prompt(PROMPT + 9)[0], tree(9)[0]
    mask = four_dimensional(torch.ones(1, PROMPT), own, "infinity")
    logits = []
    for cache in (dynamic(model), exact(model)):
        call(model, cache, ids[:, :PROMPT])
        masks = {"full_attention": mask, "sliding_attention": mask}
        logits.append(call(model, cache, ids[:, PROMPT:], masks))
    assert (logits[1] - logits[0]).abs().max() < 1e-3


def test_blocks_of_a_long_call_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of many queries are not held at once."""
    model = tiny()
    wanted = verify(model, dynamic(model), 60)
    monkeypatch.setattr(kernels, "QUERY_BLOCK", 7)
    monkeypatch.setattr(kernels, "KEY_BLOCK", 5)
    monkeypatch.setattr(kernels, "HELD", 1)
    assert (verify(model, exact(model), 60) - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("own", ["sees the future", "to all", "not itself", "blocks"])
@pytest.mark.parametrize("tokens", [6, 30])
def test_other_masks_within_a_call(tokens: int, own: str) -> None:
    masks = {
        "sees the future": torch.ones(tokens, tokens).tril(2),
        "to all": torch.ones(tokens, tokens),
        "not itself": torch.ones(tokens, tokens) - torch.eye(tokens),
        "blocks": torch.block_diag(*[torch.ones(3, 3)] * (tokens // 3)),
    }
    model, ids = tiny(), prompt(PROMPT + tokens)[0]
    mask, logits = four_dimensional(torch.ones(1, PROMPT), masks[own].bool()), []
    for cache in (dynamic(model), exact(model)):
        call(model, cache, ids[:, :PROMPT])
        logits.append(call(model, cache, ids[:, PROMPT:], mask))
    assert (logits[1] - logits[0]).abs().max() < 1e-3


@pytest.mark.parametrize("tokens", [6, 30])
@pytest.mark.parametrize("padding_sees", ["what came before it", "nothing", "all"])
def test_padding_within_a_call_with_a_mask(padding_sees: str, tokens: int) -> None:
    """What nobody sees is not stored; what its query sees, or how tokens beside it are arranged, plays no part."""
    model, ids = tiny(), prompt(PROMPT + tokens + 1)[0]
    for own in (tree(tokens)[0], torch.ones(tokens, tokens, dtype=torch.bool).tril()):
        own = own.clone()
        own[:, 2] = False
        mask = four_dimensional(torch.ones(1, PROMPT), own)
        if padding_sees != "what came before it":
            mask[..., 2, : PROMPT + 2] = padding_sees == "all"
        logits, later = [], torch.ones(1, PROMPT + tokens + 1)
        later[0, PROMPT + 2] = 0
        for cache in (dynamic(model), ours := exact(model)):
            call(model, cache, ids[:, :PROMPT])
            parts = call(model, cache, ids[:, PROMPT:-1], mask), call(model, cache, ids[:, -1:], later)
            logits.append(torch.cat(parts, dim=1))
        assert (logits[1] - logits[0])[:, torch.arange(tokens + 1) != 2].abs().max() < 1e-3
        assert ours.layers[0].store.lengths == [PROMPT + tokens]
        with pytest.raises(ValueError, match="shows padding"):
            call(model, ours, ids[:, -1:], torch.ones(1, PROMPT + tokens + 2))


@pytest.mark.parametrize("tokens", [9, 40])
def test_drafts_that_are_not_accepted_are_cropped(tokens: int) -> None:
    """A mask that goes on hiding them is refused, and says how; the path that was accepted is given again."""
    model, ids = tiny(), prompt(PROMPT + tokens + 1)[0]
    own, depth = tree(tokens)
    cache = exact(model)
    call(model, cache, ids[:, :PROMPT])
    call(model, cache, ids[:, PROMPT:-1], four_dimensional(torch.ones(1, PROMPT), own), PROMPT + depth[None])
    path = own[-1].nonzero()[:, 0]
    later = torch.cat([torch.ones(1, PROMPT), own[-1:], torch.ones(1, 1)], dim=1)
    for mask in (later, later[:, None, None].bool()):
        with pytest.raises(ValueError, match=r"does not agree .*hides some .*cache.crop\(-n\)"):
            call(model, cache, ids[:, -1:], mask)
    cache.crop(-tokens)
    accepted = torch.cat([ids[:, :PROMPT], ids[:, PROMPT + path], ids[:, -1:]], dim=1)
    wanted = call(model, dynamic(model), accepted)[:, PROMPT:]
    assert (call(model, cache, accepted[:, PROMPT:]) - wanted).abs().max() < 1e-3


@pytest.mark.parametrize(("attention", "form"), [("sdpa", "bool"), ("eager", "lowest")])
def test_branches_in_the_first_call(attention: str, form: str) -> None:
    """Two that end a prompt see the text before them and themselves: both are stored, as by DynamicCache."""
    model, ids = tiny(attention=attention), prompt(PROMPT, PROMPT)[0]
    own = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()
    own[-1, -2] = False
    mask, logits, cache = four_dimensional(torch.ones(2, 0), own, form), [], exact(model)
    for one in (dynamic(model), cache):
        parts = call(model, one, ids, mask), *(call(model, one, ids[:, :tokens]) for tokens in (1, 4, 30))
        logits.append(torch.cat(parts, dim=1))
    assert (logits[1] - logits[0]).abs().max() < 1e-3
    assert cache.layers[1].store.lengths == [PROMPT + 35] * 2
    hides = torch.ones(2, PROMPT + 36)
    hides[:, PROMPT - 2] = 0
    with pytest.raises(ValueError, match="does not agree with the tokens already cached: it hides some"):
        call(model, cache, ids[:, :1], hides)


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
    """In words, before anything is stored."""
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
