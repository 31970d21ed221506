"""Copies share memory, and nothing else: each goes on as a copy would that shares nothing."""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import WINDOW, Driver, FakeAttention, Inputs, transformers_mask
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import generate, logits_of, prompt, tiny
from pair import stored_tokens
from scenarios import left_padded, small_buffers
from stand_in import accelerator
from torch import Tensor
from transformers import LlamaConfig

from qada_cache import QAdACache, cache_file
from qada_cache.files import private_map
from qada_cache.kernels import sketch

pytestmark = pytest.mark.skipif(not private_map.AVAILABLE, reason="needs Linux")
LONGEST = 120  # tokens a row
MOST = 4  # caches at once


def anything() -> Any:
    """However little is held, it is worth sharing."""
    return mock.patch.object(private_map, "WORTH", 0)


def nothing() -> Any:
    """Copies are copies, and files are read."""
    return mock.patch.object(private_map, "AVAILABLE", False)


def built(config: LlamaConfig | None = None, **options: Any) -> QAdACache:
    config = config or LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config._attn_implementation = config._attn_implementation or "sdpa"
    options = {"moments": "current", "threshold": 0.15, "sink_tokens": 3, "local_tokens": 11, **options}
    return QAdACache(config=config, **options)


def snapshot(cache: QAdACache) -> list[list[tuple[Tensor, Tensor]]]:
    return [stored_tokens(layer.store) if layer.store else [] for layer in cache.layers]


def shares(cache: QAdACache) -> bool:
    return any(bulk.source is not None for bulk in cache._bulks())


@dataclass
class Twins:
    """A cache whose copies share memory, and one that is told the same and shares none.

    Attributes:
        shared, plain: these.
        history: bool `[batch, tokens]`, what was real of what they were given.
    """

    shared: QAdACache
    plain: QAdACache
    history: Tensor

    @property
    def batch(self) -> int:
        return len(self.history)

    @property
    def length(self) -> int:
        return self.history.shape[1]


class CopyMachine(RuleBasedStateMachine):
    """Several caches that come from one another by copying, forking and loading, used in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.environment = ExitStack()
        self.family: list[Twins] = []

    def teardown(self) -> None:
        self.environment.close()

    @initialize(
        token_threshold=st.sampled_from([0.0, 1.0]),
        offloading=st.booleans(),
        batch=st.integers(1, 3),
        seed=st.integers(0, 2**16),
        tokens=st.integers(1, 60),
        padded=st.booleans(),
    )
    def build(self, token_threshold: float, offloading: bool, batch: int, seed: int, tokens: int, padded: bool) -> None:
        self.environment.enter_context(small_buffers())
        self.environment.enter_context(anything())
        self.environment.enter_context(mock.patch.object(sketch, "MIN_TOKENS", 6))
        self.folder = Path(self.environment.enter_context(tempfile.TemporaryDirectory()))
        self.inputs, self.generator = Inputs(seed), torch.Generator().manual_seed(seed)
        options = {"token_threshold": token_threshold, "offloading": offloading}
        caches = [built(**options), built(**options)]
        self.modules = [[FakeAttention(c._shared.model.config, groups=2, layer_idx=i) for i in (0, 1)] for c in caches]
        self.family = [Twins(*caches, torch.zeros(batch, 0, dtype=torch.bool))]
        self.update(self.family[0], tokens, padded)

    def update(self, twins: Twins, tokens: int, padded: bool) -> None:
        valid = torch.ones(twins.batch, tokens, dtype=torch.bool)
        if padded:
            lengths = torch.randint(1, tokens + 1, (twins.batch,), generator=self.generator).tolist()
            valid = left_padded(lengths, tokens)
        twins.history = torch.cat([twins.history, valid], dim=1)
        mask = transformers_mask(twins.history, tokens)
        for index in (0, 1):
            tensors = self.inputs(tokens, twins.batch)
            results = [
                Driver(cache.layers[index], module=modules[index])(*tensors, mask, scaling=0.25)
                for cache, modules in zip((twins.shared, twins.plain), self.modules, strict=True)
            ]
            for found, wanted in zip(*results, strict=True):
                assert (found is None) == (wanted is None)
                assert found is None or torch.equal(found, wanted)

    def any_of(self, data: st.DataObject) -> Twins:
        return data.draw(st.sampled_from(range(len(self.family))).map(self.family.__getitem__), label="cache")

    @rule(data=st.data(), tokens=st.sampled_from([1, 1, 2, WINDOW, WINDOW + 5, 30]), padded=st.booleans())
    def go_on(self, data: st.DataObject, tokens: int, padded: bool) -> None:
        twins = self.any_of(data)
        if twins.length + tokens <= LONGEST:
            self.update(twins, tokens, padded and tokens > 1)

    @precondition(lambda self: len(self.family) < MOST)
    @rule(data=st.data(), forked=st.booleans(), rewritten=st.sampled_from(["", "end", "rows"]))
    def copy(self, data: st.DataObject, forked: bool, rewritten: str) -> None:
        """Perhaps after other tokens took the place of some that had been in common."""
        twins = self.any_of(data)
        if rewritten == "end" and twins.length > 25:
            self.remove(twins, 25)
            self.update(twins, 25, False)
        if rewritten == "rows" and twins.length:
            self.select(twins, [(row + 1) % twins.batch for row in range(twins.batch)])

        def copied(cache: QAdACache) -> QAdACache:
            return cache.fork(threshold=0.4) if forked else copy.deepcopy(cache)

        with nothing():
            plain = copied(twins.plain)
        self.family.append(Twins(copied(twins.shared), plain, twins.history))

    @precondition(lambda self: len(self.family) < MOST)
    @rule(data=st.data(), deleted=st.booleans())
    def save_and_load(self, data: st.DataObject, deleted: bool) -> None:
        """Over a file that others may be mapped to."""
        twins, path = self.any_of(data), self.folder / "cache.safetensors"
        loaded = []
        for cache, environment in ((twins.plain, nothing()), (twins.shared, anything())):
            with environment:
                cache.save(path)
                loaded.append(QAdACache.load(path, config=cache._shared.model.config))
        if deleted:
            path.unlink()
        assert shares(loaded[1]) == any(bulk.stored_bytes for bulk in loaded[1]._bulks())
        self.family.append(Twins(loaded[1], loaded[0], twins.history))

    @precondition(lambda self: len(self.family) > 1)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.family.remove(self.any_of(data))

    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        twins = self.any_of(data)
        self.remove(twins, data.draw(st.integers(0, min(twins.length, 15)) | st.integers(0, twins.length)))

    def remove(self, twins: Twins, count: int) -> None:
        for cache in (twins.shared, twins.plain):
            cache.crop(-count)
        twins.history = twins.history[:, : twins.length - count]

    @rule(data=st.data())
    def rows(self, data: st.DataObject) -> None:
        """Reordered, repeated, dropped."""
        twins = self.any_of(data)
        row = st.integers(0, twins.batch - 1)
        index = data.draw(
            st.lists(row, min_size=twins.batch, max_size=twins.batch) | st.lists(row, min_size=1, max_size=3)
        )
        if twins.length:
            self.select(twins, index)

    def select(self, twins: Twins, index: list[int]) -> None:
        for cache in (twins.shared, twins.plain):
            cache.batch_select_indices(torch.tensor(index))
        twins.history = twins.history[index]

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        twins = self.any_of(data)
        if twins.length > 80:
            for cache in (twins.shared, twins.plain):
                cache.reset()
            twins.history = twins.history[:, :0]

    @invariant()
    def every_one_holds_its_own(self) -> None:
        for twins in self.family:
            torch.testing.assert_close(snapshot(twins.shared), snapshot(twins.plain), rtol=0, atol=0)
            ours, theirs = twins.shared.stats(), twins.plain.stats()
            for name in ("tokens", "steps", "decisions", "pulled_bytes", "offered_bytes", "streamed_bytes"):
                assert getattr(ours, name) == getattr(theirs, name), name
            assert theirs.shared_bytes == 0 <= ours.shared_bytes


TestCopies = CopyMachine.TestCase
TestCopies.settings = settings(
    max_examples=60,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,  # the same examples on every machine
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


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


def taken() -> int:
    """Bytes that this process takes; pages it has in common with others, or maps several times, count once."""
    gc.collect()
    (line,) = (line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


@contextmanager
def takes_at_most(size: float) -> Iterator[None]:
    before = taken()
    yield
    assert taken() - before <= size


def test_copies_take_memory_for_what_they_add() -> None:
    cache = large()
    whole = cache.stats().host_bytes
    assert whole > 30 * 2**20
    before = snapshot(cache)
    with takes_at_most(0.2 * whole):
        first = copy.deepcopy(cache)
    assert cache.stats().shared_bytes == first.stats().shared_bytes > 0.9 * cache.stats().host_bytes
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
        assert each.stats().shared_bytes == sum(bulk.stored_bytes for bulk in each._bulks())
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
    """As older ones are."""
    monkeypatch.setattr(cache_file.functional, "pad", lambda tensor, room: tensor)
    cache = large()
    cache.save(tmp_path / "file")
    loaded = QAdACache.load(tmp_path / "file", config=cache._shared.model.config)
    assert loaded.stats().shared_bytes > 0
    for each in (cache, loaded):
        extend(each, 20)
    assert loaded.stats().shared_bytes == 0
    torch.testing.assert_close(snapshot(loaded), snapshot(cache), rtol=0, atol=0)


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
