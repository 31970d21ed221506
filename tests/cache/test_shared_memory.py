"""The memory that copies and files share: how much it is, and what becomes of it when others write there."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness import Driver, FakeAttention, Inputs
from host_memory import takes_at_most
from models import generate, logits_of, prompt, tiny
from scenarios import small_buffers
from stand_in import accelerator
from test_copies import anything, built, nothing, shares, snapshot
from torch import Tensor
from transformers import LlamaConfig

from qada_cache import QAdACache
from qada_cache.files import private_map
from qada_cache.state import record

pytestmark = pytest.mark.skipif(not private_map.AVAILABLE, reason="needs Linux")
LARGE = {"dim": 64, "kv_heads": 8, "value_dim": 64}


def large(tokens: int = 4000) -> QAdACache:
    """A cache that holds `tokens` tokens, 8 KiB each: keys and values of two layers."""
    config = LlamaConfig(hidden_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8)
    cache, inputs = built(config), Inputs(**LARGE)
    for layer in cache.layers:
        keys, values, _ = inputs(tokens, 1)
        layer.lazy_initialization(keys, values)
        layer.store.absorb(keys, values, None)
        layer.seen += tokens
    return cache


def extend(cache: QAdACache, tokens: int) -> None:
    for layer in cache.layers:
        keys, values, _ = Inputs(7, **LARGE)(tokens, 1)
        layer.store.absorb(keys, values, None)
        layer.seen += tokens


def test_copies_take_memory_for_what_they_add() -> None:
    cache = large()
    whole = cache.stats().host_bytes
    assert whole > 30 * 2**20
    before = snapshot(cache)
    with takes_at_most(0.2 * whole):
        first = copy.deepcopy(cache)
    stored = sum(layer.store.bulk.stored_bytes for layer in cache.layers)
    assert cache.stats().shared_bytes == first.stats().shared_bytes == stored > 30 * 2**20
    with takes_at_most(whole):  # of eight, 26 tokens each
        copies = [copy.deepcopy(cache if index % 2 else first) for index in range(8)]
        for twin in copies:
            extend(twin, 26)
    assert all(shares(twin) for twin in copies)
    torch.testing.assert_close(snapshot(first), before, rtol=0, atol=0)
    del cache, first  # which leaves the memory with those that are left
    for twin in copies:
        torch.testing.assert_close(
            [[(keys[:, :4000], values[:, :4000]) for keys, values in rows] for rows in snapshot(twin)],
            before,
            rtol=0,
            atol=0,
        )


def test_a_loaded_cache_is_not_read_into_memory(tmp_path: Path) -> None:
    cache = large()
    whole = cache.stats().host_bytes
    cache.save(tmp_path / "file")
    config = cache._shared.model.config
    before = Path("/proc/self/smaps_rollup").read_text()
    loaded = [QAdACache.load(tmp_path / "file", config=config) for _ in range(4)]
    copies = [copy.deepcopy(each) for each in loaded]
    anonymous = [
        int(next(line for line in text.splitlines() if line.startswith("Anonymous:")).split()[1]) * 1024
        for text in (before, Path("/proc/self/smaps_rollup").read_text())
    ]
    assert anonymous[1] - anonymous[0] < 0.5 * whole  # the near buffers
    for each in loaded + copies:
        assert each.stats().shared_bytes == sum(bulk.stored_bytes for bulk in each._list_bulks())
        torch.testing.assert_close(snapshot(each), snapshot(cache), rtol=0, atol=0)


def test_what_is_rewritten_is_shared_anew() -> None:
    cache = large()
    first = copy.deepcopy(cache)
    first.crop(-3900)
    extend(first, 3000)
    assert 0 < first.stats().shared_bytes < 0.1 * first.stats().host_bytes
    second = copy.deepcopy(first)
    assert first.stats().shared_bytes == second.stats().shared_bytes > 0.5 * first.stats().host_bytes
    torch.testing.assert_close(snapshot(second), snapshot(first), rtol=0, atol=0)


@pytest.mark.parametrize("act", ["delete", "save over it", "rename another over it"])
def test_a_file_that_is_replaced(act: str, tmp_path: Path) -> None:
    path, cache = tmp_path / "file", large()
    cache.save(path)
    loaded = QAdACache.load(path, config=cache._shared.model.config)
    if act == "delete":
        path.unlink()
    elif act == "save over it":
        extended = copy.deepcopy(loaded)
        extended.crop(-3000)
        extended.save(path)
    else:
        (tmp_path / "other").write_bytes(b"something else")
        os.replace(tmp_path / "other", path)
    loaded.crop(-5)
    copied = copy.deepcopy(loaded)
    cache.crop(-5)
    for each in (loaded, copied):
        torch.testing.assert_close(snapshot(each), snapshot(cache), rtol=0, atol=0)
    if act == "save over it":
        assert QAdACache.load(path, config=cache._shared.model.config).get_seq_length() == 1000


@pytest.mark.parametrize("act", ["overwrite", "append", "truncate"])
def test_a_file_that_is_written_to(act: str, tmp_path: Path) -> None:
    path, other, cache = tmp_path / "file", tmp_path / "other", large()
    cache.save(path)
    os.utime(path, ns=(0, 0))  # else it might be written to within the clock's resolution
    loaded = QAdACache.load(path, config=cache._shared.model.config)
    twin = copy.deepcopy(loaded)
    if act == "truncate":
        os.truncate(path, 100)
    else:
        with path.open("r+b" if act == "overwrite" else "ab") as file:
            file.write(b"x")
    for each in (loaded, twin):
        uses = {"crop": (-1,), "fork": (), "save": (other,), "__deepcopy__": ({},)}
        for name, arguments in uses.items():
            with pytest.raises(RuntimeError, match=r"file was written to in place after this cache was loaded.*reset"):
                getattr(each, name)(*arguments)
        each.reset()
        copy.deepcopy(each).crop(0)
    assert not other.exists()
    cache.crop(-1)  # which has nothing to do with the file


def test_a_file_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older files have no room behind their tokens: caches that map one copy it when they grow, and go on alike."""
    spaced = record.PaddedTensor
    monkeypatch.setattr(record, "PaddedTensor", lambda tensor, lengths, room: spaced(tensor, lengths, max(lengths)))
    cache = large()
    cache.save(tmp_path / "file")
    loaded = QAdACache.load(tmp_path / "file", config=cache._shared.model.config)
    assert loaded.stats().shared_bytes > 0
    for each in (cache, loaded):
        extend(each, 20)
    assert loaded.stats().shared_bytes == 0
    torch.testing.assert_close(snapshot(loaded), snapshot(cache), rtol=0, atol=0)


@pytest.mark.parametrize("act", ["truncate", "overwrite"])
def test_the_first_call_looks_at_the_file_as_well(act: str, tmp_path: Path) -> None:
    """The kernel would read what is cut off, which ends the process."""
    path, model, (ids, _) = tmp_path / "file", tiny(), prompt(400)
    with anything():
        cache = QAdACache(model, moments="current")
        text = generate(model, ids, cache, tokens=2).sequences
        cache.save(path)
        os.utime(path, ns=(0, 0))
        loaded = QAdACache.load(path, model)
        assert shares(loaded)
        if act == "truncate":
            os.truncate(path, 100)
        else:
            with path.open("r+b") as file:
                file.write(b"x")
        with pytest.raises(RuntimeError, match=r"file was written to in place after this cache was loaded.*reset"):
            generate(model, text, loaded)


def test_without_the_systems_help() -> None:
    cache = large(1024)
    with mock.patch.object(os, "memfd_create", side_effect=OSError("none left")):
        twin = copy.deepcopy(cache)
    assert not shares(cache)
    assert not shares(twin)
    torch.testing.assert_close(snapshot(twin), snapshot(cache), rtol=0, atol=0)


def test_pinned_memory_is_copied(tmp_path: Path) -> None:
    with accelerator(), anything(), small_buffers():
        cache, inputs = built(), Inputs()
        for layer in cache.layers:
            Driver(layer, module=FakeAttention(cache._shared.model.config, groups=2))(*inputs(60), None, scaling=0.25)
        twin = copy.deepcopy(cache)
        cache.save(tmp_path / "file")
        loaded = QAdACache.load(tmp_path / "file", config=cache._shared.model.config)
        for each in (cache, twin, loaded):
            assert not shares(each)
            torch.testing.assert_close(snapshot(each), snapshot(cache), rtol=0, atol=0)


@pytest.mark.parametrize("token_threshold", [0.0, 1.0])
def test_kernels_read_shared_memory(token_threshold: float, tmp_path: Path) -> None:
    """A real model, and a bulk so long that the compiled kernel reads it."""
    model, (ids, _) = tiny(), prompt(1500)
    cache = QAdACache(model, moments="current", token_threshold=token_threshold)
    text = generate(model, ids, cache, tokens=2).sequences
    with nothing():
        wanted = generate(model, text, copy.deepcopy(cache), tokens=150)
    with anything():
        cache.save(tmp_path / "file")
        loaded = QAdACache.load(tmp_path / "file", model)
        for used in (copy.deepcopy(cache), copy.deepcopy(loaded), cache):
            assert shares(used)
            found = generate(model, text, used, tokens=150)
            assert torch.equal(found.sequences, wanted.sequences)
            assert torch.equal(logits_of(found), logits_of(wanted))


def test_copies_in_threads() -> None:
    """Made and used at once; the first of them moves the original."""
    model, (ids, _) = tiny(), prompt(400)
    cache = QAdACache(model, moments="current")
    text = generate(model, ids, cache, tokens=2).sequences
    questions = [torch.cat([text, prompt(9, seed=seed)[0]], dim=1) for seed in range(4)]
    with nothing():
        wanted = [generate(model, question, copy.deepcopy(cache), tokens=140).sequences for question in questions]
    found: list[Tensor | None] = [None] * len(questions)
    start = threading.Barrier(len(questions))

    def answer(index: int) -> None:
        start.wait()
        found[index] = generate(model, questions[index], copy.deepcopy(cache), tokens=140).sequences

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(questions))]
    with anything():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert shares(cache)
    assert all(ours is not None and torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
