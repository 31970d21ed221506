"""How soon a cache's steps are replayed: at its second one, once another cache's replays on that decoder were right."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graphed import decode, make
from models import tiny
from recorded_graph import RecordedGraph

from qada_cache import decode_graph
from qada_cache.decode_graph.capturing import GRAPHS
from qada_cache.decode_graph.step import Places


@torch.no_grad()
def test_the_first_cache_of_a_decoder_rehearses_and_compares(device: str) -> None:
    model = tiny().to(device)
    decode(model, make(model, token_threshold=0.0), 4)
    assert RecordedGraph.replays == 2  # both compared
    assert model.model in decode_graph._proven


@torch.no_grad()
def test_a_second_cache_does_not(device: str) -> None:
    model = tiny().to(device)
    options = {"token_threshold": 0.0, "cuda_graph": True}
    plain = decode(model, make(model, **{**options, "cuda_graph": False}), 20)
    decode(model, make(model, **options), 4)
    before, cache = RecordedGraph.replays, make(model, **options)
    found = decode(model, cache, 20)
    assert RecordedGraph.replays == before + 19
    torch.testing.assert_close(found, plain, rtol=0, atol=0 if device == "cpu" else 1e-5)
    assert cache.stats().decisions == 20


class Refusing(RecordedGraph):
    """Captures nothing the first time."""

    refused = 0

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        with super().capture():
            yield
            if not Refusing.refused:
                Refusing.refused += 1
                raise RuntimeError("something was allocated")


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_cache_that_needs_a_rehearsal_has_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    plain = decode(model, make(model, token_threshold=0.0, cuda_graph=False), 12)
    decode(model, make(model, token_threshold=0.0), 4)
    monkeypatch.setattr(Refusing, "refused", 0)
    monkeypatch.setitem(GRAPHS, device, Refusing)
    before, cache = RecordedGraph.replays, make(model, token_threshold=0.0)
    found = decode(model, cache, 12)
    assert Refusing.refused == 1
    assert RecordedGraph.replays == before + 12 - 3  # computed, refused, rehearsed; two of the others are compared
    assert torch.equal(found, plain)
    assert not cache._decode_graph.failed


@torch.no_grad()
def test_no_garbage_is_collected_in_a_capture(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is freed asks its stream for its state, which CUDA refuses then."""
    collects, advance = list[bool](), Places.advance

    def look(self: Any) -> None:
        collects.append(gc.isenabled())
        advance(self)

    monkeypatch.setattr(Places, "advance", look)
    model = tiny().to(device)
    decode(model, make(model, token_threshold=0.0), 6)
    assert collects
    assert not any(collects)
    assert gc.isenabled()
    assert RecordedGraph.replays
