"""Copies share memory, and nothing else: each goes on as a copy would that shares nothing."""

from __future__ import annotations

import copy
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import WINDOW, Driver, FakeAttention, Inputs, make_config, transformers_mask
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pair import stored_tokens
from scenarios import left_padded, small_buffers
from small_sketch import small_sketch
from stateful import walks
from torch import Tensor
from transformers import LlamaConfig

from qada_cache import QAdACache
from qada_cache.files import private_map

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
    config = config or make_config(2)
    config._attn_implementation = config._attn_implementation or "sdpa"
    options = {"moments": "current", "threshold": 0.15, "sink_tokens": 3, "local_tokens": 11, **options}
    return QAdACache(config=config, **options)


def snapshot(cache: QAdACache) -> list[list[tuple[Tensor, Tensor]]]:
    return [stored_tokens(layer.store) if layer.store else [] for layer in cache.layers]


def shares(cache: QAdACache) -> bool:
    return any(bulk.source is not None for bulk in cache._list_bulks())


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
        self.environment.enter_context(small_sketch(6, 16))  # of several segments
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
        """Save over a file that other caches may map, and load it."""
        twins, path = self.any_of(data), self.folder / "cache.safetensors"
        loaded = []
        for cache, environment in ((twins.plain, nothing()), (twins.shared, anything())):
            with environment:
                cache.save(path)
                loaded.append(QAdACache.load(path, config=cache._shared.model.config))
        if deleted:
            path.unlink()
        assert shares(loaded[1]) == any(bulk.stored_bytes for bulk in loaded[1]._list_bulks())
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
            for name in ("tokens", "steps", "decisions", "bulk_read_bytes", "dense_bulk_bytes", "streamed_bytes"):
                assert getattr(ours, name) == getattr(theirs, name), name
            assert theirs.shared_bytes == 0 <= ours.shared_bytes


TestCopies = CopyMachine.TestCase
TestCopies.settings = walks(60)
