"""A prompt that begins like one that was kept: it reads the rest, and what it answers is a whole reading's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, generate, logits_of, prompt, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qada_cache import PrefixStore, QAdACache, StaticHeads
from qada_cache.files import tensor_file
from qada_cache.prefix_store.folder import KIND
from qada_cache.prefix_store.naming import FILE_TOKENS
from qada_cache.storage.bulk_sketch import BulkSketch
from qada_cache.versions import pass_cache

EXACT: dict[str, Any] = {"threshold": 1.0, "moments": "current", **SMALL}
DECIDING: dict[str, Any] = {**EXACT, "threshold": 0.12}
DOCUMENT = 2 * FILE_TOKENS + 70


def another(store: PrefixStore) -> PrefixStore:
    """A second store of the same folder, as in another process."""
    return PrefixStore(store.folder)


def asked(document: Tensor, tokens: int, seed: int) -> Tensor:
    """A document and a question of so many tokens about it."""
    return torch.cat([document, prompt(tokens, seed=seed)[0]], dim=1)


def read(model: PreTrainedModel, ids: Tensor, cache: Any) -> None:
    with torch.no_grad():
        model(ids, **pass_cache(cache))


@pytest.mark.parametrize("options", [EXACT, {**EXACT, "sink_tokens": 2, "local_tokens": 40, "offloading": False}])
def test_a_second_question_about_a_document(
    store: PrefixStore, model: PreTrainedModel, options: dict[str, Any]
) -> None:
    document, _ = prompt(DOCUMENT)
    first, second = asked(document, 30, seed=7), asked(document, 40, seed=8)
    cache = store.cache(model, first, **EXACT)
    assert cache.get_seq_length() == 0
    out = generate(model, first, cache)
    assert store.keep(cache, out.sequences) == first.shape[1] + 23
    later = another(store)
    cache = later.cache(model, second, **options)  # what lays tokens out may differ
    assert cache.get_seq_length() == DOCUMENT
    got, wanted = generate(model, second, cache), generate(model, second, DynamicCache())
    assert torch.equal(got.sequences, wanted.sequences)
    torch.testing.assert_close(logits_of(got), logits_of(wanted), rtol=1e-4, atol=2e-4)
    found = later.stats()
    assert (found.prompts, found.hits, found.prompt_tokens, found.saved_tokens) == (1, 1, second.shape[1], DOCUMENT)


def test_it_goes_on_as_a_cache_that_was_kept(store: PrefixStore) -> None:
    """Selected tokens included."""
    model = tiny(max_position_embeddings=2048)
    document, _ = prompt(1400)
    second = asked(document, 15, seed=8)
    cache = QAdACache(model, **DECIDING)
    read(model, document, cache)
    store.keep(cache, document)
    stored = another(store).cache(model, second, **DECIDING)
    assert stored.get_seq_length() == 1400
    assert torch.equal(generate(model, second, stored).sequences, generate(model, second, cache).sequences)
    assert 0 < stored.stats().read_share < 1
    assert stored.stats().bulk_read_bytes == cache.stats().bulk_read_bytes
    for ours, theirs in zip(stored.layers, cache.layers, strict=True):
        assert torch.equal(ours.store.near_keys, theirs.store.near_keys)
        assert ours.store.bulk.lengths == theirs.store.bulk.lengths


SELECTING: dict[str, Any] = {"moments": "current", **SMALL}


@pytest.mark.parametrize("other", [{}, {"sketch_bits": 3}, {"sink_tokens": 7}])
def test_sketches_are_read_and_not_made_again(
    store: PrefixStore, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """Stored sketches are read instead of coded again, of a text that is read at once and of one that grows, by caches
    with the same coding."""
    model = tiny(max_position_embeddings=4096)
    text, _ = prompt(2900)
    cache = QAdACache(model, **SELECTING)
    for start, stop in ((0, 1300), (1300, 1500), (1500, 1530), (1530, 2000), (2000, 2900)):
        read(model, text[:, start:stop], cache)
        store.keep(cache, text[:, :stop])
    wanted = QAdACache(model, **{**SELECTING, **other})
    read(model, text[:, :2899], wanted)
    coded, original = [], BulkSketch.code_keys

    def code_keys(sketch: BulkSketch, keys: Tensor) -> Any:
        coded.append(keys.shape[:-1].numel())
        return original(sketch, keys)

    monkeypatch.setattr(BulkSketch, "code_keys", code_keys)
    got = store.cache(model, text, **{**SELECTING, **other})
    assert got.get_seq_length() == 2899
    assert sum(coded) < (2 if other else 1) * 2 * 2 * 2899
    assert bool(other) == (sum(coded) > 2 * 2 * 1600)
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        mine, yours = ours.store.sketch.record, theirs.store.sketch.record
        assert mine["sketch_lengths"] == yours["sketch_lengths"]
        for name in ("codes", "scales", "order"):  # the text was read in other pieces
            assert (mine[name] == yours[name]).float().mean() > 0.98, name
        for name in ("units", "mean_squares", "mean_key", "mean_value", "value_key_covariance"):
            torch.testing.assert_close(mine[name], yours[name], rtol=1e-3, atol=1e-4)


def test_forged_sketches(store: PrefixStore, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny(max_position_embeddings=4096)
    text, _ = prompt(1400)
    cache = QAdACache(model, **SELECTING)
    read(model, text, cache)
    for place, (name, forged) in enumerate(
        {
            "order 0": lambda order: torch.full_like(order, 200),
            "codes 1": lambda codes: codes[:, :, 1:].clone(),
            "centres 0": lambda centres: centres.float(),
        }.items()
    ):
        store.keep(cache, text)
        file = next(file for file in Path(str(store.folder)).iterdir() if "-000002-" in file.name)
        tensors, state = tensor_file.read(file, KIND)
        tensors[name] = forged(tensors[name])
        tensor_file.write(file, KIND, tensors, state)
        assert store.cache(model, text, **SELECTING).get_seq_length() == 2 * FILE_TOKENS
        assert caplog.text.count("another shape or dtype") == place + 1


@pytest.mark.parametrize("tokens", [1, 40, FILE_TOKENS, FILE_TOKENS + 1, DOCUMENT])
def test_the_last_token_is_left(store: PrefixStore, model: PreTrainedModel, tokens: int) -> None:
    document, _ = prompt(DOCUMENT)
    cache = QAdACache(model, **EXACT)
    read(model, document, cache)
    store.keep(cache, document[0])
    assert store.cache(model, document[:, :tokens], **EXACT).get_seq_length() == tokens - 1
    assert store.cache(model, document[0, :tokens].tolist(), **EXACT).get_seq_length() == tokens - 1


def test_the_longest_beginning_counts(store: PrefixStore, model: PreTrainedModel) -> None:
    long, _ = prompt(DOCUMENT)
    for length in (100, FILE_TOKENS + 90, 40):
        ids = asked(long[:, :length], 20, seed=length)
        cache = QAdACache(model, **EXACT)
        read(model, ids, cache)
        store.keep(cache, ids)
    assert store.cache(model, long, **EXACT).get_seq_length() == FILE_TOKENS + 90
    assert store.cache(model, prompt(50, seed=77)[0], **EXACT).get_seq_length() == 0
    hardly_alike = asked(long[:, :31], 50, seed=9)  # a file takes longer
    assert store.cache(model, hardly_alike, **EXACT).get_seq_length() == 0


def test_a_turn_writes_what_is_new(store: PrefixStore, model: PreTrainedModel) -> None:
    """A turn writes its new tokens alone, and a common beginning of texts is stored once."""
    text, _ = prompt(DOCUMENT)
    cache = QAdACache(model, **EXACT)
    read(model, text, cache)
    store.keep(cache, text)
    whole = store.stats()
    assert whole.segments == 3
    assert whole.written_bytes == whole.bytes == sum(path.stat().st_size for path in store.folder.iterdir())
    store.keep(cache, text)
    assert store.stats() == whole
    longer = asked(text, 50, seed=3)
    read(model, longer[:, DOCUMENT:], cache)
    store.keep(cache, longer)
    later = store.stats()
    assert later.segments == 3  # the shorter last segment went
    assert later.written_bytes - whole.written_bytes < 0.3 * whole.bytes
    cache.crop(-50)
    store.keep(cache, text)  # is there, as a part of the longer one
    assert store.stats() == later
    other = asked(text[:, : 2 * FILE_TOKENS], 50, seed=4)
    cache = QAdACache(model, **EXACT)
    read(model, other, cache)
    store.keep(cache, other)
    assert store.stats().segments == 4


def test_decoded_tokens_are_for_caches_that_decide_alike(store: PrefixStore, model: PreTrainedModel) -> None:
    text, _ = prompt(300)
    cache = QAdACache(model, **DECIDING)
    out = generate(model, text, cache).sequences
    held = cache.get_seq_length()
    assert store.keep(cache, out) == held == 323

    def found(**options: Any) -> int:
        return another(store).cache(model, asked(out, 9, seed=5), **{**DECIDING, **options}).get_seq_length()

    assert found() == held
    assert found(offloading=False, audit_every=3) == held
    for other in (
        *({"threshold": 0.13}, {"local_tokens": 21}, {"group_rule": "head"}, {"moments": "random-tokens"}),
        *({"criterion": StaticHeads(torch.ones(2, 2, dtype=torch.bool))}, {"threshold": 1.0}),
    ):
        assert found(**other) == 300
    exact = QAdACache(model, **EXACT)
    read(model, out, exact)
    store.keep(exact, out)
    assert found(threshold=0.13) == found() == out.shape[1]


def test_a_file_that_another_process_replaced_is_looked_at_again(store: PrefixStore, model: PreTrainedModel) -> None:
    """It has the same name, and fewer of its tokens were read exactly."""
    text, other = prompt(120)[0], another(store)

    def keep(where: PrefixStore, exact: int) -> None:
        cache = QAdACache(model, **DECIDING)
        read(model, text[:, :exact], cache)
        for at in range(exact, 120):
            read(model, text[:, at : at + 1], cache)
        where.keep(cache, text)

    def found(where: PrefixStore) -> int:
        return where.cache(model, asked(text, 9, seed=5), **EXACT).get_seq_length()

    keep(store, 100)
    assert found(store) == found(other) == 100
    other.drop()
    keep(other, 40)
    assert found(store) <= 40
    assert found(store) == 40


def test_an_exact_reading_leaves_whole_segments_of_decided_tokens(store: PrefixStore, model: PreTrainedModel) -> None:
    """Caches that decide alike find all of them."""
    cache = QAdACache(model, **DECIDING)
    out = generate(model, prompt(100)[0], cache, tokens=600).sequences
    assert store.keep(cache, out) == 699
    exact = QAdACache(model, **EXACT)
    read(model, out[:, :530], exact)
    assert store.keep(exact, out[:, :530]) == 530
    found = (another(store).cache(model, asked(out, 9, seed=5), **options) for options in (DECIDING, EXACT))
    assert [each.get_seq_length() for each in found] == [699, 530]


def test_a_fork_keeps_no_tokens_that_were_decided_otherwise(store: PrefixStore, model: PreTrainedModel) -> None:
    text, _ = prompt(300)
    cache = QAdACache(model, **DECIDING)
    out = generate(model, text, cache).sequences
    assert store.keep(cache.fork(threshold=0.5), out) == 300
    assert store.keep(copy.deepcopy(cache), out) == 323
    cache.crop(-24)
    fork = cache.fork(threshold=0.5)
    assert store.keep(fork, generate(model, text, fork).sequences) == 323


def test_what_was_read_exactly_outlives_files_and_copies(
    store: PrefixStore, model: PreTrainedModel, tmp_path: Path
) -> None:
    text, _ = prompt(300)
    cache = QAdACache(model, **DECIDING)
    out = generate(model, text, cache).sequences
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", model)
    assert store.keep(loaded, out) == 323
    assert store.keep(loaded.fork(threshold=0.5), out) == 300
    loaded.batch_repeat_interleave(2)
    assert store.keep(loaded, out.repeat(2, 1)) == 646


def test_owners(store: PrefixStore, model: PreTrainedModel) -> None:
    text, _ = prompt(300)
    cache = QAdACache(model, **EXACT)
    read(model, text, cache)
    store.keep(cache, text, key="tenant 7")
    assert store.cache(model, text, **EXACT).get_seq_length() == 0
    assert store.cache(model, text, key="tenant 8", **EXACT).get_seq_length() == 0
    assert store.cache(model, text, key="tenant 7", **EXACT).get_seq_length() == 299
    assert "tenant" not in "".join(path.read_bytes().decode("latin1") for path in store.folder.iterdir())


@pytest.mark.parametrize("other", [{"seed": 1}, {"dtype": torch.bfloat16}, {"rms_norm_eps": 0.1}])
def test_other_models(store: PrefixStore, model: PreTrainedModel, other: dict[str, Any]) -> None:
    text, _ = prompt(300)
    cache = QAdACache(model, **EXACT)
    read(model, text, cache)
    store.keep(cache, text)
    assert store.cache(tiny(**other), text, **EXACT).get_seq_length() == 0
    assert store.cache(tiny(), text, **EXACT).get_seq_length() == 299


def test_adapters_tell_prompts_apart(
    store: PrefixStore, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As peft's layers name them."""
    text, _ = prompt(300)
    layer: Any = model.get_submodule("model.layers.0.self_attn.k_proj")
    for name, value in (("merged_adapters", []), ("active_adapters", ["one"]), ("scaling", {"one": 2.0})):
        monkeypatch.setattr(layer, name, value, raising=False)
    cache = QAdACache(model, **EXACT)
    read(model, text, cache)
    store.keep(cache, text)
    assert store.cache(model, text, **EXACT).get_seq_length() == 299
    layer.active_adapters = ["other"]
    assert store.cache(model, text, **EXACT).get_seq_length() == 0
