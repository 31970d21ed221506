"""Masks `[batch, 1, queries, tokens]` of a user's own or of image models, against DynamicCache's logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import SMALL, dynamic, exact, generate, prompt, rounding, tiny, tiny_like
from torch import Tensor
from transformers import Cache, PreTrainedModel

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


@pytest.mark.parametrize(
    ("attention", "form", "tokens", "lengths"),
    [
        *((*form, CALLS[0], (PROMPT, 100)) for form in FORMS),
        *((*FORMS[0], tokens, lengths) for tokens in CALLS for lengths in ((PROMPT,), (PROMPT, 100), (PROMPT, 3))),
    ],
)
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
    monkeypatch.setattr(kernels, "MAX_BLOCK_NUMBERS", 1)
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
    """A token that no query sees is not stored, whatever its own query sees, and however other tokens are masked."""
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


@pytest.mark.parametrize(("tokens", "padding"), [(60, 20), (60, 60), (12, 5), (12, 12)])
@pytest.mark.parametrize("family", ["llama", "gemma3n", "gemma4", "gpt_oss", "deepseek_v3", "diffllama"])
@torch.inference_mode()
def test_turns_that_end_in_padding(family: str, tokens: int, padding: int) -> None:
    """From a row's last position `generate` goes on as with DynamicCache."""
    model, (ids, mask) = tiny(family), prompt(PROMPT + tokens, PROMPT - 10 + tokens)
    mask[1, -padding:] = 0
    logits = []
    for cache in (exact(model, moments="current"), dynamic(model)):
        model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], **pass_cache(cache))
        out = generate(model, ids, cache, tokens=3, attention_mask=mask)
        logits.append(torch.stack(out.logits))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize("least", [0, 1])
@torch.inference_mode()
def test_branching_turns_that_end_in_padding(least: int) -> None:
    """As above, where the first new tokens see each other."""
    model, (ids, mask) = tiny(), prompt(PROMPT + 12, PROMPT + 2)
    mask[1, -5:] = 0
    seen = (
        mask.bool()[:, None, None] & torch.ones(1, 1, PROMPT + 12, PROMPT + 12, dtype=torch.bool).tril()[:, :, PROMPT:]
    )
    seen[..., :4, PROMPT : PROMPT + 4] = True
    logits = []
    for cache in (exact(model, moments="current"), dynamic(model)):
        model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], **pass_cache(cache))
        options = {"attention_mask": seen, "logits_to_keep": least, **pass_cache(cache)}
        logits.append(model(ids[:, PROMPT:], **options).logits[:, -1])
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)
