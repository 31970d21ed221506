"""Copies between host and device: which are waited for, when, and how many are under way."""

from __future__ import annotations

import copy
import gc
import logging
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from harness import SINKS, WINDOW, Inputs, new_layer
from models import SMALL, generate, prompt, tiny
from stand_in import accelerator, on_gpu, strided, without_waiting
from torch import Tensor

from qada_cache import QAdACache
from qada_cache.said_once import warn_once
from qada_cache.serving.conversations import Conversation, Conversations, Limits
from qada_cache.storage import bulk, row_tensors, transfers
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.placement import Placement
from qada_cache.storage.reading import read_parts


def test_first_fill_does_not_wait() -> None:
    """Layers of a prefill follow each other without the host waiting for copies, or for the device."""
    keys, values, _ = Inputs()(60)
    with accelerator() as copies:
        layer = new_layer(keys, values)
        layer.store.absorb(keys, values, None)
        torch.accelerator.synchronize.assert_not_called()
        assert not copies.last.query()
        store = layer.store.bulk
        layer.store.append(*Inputs(1)(1)[:2], None)
        assert not copies.last.query()
        store.synchronize()
        assert copies.last.query()
        assert torch.equal(store.keys[:, :, : store.lengths[0]], keys[:, :, SINKS:-WINDOW])


def test_a_bulk_waits_for_its_own_copies_only() -> None:
    """Saving one cache does not wait for another's prefill."""
    keys, values, _ = Inputs()(60)
    with accelerator() as copies:
        first = new_layer(keys, values)
        first.store.absorb(keys, values, None)
        mine = copies.last
        second = new_layer(keys, values)
        second.store.absorb(keys, values, None)
        first.store.bulk.synchronize()
        assert mine.query()
        assert not copies.last.query()


class Event:
    def __init__(self) -> None:
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True


@pytest.mark.parametrize(
    ("sizes", "waited"),
    [
        ([80, 80, 80], [True, True, False]),  # one layer under way
        ([500, 500], [True, False]),  # also one that is larger than the bound
        ([10] * 10, [False] * 10),
        ([40, 40, 40], [True, False, False]),
        ([10, 10, 95], [True, True, False]),
    ],
)
def test_copies_to_the_host_under_way_are_bounded(
    sizes: list[int], waited: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "IN_FLIGHT_BYTES", 100)
    outgoing: deque[tuple[Any, int]] = deque()
    events = [Event() for _ in sizes]
    for event, size in zip(events, sizes, strict=True):
        transfers.limit_in_flight(outgoing, event, size)
    assert [event.waited for event in events] == waited


def test_copies_to_the_device_are_one_ahead() -> None:
    """The first is under way before anything is asked for, each other one before the one in front of it is used."""
    log: list[str] = []

    class Logged(transfers.AsyncCopy):
        def __init__(self, number: int) -> None:
            super().__init__((torch.zeros(1), torch.zeros(1)))
            self.number = number
            log.append(f"start {number}")

        def wait(self) -> tuple[Tensor, Tensor]:
            log.append(f"wait {self.number}")
            return super().wait()

    async_copies = transfers.double_buffer((number, Logged(number)) for number in range(3))
    assert log == ["start 0"]
    for number, _ in async_copies:
        log.append(f"use {number}")
    assert log == ["start 0", "start 1", "wait 0", "use 0", "start 2", "wait 1", "use 1", "wait 2", "use 2"]
    assert not list(transfers.double_buffer(iter(())))


empty = torch.empty


def unpinnable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
    if pin_memory:
        raise RuntimeError("no memory can be pinned")
    return empty(*args, **kwargs)


def test_memory_that_cannot_be_pinned(caplog: pytest.LogCaptureFixture) -> None:
    """Here there is nothing to pin it for; said once, and the store works on."""
    warn_once.cache_clear()
    like = torch.empty(1, 2, 0, 4, device="meta")
    with mock.patch.object(torch, "empty", unpinnable), caplog.at_level(logging.WARNING):
        store = Bulk(like, like, offloading=True, placement=Placement(0), layer=0)
        with mock.patch.object(torch.accelerator, "synchronize"):
            store.reserve(10)
    assert store.keys.device.type == "cpu"
    assert store.capacity == row_tensors.GRANULE
    assert caplog.text.count("memory that is not pinned, so that copies of it wait: no memory") == 1


@pytest.mark.parametrize(
    ("pinned", "tokens", "chunk", "least", "most"),
    [
        (False, 16384, 16384, 32, 5),
        (False, 104000, 4096, 32, 1),
        (True, 32640, 32640, 32, 2),
        (True, 104000, 104000, 32, 1),
        (True, 104000, 4096, 20, 1),  # with more room than the text grows by
        (True, 130944, 130944, 32, 1),
    ],
)
def test_layers_grow_one_after_the_other(pinned: bool, tokens: int, chunk: int, least: int, most: int) -> None:
    """A step in which all of them did would copy the whole cache: p99 of a step's time is a user's wait. However the
    prompt came, and where room is pinned, of which a prompt leaves little."""
    like, rows = torch.empty(1, 1, 0, 1, dtype=torch.uint8), slice(0, 1)
    with accelerator() as copies:
        copies.eager = True
        stores = [Bulk(like, like, offloading=pinned, placement=Placement(0), layer=layer) for layer in range(32)]

        def append(tokens: int) -> int:
            """How many layers were moved."""
            part, before = like.new_zeros(1, 1, tokens, 1), [store.keys.data_ptr() for store in stores]
            for store in stores:
                store.append(rows, part, part)
            return sum(store.keys.data_ptr() != old for store, old in zip(stores, before, strict=True))

        for start in range(0, tokens, chunk):
            append(min(chunk, tokens - start))
        moved = [append(128) for _ in range(270)]
    assert sum(moved) >= least
    assert max(moved) <= most
    assert all(store.capacity <= (1.8 if pinned else 1.27) * store.lengths[0] for store in stores)


class Stream:
    """Stands in for a stream on which a kernel is under way unless `done`."""

    device = torch.device("cpu")

    def __init__(self, done: bool) -> None:
        self.query, self.event = lambda: done, Event()

    def record_event(self) -> Event:
        return self.event


def drop(cache: QAdACache) -> None:
    """The last that knew of it."""


def evict(cache: QAdACache) -> None:
    text, conversations, limits = torch.arange(90), Conversations(), Limits(1)
    for kept in (cache, QAdACache(tiny(), moments="current", **SMALL)):
        conversations.keep(Conversation(kept, (), text), text, limits)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("leave", [drop, QAdACache.reset, evict])
def test_host_memory_outlives_the_kernels_that_read_it(
    leave: Callable[[QAdACache], None], done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch holds pinned memory until copies of it have ended: a copy of every layer's comes after the last kernel."""
    stream, held = Stream(done), []
    monkeypatch.setattr(bulk, "find_reader", lambda _: stream)
    monkeypatch.setattr(transfers, "fetch", lambda tensors, _, after: held.append((tensors, after)))
    with accelerator():
        model = tiny(num_hidden_layers=3)
        cache = QAdACache(model, moments="current", **SMALL)
        generate(model, prompt(90)[0], cache, tokens=2)
        memory = [tensor.data_ptr() for layer in cache.layers for tensor in layer.store.bulk.find_in_place()]
        caches = [cache]
        del cache
        leave(caches.pop())
        gc.collect()
    pointers = sorted(tensor.data_ptr() for tensors, _ in held for tensor in tensors)
    assert pointers == ([] if done else sorted(memory))
    assert all(event is stream.event for _, event in held)


# -- what only a GPU can show -------------------------------------------------------------------------------------


@on_gpu
def test_copies_do_not_block() -> None:
    """Neither those of a prefill nor those of a decode step make the host wait for the device."""
    keys, values = strided(5000)
    layer = new_layer(keys, values)
    torch.cuda.synchronize()
    with without_waiting():
        layer.store.absorb(keys, values, None)
        parts = list(read_parts(layer.store.bulk, [[True, False, True, True]]))
    assert layer.store.bulk.keys.is_pinned()
    for part in parts:
        assert torch.equal(part.keys, keys[:, part.heads, SINKS:-WINDOW])
        assert torch.equal(part.values, values[:, part.heads, SINKS:-WINDOW])


@on_gpu
def test_a_copy_is_pinned_too() -> None:
    keys, values = strided(5000)
    layer = new_layer(keys, values)
    layer.store.absorb(keys, values, None)
    twin = copy.deepcopy(layer.store.bulk)
    assert twin.keys.is_pinned()
    assert twin.values.is_pinned()
    assert torch.equal(twin.keys[:, :, : twin.lengths[0]], keys[:, :, SINKS:-WINDOW].cpu())
