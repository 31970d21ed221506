"""Models whose own indexer picks tokens. Its keys are stored beside latents, in 16, 8 and 4 bits: what is picked
decides every later token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import INDEXED, assert_near, make_indexed
from models import SMALL, dynamic, forced, generate, logits_of, prompt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from qada_cache import PrefixStore, QAdACache
from qada_cache.attention import pieces
from qada_cache.files import tensor_file
from qada_cache.models.latent import find_indexer_dim
from qada_cache.prefix_store.folder import CODED, KIND
from qada_cache.prefix_store.naming import FILE_TOKENS
from qada_cache.versions import pass_cache

OPTIONS: dict[str, Any] = {"threshold": 1.0, **SMALL}
# With fewer heads many tokens score 0 in an indexer, and its picks among these depend on how they are read.
HEADS = 64
DOCUMENT = FILE_TOKENS + 70


@pytest.fixture(params=INDEXED)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_indexed(request.param, index_n_heads=HEADS, max_position_embeddings=2048)


def another(store: PrefixStore) -> PrefixStore:
    """A second store of the same folder, as in another process."""
    return PrefixStore(store.folder)


def asked(document: Tensor, tokens: int, seed: int) -> Tensor:
    return torch.cat([document, prompt(tokens, seed=seed)[0]], dim=1)


def keep(store: PrefixStore, model: PreTrainedModel, text: Tensor, **options: Any) -> QAdACache:
    cache = store.cache(model, text, **OPTIONS, **options)
    forced(model, text[:, cache.get_seq_length() :], [text.shape[1]], cache)
    assert store.keep(cache, text) == text.numel()
    return cache


def check_held_alike(one: QAdACache, other: QAdACache) -> None:
    """Bit for bit."""
    for mine, yours in zip(one.layers, other.layers, strict=True):
        assert mine.store.lengths == yours.store.lengths
        spans = (slice(0, 1), 0, mine.store.lengths[0])
        assert torch.equal(mine.store.copy_tokens(*spans)[0], yours.store.copy_tokens(*spans)[0])
        assert mine.beside.keys() == yours.beside.keys()
        assert all(torch.equal(part, yours.beside[name]) for name, part in mine.beside.items())


@pytest.mark.parametrize("few", [False, True])
def test_other_questions_and_an_edit(store: PrefixStore, model: PreTrainedModel, few: bool) -> None:
    """As the cache answers that has read the text, and in 16 bits as any does."""
    bits, tokens = ({"deepseek_v32": 8}.get(model.config.model_type, 4), 1250) if few else (16, DOCUMENT)
    text = prompt(tokens)[0]
    cache = keep(store, model, text, bulk_bits=bits)
    own = [find_indexer_dim(model.config, layer.index) > 0 for layer in cache.layers]
    assert [bool(layer.beside) for layer in cache.layers] == own
    for held in (tokens, tokens - 40, 290):
        text_then = asked(torch.cat([text[:, :held], text[:, held : held + 1] % 90 + 1], dim=1), 20, seed=held)
        got = another(store).cache(model, text_then, **OPTIONS, bulk_bits=bits)
        assert got.get_seq_length() == held
        wanted = copy.deepcopy(cache)
        wanted.crop(held - tokens)
        check_held_alike(got, wanted)
        answer = generate(model, text_then, got, tokens=6)
        for each in (wanted, dynamic(model)) if bits == 16 else (wanted,):
            other = generate(model, text_then, each, tokens=6)
            assert torch.equal(answer.sequences, other.sequences)
            assert_near(model, logits_of(answer), logits_of(other))
        check_held_alike(got, wanted)


def test_a_text_that_grows(store: PrefixStore, model: PreTrainedModel) -> None:
    """A text grows by decoded tokens too. A cache in few bits finds the tokens that one in 16 has stored."""
    cache = QAdACache(model, **OPTIONS)
    out = generate(model, prompt(DOCUMENT)[0], cache, tokens=12).sequences
    assert store.keep(cache, out) == DOCUMENT + 11
    text = asked(out, 30, seed=4)
    for bits, held in ((16, DOCUMENT + 11), (8, DOCUMENT + 41)):
        got = another(store).cache(model, text, **OPTIONS, bulk_bits=bits)
        assert got.get_seq_length() == held
        forced(model, text[:, held:], [30], got)
        assert another(store).keep(got, text) == text.shape[1]
        check_held_alike(another(store).cache(model, asked(text, 1, 1), **OPTIONS, bulk_bits=bits), got)
    assert store.verify() == (store.stats().segments, [])


def test_rows(store: PrefixStore, model: PreTrainedModel) -> None:
    """Stored together, and found by rows with padding, which then are not kept."""
    documents = torch.cat([prompt(DOCUMENT, seed=seed)[0] for seed in (2, 3)])
    keep(store, model, documents)
    texts = [asked(documents[row : row + 1], tokens, seed=9)[0] for row, tokens in ((1, 30), (0, 12), (1, 25))]
    ids, mask = (pad_sequence(row, True, padding_side="left") for row in (texts, [torch.ones_like(t) for t in texts]))
    cache = store.cache(model, ids, attention_mask=mask, **OPTIONS)
    assert cache.get_seq_length() == DOCUMENT
    assert store.stats().saved_tokens == 3 * DOCUMENT - 23
    got, wanted = (generate(model, ids, each, attention_mask=mask) for each in (cache, dynamic(model)))
    assert torch.equal(got.sequences, wanted.sequences)
    assert_near(model, logits_of(got), logits_of(wanted))
    with pytest.raises(NotImplementedError, match="with padding"):
        store.keep(cache, got.sequences)
    assert store.keep_rows(cache, {row: text.tolist() for row, text in enumerate(texts)}) == DOCUMENT


@torch.no_grad()
def test_tokens_that_a_mask_hides_are_not_kept(store: PrefixStore, model: PreTrainedModel) -> None:
    """Tokens are kept up to the call whose mask may hide some: an indexer's picks do not say which."""
    ids, mask = prompt(60, 50)
    cache = QAdACache(model, **OPTIONS)
    forced(model, ids, [60], cache, mask)
    with pytest.raises(NotImplementedError, match="none whose mask was the caller's own, or compiled"):
        store.keep(cache, ids)
    ids, mask = ids[:1], mask[:1].clone()
    mask[:, 45:50] = 0
    cache = QAdACache(model, **OPTIONS)
    forced(model, ids, [40, 20], cache, mask)
    assert store.keep(cache, ids) == 40
    cache.crop(-20)
    forced(model, ids[:, 40:], [19, 1], cache)
    assert store.keep(cache, ids) == 60
    cache.crop(-10)
    told = torch.zeros(1, 1, 10, 60).masked_fill(torch.ones(10, 60).triu(51).bool(), -torch.inf)
    model(ids[:, 50:], attention_mask=told, **pass_cache(cache))  # which may hide any
    assert another(store).keep(cache, ids % 90 + 1) == 50
    cache.crop(-60)
    assert store.keep(cache, ids) == 0


@torch.no_grad()
@pytest.mark.parametrize("how", ["by the caller", "for a refused call", "for an interrupted pass", "before layers"])
def test_a_mask_that_was_made_before_says_nothing_of_one_that_is_given(
    store: PrefixStore, model: PreTrainedModel, how: str
) -> None:
    """Though it is for as many tokens, and hid none of them."""
    ids, cache = prompt(60)[0], QAdACache(model, **OPTIONS)
    if how == "by the caller":
        told: dict[str, Any] = {"attention_mask": None, "position_ids": None, **pass_cache(cache)}
        create_causal_mask(model.config, model.get_input_embeddings()(ids), allow_is_causal_skip=False, **told)
    elif how == "for a refused call":
        with pytest.raises(NotImplementedError, match="cannot return attention weights"):
            model(ids, output_attentions=True, **pass_cache(cache))
    else:
        reached = how == "for an interrupted pass"
        stop = model.model.layers[reached].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids, **pass_cache(cache))
        stop.remove()
        if reached:
            cache.reset()
    hiding = torch.zeros(1, 1, 60, 60).masked_fill(torch.ones(60, 60).triu(1).bool(), -torch.inf)
    hiding[..., 50:, 45:50] = -torch.inf
    model(ids, attention_mask=hiding, **pass_cache(cache))
    with pytest.raises(NotImplementedError, match="none whose mask was the caller's own"):
        store.keep(cache, ids)


FORGERIES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "none": lambda tensors: tensors.pop("indexer_keys 0"),
    "narrower": lambda tensors: tensors.update({"indexer_keys 0": tensors["indexer_keys 0"][..., 1:].clone()}),
    "fewer": lambda tensors: tensors.update({"indexer_keys 0": tensors["indexer_keys 0"][:, 1:].clone()}),
    "in int64": lambda tensors: tensors.update({"indexer_keys 0": tensors["indexer_keys 0"].long()}),
    "flat": lambda tensors: tensors.update({"indexer_keys 0": tensors["indexer_keys 0"][0].clone()}),
    "of a layer that has none": lambda tensors: tensors.update({"indexer_keys 1": tensors["indexer_keys 0"].clone()}),
    "of no layer": lambda tensors: tensors.update({"indexer_keys 7": tensors["indexer_keys 0"].clone()}),
}


@pytest.mark.parametrize("bits", [16, 8])
def test_forged_keys_of_indexers(store: PrefixStore, bits: int, caplog: pytest.LogCaptureFixture) -> None:
    model = make_indexed("HYV4", max_position_embeddings=2048)
    text = prompt(1250)[0]
    cache = keep(store, model, text, bulk_bits=bits)
    file = next(file for file in Path(str(store.folder)).iterdir() if "-000001-" in file.name)
    _, state = tensor_file.read(file, KIND)
    assert state["sketch"] == (CODED if bits < 16 else "")
    for forge in FORGERIES.values():
        tensors, state = tensor_file.read(file, KIND)
        forge(tensors)
        tensor_file.write(file, KIND, tensors, state)
        caplog.clear()
        got = another(store).cache(model, text, **OPTIONS, bulk_bits=bits)
        assert got.get_seq_length() == (FILE_TOKENS if bits == 16 else 516)
        assert "read again from segment 1 on" in caplog.text
        assert store.keep(cache, text) == 1250


def test_masks_by_type_of_layer() -> None:
    """As some models hand them to their decoder: a pass in pieces goes by what hides tokens, or is none."""
    mask, ids = torch.ones(1, 9), {"input_ids": torch.ones(1, 9)}
    for given, wanted in (({"indexed_attention": mask}, mask), (others := {"linear_attention": mask}, others)):
        assert pieces._find_plain({**ids, "attention_mask": given}, 9) is wanted
