"""Threads that generate with a cache each, on one model and its moments: an ordinary server."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import SMALL, forced, generate, logits_of, prompt, tiny

from qada_cache import KeyMoments, QAdACache
from qada_cache.key_moments import defaults
from qada_cache.storage import transfers

THREADS = 4


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """Threads that take turns at every opportunity."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """`work(i)` for each thread, all started together; what one raises is raised."""
    barrier = threading.Barrier(THREADS)

    def started(index: int) -> Any:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(started, range(THREADS)))


@pytest.mark.parametrize("moments", ["random-tokens", "current"])
def test_caches_in_threads(moments: str) -> None:
    """Each of another length, so that they ask for different moments."""
    model = tiny(max_position_embeddings=2048)

    def turn(index: int) -> Any:
        return logits_of(generate(model, prompt(120 + 150 * index, seed=index)[0], cache_of(), tokens=16))

    def cache_of() -> QAdACache:
        return QAdACache(model, threshold=0.12, moments=moments, **SMALL)

    alone = [turn(index) for index in range(THREADS)]
    for got, wanted in zip(at_once(turn), alone, strict=True):
        assert torch.equal(got, wanted)


def test_a_cache_that_threads_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that uses a cache in another's pass gets an error that says so; the other's logits stay right."""
    model, ids = tiny(), prompt(60)[0]
    cache, original = QAdACache(model, **SMALL), QAdACache.update

    def update(self: QAdACache, *states: Any, **options: Any) -> Any:
        monkeypatch.setattr(QAdACache, "update", original)  # the other thread's
        taken = original(self, *states, **options)
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match=r"threads share the cache \(give each a"):
            pool.submit(forced, model, ids, [60], cache).result()
        return taken

    monkeypatch.setattr(QAdACache, "update", update)
    assert torch.equal(forced(model, ids, [60], cache), forced(model, ids, [60], None))


def test_latents_in_threads() -> None:
    """Nothing but the thread says whose latents a module has expanded; all read the same tokens here."""
    model, ids = tiny("deepseek_v3"), prompt(100)[0]

    def turn(index: int) -> Any:
        return logits_of(generate(model, ids, QAdACache(model, **SMALL) if index else None, tokens=8))

    alone = [turn(index) for index in range(THREADS)]
    for got, wanted in zip(at_once(turn), alone, strict=True):
        assert torch.equal(got, wanted)


def test_moments_are_placed_by_several_threads() -> None:
    mean = torch.randn(6, 1, 2, 4, generator=torch.Generator().manual_seed(0))
    covariance = torch.eye(4).expand(6, 1, 2, 4, 4).clone()
    lengths = (10, 20, 40, 80, 160, 320)
    moments = KeyMoments(mean, covariance, lengths=lengths, tokens=400, model_type="llama", prompt="test")
    device = torch.device("cpu")

    def ask(index: int) -> None:
        for step in range(200):
            which = (index + step) % len(lengths)
            ((found, _),) = moments.find_layer(0, [lengths[which]], device)
            assert torch.equal(found[0], moments._find_layer_at(0, lengths[which])[0].float())
            assert moments.device_bytes >= 0

    at_once(ask)
    assert not moments.device_bytes  # nobody has any


def test_moments_are_collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, collected = tiny(seed=77), []

    def counted(*arguments: Any, **options: Any) -> KeyMoments:
        collected.append(arguments)
        return original(*arguments, **options)

    original = defaults._collect
    monkeypatch.setattr(defaults, "_collect", counted)
    caches = at_once(lambda _: QAdACache(model, moments="random-tokens", **SMALL))
    assert len(collected) == 1
    assert len({id(cache.options.other_moments) for cache in caches}) == 1


def test_copies_to_the_host_are_booked_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "IN_FLIGHT_BYTES", 1000)
    outgoing: deque[tuple[Any, int]] = deque()

    class Event:
        def synchronize(self) -> None:
            threading.Event().wait(0)

    def book(_: int) -> None:
        for _ in range(500):
            transfers.limit_in_flight(outgoing, Event(), 10)
            assert sum(sent for _, sent in list(outgoing)) <= 1000

    at_once(book)
