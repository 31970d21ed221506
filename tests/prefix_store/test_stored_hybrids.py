"""Prompts of models with sliding and linear layers: a later one begins at the last stored states within what it has in
common with earlier ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import SMALL, forced, generate, logits_of, prompt, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from eval import families
from qada_cache import PrefixStore, QAdACache
from qada_cache.versions import pass_cache

EXACT: dict[str, Any] = {"threshold": 1.0, "moments": "current", **SMALL}
HYBRIDS = ("gemma3", "qwen3_next", "gpt_oss")
DOCUMENT = prompt(700)[0]


@pytest.fixture
def store(store: PrefixStore) -> PrefixStore:
    return PrefixStore(store.folder, snapshot_tokens=64)


def another(store: PrefixStore) -> PrefixStore:
    """A second store of the same folder, as in another process."""
    return PrefixStore(store.folder, snapshot_tokens=64)


def asked(text: Tensor, tokens: int, seed: int) -> Tensor:
    return torch.cat([text, prompt(tokens, seed=seed)[0]], dim=1)


def answer(store: PrefixStore, model: PreTrainedModel, ids: Tensor, **options: Any) -> tuple[Tensor, int]:
    """The whole text, as `DynamicCache` goes on with it, and how many of its tokens were not read again."""
    cache = store.cache(model, ids, **EXACT, **options)
    held = cache.get_seq_length()
    got, wanted = (
        generate(model, ids, cache, tokens=8),
        generate(model, ids, DynamicCache(config=model.config), tokens=8),
    )
    assert torch.equal(got.sequences, wanted.sequences)
    assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-3 * logits_of(wanted).abs().max()
    assert store.keep(cache, got.sequences) == ids.shape[1] + 7
    return got.sequences, held


@pytest.mark.parametrize("family", HYBRIDS)
def test_questions_turns_and_edits(store: PrefixStore, family: str) -> None:
    model = tiny(family)
    first, held = answer(store, model, asked(DOCUMENT, 30, seed=7))
    assert held == 0
    _, held = answer(another(store), model, asked(DOCUMENT, 40, seed=8))
    assert 700 - 64 - 30 <= held <= 700  # another question
    second, held = answer(another(store), model, asked(first, 20, seed=9))
    assert held == first.shape[1] - 1  # the next turn
    _, held = answer(another(store), model, asked(second, 20, seed=9))
    assert held == second.shape[1] - 1
    edited = second.clone()
    edited[0, -50] += 1
    _, held = answer(another(store), model, asked(edited, 10, seed=3))
    assert second.shape[1] - 50 - 64 <= held <= second.shape[1] - 50
    later = another(store)
    assert (
        later.count(model, asked(second, 5, seed=2)[0].tolist(), **EXACT)
        == later.cache(model, asked(second, 5, seed=2), **EXACT).get_seq_length()
    )
    whole, wrong = later.verify()
    assert whole
    assert not wrong


def test_caches_whose_heads_decide(store: PrefixStore) -> None:
    """States behind decoded tokens are for caches of the same options; a fork's are not kept."""
    model, options = tiny("qwen3_next"), {**EXACT, "threshold": 0.3}
    cache = store.cache(model, DOCUMENT, **options)
    text = generate(model, DOCUMENT, cache, tokens=40).sequences
    fork = copy.deepcopy(cache).fork(threshold=0.2)
    store.keep(cache, text)
    assert another(store).cache(model, asked(text, 5, seed=2), **options).get_seq_length() == 739
    assert another(store).cache(model, asked(text, 5, seed=2), **EXACT).get_seq_length() == 700
    after = generate(model, asked(text, 9, seed=4), fork, tokens=5).sequences
    before = store.stats().segments
    store.keep(fork, after)
    assert store.stats().segments == before
    wanted = generate(model, asked(text, 9, seed=4), cache, tokens=5).sequences
    got = another(store).cache(model, asked(text, 9, seed=4), **options)
    assert torch.equal(generate(model, asked(text, 9, seed=4), got, tokens=5).sequences, wanted)


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3", "llama"])
def test_the_next_turn_is_that_of_one_process(store: PrefixStore, family: str) -> None:
    """A next turn from stored files answers as the cache that wrote them. Decoded tokens, which waited beside the
    window there, are in the bulk here, by which heads decide and from which they select."""
    model, text = tiny(family, max_position_embeddings=2048), prompt(1100)[0]
    options = {**EXACT, "threshold": 0.999}
    cache = store.cache(model, text, **options)
    first = generate(model, text, cache, tokens=40).sequences
    store.keep(cache, first)
    following = prompt(30, seed=2)[0]
    found = another(store).cache(model, asked(first, 9, seed=3), **options)
    assert found.get_seq_length() == cache.get_seq_length() == 1139
    wanted = forced(model, following, [9, 1], cache)
    assert cache.stats().sketch_read_bytes > 0
    assert (forced(model, following, [9, 1], found) - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_a_cache_of_the_user(store: PrefixStore) -> None:
    """It left no states on its way; those behind all of its tokens are stored."""
    model = tiny("gemma3")
    cache = QAdACache(model, **EXACT)
    text = generate(model, DOCUMENT, cache, tokens=4).sequences
    store.keep(cache, text)
    assert store.cache(model, asked(text, 5, seed=2), **EXACT).get_seq_length() == 703
    assert store.cache(model, asked(text[:, :500], 5, seed=2), **EXACT).get_seq_length() == 0


@pytest.mark.parametrize("model_type", ["bamba", "jamba", "llama4_text"])
def test_passes_without_generate(store: PrefixStore, model_type: str) -> None:
    """Bamba begins to count positions anew in each, Jamba forgets its states and is refused, and Llama 4 does not say
    which of its parts is the decoder."""
    model, _ = families.build(model_type)
    text, options = DOCUMENT[:, :400].clamp(5, 90), EXACT
    wanted = forced(model, text, [400], DynamicCache(config=model.config))
    if model_type == "jamba":
        with pytest.raises(NotImplementedError, match="linear layers forget their states"):
            store.cache(model, text, **options)
        return
    cache = store.cache(model, text, **options)
    got = forced(model, text, [400], cache)
    assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert len(cache.take_snapshots()) > 2
    store.keep(cache, text)
    assert another(store).cache(model, text, **options).get_seq_length() == 400 - 64


def test_llama4_that_reads_images(store: PrefixStore) -> None:
    """Shortened passes go to the model within `language_model`, which transformers calls the decoder though it has a
    head."""
    config = families.make_tiny_config(transformers.Llama4Config)
    model = transformers.Llama4ForConditionalGeneration._from_config(config).eval()
    store.cache(model, DOCUMENT, **EXACT)
    assert hasattr(type(model.language_model.model), "_qada_own")
    assert not hasattr(type(model.language_model), "_qada_own")


def test_batches_are_read_whole(store: PrefixStore) -> None:
    model = tiny("gemma3")
    answer(store, model, DOCUMENT)
    ids, mask = prompt(60, 41)
    ids[0] = DOCUMENT[0, :60]
    cache = store.cache(model, ids, attention_mask=mask, **EXACT)
    assert cache.get_seq_length() == 0
    out = generate(model, ids, cache, attention_mask=mask, tokens=3)
    with pytest.raises(NotImplementedError, match=r"keeps no batches of gemma3_text.*rows one by one"):
        store.keep(cache, out.sequences)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_damaged_states_cost_time_only(store: PrefixStore, family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny(family)
    answer(store, model, DOCUMENT)
    with store._open() as folder:
        states = [name for name in folder.list().files if folder.read_header(name).has_states]
    (last,) = (name for name in states if 256 * name.number + len(folder._headers[name].tokens) == 700)
    path = store.folder / str(last)
    content = bytearray(path.read_bytes())
    content[-5] ^= 64
    path.write_bytes(content)
    _, held = answer(another(store), model, asked(DOCUMENT, 9, seed=2))
    assert 700 - 2 * 64 <= held < 700
    assert "a stored prompt is read again" in caplog.text
    assert len(states) < 12


def test_a_segment_that_others_can_write_to(store: PrefixStore, caplog: pytest.LogCaptureFixture) -> None:
    """Headers are read before segments where states are needed."""
    model = tiny("qwen3_next")
    text, _ = answer(store, model, DOCUMENT)
    with store._open() as folder:
        listing = folder.list()
        (second,) = (n for n in listing.files if n.number == 1 and not folder.read_header(n).has_states)
    (store.folder / str(second)).chmod(0o666)
    _, held = answer(another(store), model, asked(text, 9, seed=2))
    assert held <= 256
    assert "read again from segment 1 on" in caplog.text


def test_states_of_other_layers_are_not_used(store: PrefixStore, caplog: pytest.LogCaptureFixture) -> None:
    """A file that says something else of the layers than they can hold, as that of another version of transformers may:
    the states before it are used, and its own can be stored again."""
    model = tiny("gemma3")
    cache = store.cache(model, DOCUMENT, **EXACT)
    text = generate(model, DOCUMENT, cache, tokens=2).sequences
    cache.layers[0].sliding_window += 1  # as no file of this model has it
    store.keep(cache, text)
    damaged, files = another(store), {*store.folder.iterdir()}
    assert damaged.cache(model, asked(text, 9, seed=2), **EXACT).get_seq_length() == 700
    (name,) = (path.name for path in files - {*store.folder.iterdir()})
    cache.layers[0].sliding_window -= 1
    store.keep(cache, text)
    assert another(store).cache(model, asked(text, 9, seed=2), **EXACT).get_seq_length() == text.shape[1] - 1
    assert (
        f"the states in {name} cannot be used: a DynamicSlidingWindowLayer cannot hold sliding_window of 13"
        in caplog.text
    )


def test_no_room(store: PrefixStore, caplog: pytest.LogCaptureFixture) -> None:
    """Within `max_bytes`, whatever that is."""
    model = tiny("qwen3_next")
    for size in (0, 30_000, 120_000):
        small = PrefixStore(store.folder, max_bytes=size, snapshot_tokens=64)
        cache = small.cache(model, DOCUMENT, **EXACT)
        small.keep(cache, generate(model, DOCUMENT, cache, tokens=2).sequences)
        assert small.stats().bytes <= size
        text = asked(DOCUMENT, 9, seed=2)
        got = generate(model, text, small.cache(model, text, **EXACT), tokens=4).sequences
        assert torch.equal(got, generate(model, text, None, tokens=4).sequences)


@pytest.mark.parametrize("bits", [16, 8])
def test_states_take_no_room_of_their_tokens(store: PrefixStore, tmp_path: Path, bits: int) -> None:
    """All tokens that `keep` reports are kept, even without room for all of their states."""
    model = tiny("gemma3")
    cache = store.cache(model, DOCUMENT, **EXACT, bulk_bits=bits)
    text = generate(model, DOCUMENT, cache, tokens=2).sequences
    assert store.keep(cache, text) == 701
    small = PrefixStore(tmp_path / "small", max_bytes=store.stats().bytes - 1)
    assert small.keep(cache, text) == 701
    with small._open() as folder:
        headers = [folder.read_header(name) for name in folder.list().files]
    assert sum(len(header.tokens) for header in headers if not header.has_states) == 701
    got = PrefixStore(tmp_path / "small").cache(model, asked(text, 5, seed=2), **EXACT, bulk_bits=bits)
    assert got.get_seq_length() == 701  # by the newest states, which a next turn needs


def test_few_bits(store: PrefixStore) -> None:
    """States lie between segments in few bits, too, and are not written again when a segment closes. Caches in other
    bits do not find them."""
    model, text = tiny("qwen3_next", max_position_embeddings=4096), prompt(1700)[0]
    options = {**EXACT, "bulk_bits": 8}
    cache = store.cache(model, text, **options)
    first = generate(model, text, cache, tokens=4).sequences
    assert store.keep(cache, first) == 1703
    for cut, held in ((1703, 1703), (1690, 1700 - 64), (1200, 0)):
        longer = asked(first[:, :cut], 30, seed=5)
        got = another(store).cache(model, longer, **options)
        assert got.get_seq_length() == held
        if not held:
            continue
        cropped = copy.deepcopy(cache)
        if surplus := cropped.get_seq_length() - got.get_seq_length():
            cropped.crop(-surplus)
        wanted = generate(model, longer, cropped, tokens=5).sequences
        assert torch.equal(generate(model, longer, got, tokens=5).sequences, wanted)
        assert another(store).cache(model, longer, **EXACT).get_seq_length() == 0
    later = asked(first, 500, seed=3)
    later = generate(model, later, cache, tokens=2).sequences
    store.keep(cache, later)
    with store._open() as folder:
        headers = [folder.read_header(name) for name in folder.list().files]
    behind = [tuple(header.tokens[-9:]) for header in headers if header.has_states]
    assert len(behind) == len({*behind}) > 3
    assert another(store).cache(model, later, **options).get_seq_length() > 1703
    assert store.verify()[1] == []


@pytest.mark.parametrize("kind", ["Gemma3", "Gemma4"])
@pytest.mark.parametrize("marked", [False, True])
def test_texts_of_models_that_read_images(store: PrefixStore, kind: str, marked: bool) -> None:
    """Which hand their decoder masks that are made already, perhaps of which tokens are images, and inputs by layer."""
    config = families.make_tiny_config(getattr(transformers, f"{kind}Config"))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config).eval()
    name = "token_type_ids" if kind == "Gemma3" else "mm_token_type_ids"
    document = DOCUMENT % 70 + 20
    for seed, least in ((7, 0), (8, 700 - 64 - 30)):
        ids = torch.cat([document, document[:, seed : seed + 30]], dim=1)
        told = {"eos_token_id": None} | ({name: torch.zeros_like(ids)} if marked else {})
        cache = store.cache(model, ids, **EXACT)
        assert least <= cache.get_seq_length() <= 700
        got, wanted = (generate(model, ids, each, tokens=8, **told) for each in (cache, None))
        assert torch.equal(got.sequences, wanted.sequences)
        assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-3 * logits_of(wanted).abs().max()
        store.keep(cache, got.sequences)


def test_states_read_in_inference_mode_can_be_gone_on_with(store: PrefixStore) -> None:
    """Outside of it, where linear layers write to them in place."""
    model = tiny("qwen3_next")
    text, _ = answer(store, model, asked(DOCUMENT, 30, seed=7))
    with torch.inference_mode():
        cache = another(store).cache(model, text, **EXACT)
    held = cache.get_seq_length()
    assert held >= 700
    with torch.no_grad():
        model(text[:, held : held + 1], **pass_cache(cache))
