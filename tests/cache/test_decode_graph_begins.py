"""How soon a cache's steps are replayed: at its second one, once another cache's replays on that decoder were right."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graphed import decode, make
from models import prompt, tiny
from recorded_graph import RecordedGraph

from qada_cache import QAdACache, decode_graph
from qada_cache.decode_graph.capturing import GRAPHS
from qada_cache.decode_graph.step import Places
from qada_cache.prefix_store.filling import flush
from qada_cache.versions import pass_cache


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


def decode_rows(model: Any, rows: int, start: int, tokens: int, *, on: bool) -> tuple[torch.Tensor, QAdACache]:
    """Logits of single tokens behind a prompt of `start`."""
    cache, ids = (
        make(model, token_threshold=0.0, cuda_graph=on),
        torch.cat([prompt(90, seed=row)[0] for row in range(rows)]),
    )
    ids = ids.to(model.device)
    model(ids[:, :start], **pass_cache(cache), logits_to_keep=1)
    steps = range(start, start + tokens)
    return torch.cat([model(ids[:, at : at + 1], **pass_cache(cache)).logits for at in steps]), cache


class Empty(Refusing):
    """Leaves in tensors made in a capture what no replay has put there."""

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        try:
            with super().capture():
                yield
        finally:
            for place in (place for _, places in self.steps for place in places if place is not None):
                place.fill_(torch.nan if place.is_floating_point() else 7)


@torch.no_grad()
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_nothing_built_in_a_capture_that_failed_is_read(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels prepare anew for the first bulk of several rows, here in the capture."""
    model = tiny()
    decode(model, make(model, token_threshold=0.0), 4)
    monkeypatch.setattr(Refusing, "refused", 0)
    monkeypatch.setitem(GRAPHS, device, Empty)
    before = RecordedGraph.replays
    (plain, _), (found, cache) = (decode_rows(model, 2, 19, 5, on=on) for on in (False, True))
    assert Refusing.refused == 1
    torch.testing.assert_close(found, plain)
    assert RecordedGraph.replays > before
    assert not cache._decode_graph.failed


@torch.no_grad()
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_captures_that_fail_again_end_beside_a_cache_that_is_replayed(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its comparisons prove the decoder anew."""
    model, captured = tiny(), list[bool]()
    others = make(model, token_threshold=0.0)
    decode(model, others, 6)

    class Never(RecordedGraph):
        @contextlib.contextmanager
        def capture(self) -> Iterator[None]:
            captured.append(True)
            raise RuntimeError("no")
            yield

    cache = make(model, token_threshold=0.0)
    decode(model, cache, 1)
    for at in range(1, 7):
        with monkeypatch.context() as patch:
            patch.setitem(GRAPHS, device, Never)
            decode(model, cache, 1, start=at)
        decode(model, others, 1, start=5 + at)
    assert cache._decode_graph.failed
    assert len(captured) == 2
    assert not others._decode_graph.failed


class Timed(torch.nn.Module):
    """Goes by a number on the host."""

    now = 1.0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states * self.now


@torch.no_grad()
@pytest.mark.parametrize("begun", [True, False])
def test_modules_of_another_kind_are_compared_anew(begun: bool, device: str) -> None:
    """Also by a cache that has compared others."""
    outputs = []
    for on in (False, None):
        model = tiny().to(device)
        cache = make(model, token_threshold=0.0, cuda_graph=on)
        decode(model, cache, 6)
        if not begun:
            cache = make(model, token_threshold=0.0, cuda_graph=on)
            decode(model, cache, 1)
        before = RecordedGraph.replays
        model.model.layers[1].mlp.act_fn = timed = Timed()
        for at in range(6, 14):
            timed.now = float(at)
            outputs.append(decode(model, cache, 1, start=at if begun else at - 5))
    assert RecordedGraph.replays == before + 2 + begun  # one was under way as the change was seen
    assert "goes by numbers" in cache._decode_graph.failed
    torch.testing.assert_close(outputs[8:], outputs[:8], rtol=0, atol=0 if device == "cpu" else 1e-5)


@torch.no_grad()
def test_the_graph_of_a_changed_model_is_not_compared(device: str) -> None:
    """Another cache has seen the change: this one captures anew."""
    model = tiny().to(device)
    caches = [make(model, token_threshold=0.0) for _ in range(2)]
    for cache in caches:
        decode(model, cache, 6)
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    decode(model, caches[0], 2, start=6)
    decode(model, caches[1], 4, start=6)
    decode(model, caches[0], 2, start=8)
    before = RecordedGraph.replays
    for cache in caches:
        decode(model, cache, 2, start=10)
    assert not any(cache._decode_graph.failed for cache in caches)
    assert RecordedGraph.replays == before + 4


@torch.inference_mode()
def test_a_store_ends_no_graph(device: str) -> None:
    """A prompt that is kept has its pending tokens flushed: into buffers of the same addresses."""
    model, outputs = tiny().to(device), []
    for on in (False, True):
        cache = make(model, token_threshold=0.0, cuda_graph=on)
        found = [decode(model, cache, 6)]
        if on:
            graph, replays = cache._decode_graph._graph, RecordedGraph.replays
            assert graph is not None
        assert cache.layers[0].store.end > cache.layers[0].store.window
        flush(cache)
        outputs.append(torch.cat([*found, decode(model, cache, 4, start=6)]))
    assert cache._decode_graph._graph is graph
    assert RecordedGraph.replays == replays + 4
    assert torch.allclose(*outputs, atol=1e-5)
