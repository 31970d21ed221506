"""Caches in 8 and 4 bits, stored as they are held."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import generate, prompt, tiny
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import KeyMoments, PrefixStore, QAdACache
from qada_cache.prefix_store.folder import CODED
from qada_cache.storage.coded_bulk import CodedBulk
from qada_cache.versions import pass_cache

OPTIONS: dict[str, Any] = {"moments": "current", "sink_tokens": 4, "local_tokens": 20, "bulk_bits": 8}
TEXT = prompt(2100)[0]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(max_position_embeddings=4096)


def another(store: PrefixStore) -> PrefixStore:
    """A second store of the same folder, as in another process."""
    return PrefixStore(store.folder)


def read(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **pass_cache(cache)).logits[0, -1]


def bulks(cache: QAdACache) -> list[CodedBulk]:
    return [layer.store.bulk for layer in cache.layers]


@pytest.mark.parametrize("first", [516, 1028])
def test_an_open_end_of_one_segment_hides_no_later_ones(store: PrefixStore, model: PreTrainedModel, first: int) -> None:
    """Its tokens are a closed segment's by then, in a file of the same name."""
    cache = store.cache(model, TEXT, **OPTIONS)
    read(model, TEXT[:, :first], cache)
    assert store.keep(cache, TEXT[:, :first]) == first
    read(model, TEXT[:, first:], cache)
    assert store.keep(cache, TEXT) == 2100
    assert another(store).cache(model, TEXT, **OPTIONS).get_seq_length() == 2099


def check_same_tokens(one: QAdACache, other: QAdACache) -> None:
    """Bit for bit, as they are read."""
    for mine, yours in zip(one.layers, other.layers, strict=True):
        assert mine.store.lengths == yours.store.lengths
        span = slice(0, 1), 0, mine.store.lengths[0]
        pairs = zip(mine.store.copy_tokens(*span), yours.store.copy_tokens(*span), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize(("bits", "tokens"), [(8, 2100), (4, 1190), (8, 900)])
def test_what_is_held_comes_back(store: PrefixStore, model: PreTrainedModel, bits: int, tokens: int) -> None:
    """Bit for bit, and the next tokens are those of a cache that went on."""
    options, text = {**OPTIONS, "bulk_bits": bits}, TEXT[:, :tokens]
    cache = store.cache(model, text, **options)
    read(model, text, cache)
    assert store.keep(cache, text) == tokens
    longer = torch.cat([text, prompt(9, seed=2)[0]], dim=1)
    got = another(store).cache(model, longer, **options)
    assert got.get_seq_length() == tokens
    check_same_tokens(got, cache)
    for mine, yours in zip(bulks(got), bulks(cache), strict=True):
        assert mine.stored == yours.stored
        assert mine.stored[0] == (0 if tokens < 1100 else (tokens - 24 + 384) // 512 * 512 - 512)
        assert torch.equal(mine.tensors[0][:, :, : mine.stored[0]], yours.tensors[0][:, :, : mine.stored[0]])
    wanted = generate(model, longer, cache, tokens=5).sequences
    assert torch.equal(generate(model, longer, got, tokens=5).sequences, wanted)


@pytest.mark.parametrize("how", ["forked", "loaded"])
def test_a_fork_by_other_moments_is_not_kept(
    store: PrefixStore, model: PreTrainedModel, tmp_path: Path, how: str
) -> None:
    """Its records were coded by the query energies of before. Caches that found them would read other keys."""
    made = KeyMoments.collect(model, prompt="random-tokens", progress=False)
    for options in (OPTIONS, OPTIONS | {"moments": made}):
        cache = store.cache(model, TEXT, **options)
        read(model, TEXT, cache)
        other = cache.fork(moments=made if options is OPTIONS else "current")
        if how == "loaded":
            other.save(tmp_path / "cache.safetensors")
            other = QAdACache.load(tmp_path / "cache.safetensors", model)
        assert store.keep(other, TEXT) == 0
        assert store.keep(cache.fork(threshold=0.5), TEXT) == 2100


def test_tokens_of_a_segment_that_a_crop_opened_are_not_kept(store: PrefixStore, model: PreTrainedModel) -> None:
    """They are decoded. A cache that found them would code them again, and at every edit of a text once more."""
    cache = store.cache(model, TEXT, **OPTIONS)
    read(model, TEXT, cache)
    cache.crop(1200 - 2100)
    assert bulks(cache)[0].reopened[0]
    edited = torch.cat([TEXT[:, :1200], prompt(660, seed=3)[0]], dim=1)
    read(model, edited[:, 1200:1220], cache)
    assert store.keep(cache, edited[:, :1220]) == 4 + 2 * 512  # sinks and two closed segments
    assert another(store).cache(model, edited, **OPTIONS).get_seq_length() == 4 + 2 * 512
    read(model, edited[:, 1220:], cache)
    assert not bulks(cache)[0].reopened[0]
    bulks(cache)[0].recoded[0] = frozenset({2})  # as if the new tokens had not fitted its old codes
    assert store.keep(cache, edited) == 4 + 2 * 512
    bulks(cache)[0].recoded[0] = frozenset()
    assert store.keep(cache, edited) == edited.shape[1]


def test_no_token_is_coded_again(store: PrefixStore, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TEXT[:, :2100]
    cache = store.cache(model, text, **OPTIONS)
    read(model, text, cache)
    store.keep(cache, text)
    closed = [bulk.stored[0] for bulk in bulks(cache)]
    coded, record = list[int](), CodedBulk._record

    def count(self: CodedBulk, rows: slice, keys: Tensor, *rest: Any) -> Tensor:
        coded.append(keys.shape[2])
        return record(self, rows, keys, *rest)

    monkeypatch.setattr(CodedBulk, "_record", count)
    got = another(store).cache(model, text, **OPTIONS)
    assert got.get_seq_length() == 2099
    assert sum(coded) <= 3 * len(closed) * (2100 - min(closed))  # what is open is coded as it comes


@pytest.mark.parametrize("cut", [1700, 300])
def test_a_text_that_differs(store: PrefixStore, model: PreTrainedModel, cut: int) -> None:
    """Within a segment in few bits, and before: as a cache that is cropped there."""
    cache = store.cache(model, TEXT, **OPTIONS)
    read(model, TEXT, cache)
    store.keep(cache, TEXT)
    other = torch.cat([TEXT[:, :cut], (TEXT[:, cut : cut + 1] + 1) % 90, prompt(30, seed=5)[0]], dim=1)
    got = another(store).cache(model, other, **OPTIONS)
    assert got.get_seq_length() == cut
    cache.crop(cut - 2100)
    check_same_tokens(got, cache)
    assert torch.equal(
        generate(model, other, got, tokens=5).sequences, generate(model, other, cache, tokens=5).sequences
    )


@pytest.mark.parametrize(("shared", "tokens"), [(600, 1000), (1100, 1150)])
def test_a_shorter_text_beside_a_longer_one(
    store: PrefixStore, model: PreTrainedModel, shared: int, tokens: int
) -> None:
    """One whose tokens are still as the model made them is found behind fewer segments than the longer one shares."""
    other = torch.cat([TEXT[:, :shared], prompt(tokens - shared, seed=6)[0]], dim=1)
    for text in (TEXT, other):
        cache = QAdACache(model, **OPTIONS)
        read(model, text, cache)
        assert store.keep(cache, text) == text.shape[1]
    longer = torch.cat([other, prompt(9, seed=2)[0]], dim=1)
    got = another(store).cache(model, longer, **OPTIONS)
    assert got.get_seq_length() == tokens
    check_same_tokens(got, cache)


def test_a_text_that_grows(store: PrefixStore, model: PreTrainedModel) -> None:
    """A stored part behind closed segments is removed when its segments close."""
    cache, sizes = QAdACache(model, **OPTIONS), []
    for start, stop in ((0, 1300), (1300, 1400), (1400, 2100)):
        read(model, TEXT[:, start:stop], cache)
        assert store.keep(cache, TEXT[:, :stop]) == stop
        with store._open() as folder:
            headers = [folder.read_header(name) for name in folder.list().files]
        assert sum(not header.sketch for header in headers) == 1
        assert sum(len(header.tokens) for header in headers) == stop
        assert another(store).cache(model, TEXT, **OPTIONS).get_seq_length() == min(stop, 2099)
        sizes.append(store.stats().written_bytes)
    store.keep(cache, TEXT)
    assert store.stats().written_bytes == sizes[-1]
    assert {header.sketch for header in headers} == {CODED, ""}
    assert store.verify() == (len(headers), [])


def test_who_finds_what(store: PrefixStore, model: PreTrainedModel) -> None:
    """Few bits are for caches of the same bits; tokens as the model made them for all."""
    cache = store.cache(model, TEXT, **OPTIONS)
    read(model, TEXT, cache)
    store.keep(cache, TEXT)
    for other in ({"bulk_bits": 4}, {"bulk_bits": 16}, {"token_threshold": 0.5}):
        assert another(store).cache(model, TEXT, **{**OPTIONS, **other}).get_seq_length() == 0
    made = store.cache(model, TEXT, **{**OPTIONS, "bulk_bits": 16})
    read(model, TEXT[:, :1500], made)
    store.keep(made, TEXT[:, :1500])
    got = another(store).cache(model, TEXT, **{**OPTIONS, "bulk_bits": 4})
    assert got.get_seq_length() == 1500
    assert all(bulk.stored[0] for bulk in bulks(got))
    read(model, TEXT[:, 1500:], got)
    assert store.keep(got, TEXT) == 2100
    assert another(store).cache(model, TEXT, **{**OPTIONS, "bulk_bits": 4}).get_seq_length() == 2099
    assert another(store).cache(model, TEXT, **OPTIONS).get_seq_length() == 2099
    ids = torch.cat([TEXT[:, :1700], TEXT[:, :1700]])
    assert another(store).cache(model, ids, **OPTIONS).get_seq_length() == 1500
    padded, mask = torch.nn.functional.pad(TEXT, (50, 0)), torch.nn.functional.pad(torch.ones_like(TEXT), (50, 0))
    got = another(store).cache(model, padded, attention_mask=mask, **OPTIONS)
    assert got.get_seq_length() == 1550  # as the model made them
    assert got.layers[0].store.lengths == [1500]


def test_no_room_and_faults(
    store: PrefixStore, model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = store.cache(model, TEXT, **OPTIONS)
    read(model, TEXT, cache)
    store.keep(cache, TEXT)
    files = sorted(store.folder.iterdir())
    for place, file in enumerate(files):
        content = bytearray(file.read_bytes())
        content[-77] ^= 16
        file.write_bytes(content)
        got = another(store).cache(model, TEXT, **OPTIONS)
        found = got.get_seq_length()
        assert found in (0, *range(4 + 512, 2100, 512))
        if found:
            cropped = copy.deepcopy(cache)
            cropped.crop(found - len(TEXT[0]))
            check_same_tokens(got, cropped)
        assert store.keep(cache, TEXT) == 2100, place
    assert "read again" in caplog.text
    small = PrefixStore(tmp_path / "small", max_bytes=store.stats().bytes // 2)
    assert 0 < small.keep(cache, TEXT) < 2100
    assert small.stats().bytes <= small.max_bytes
