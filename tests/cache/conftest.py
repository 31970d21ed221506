"""Devices on which graphs are captured: on a CPU the recorder stands in for them."""

from __future__ import annotations

import weakref

import pytest
import quick_kernel
from recorded_graph import RecordedGraph
from stand_in import GPU

from qada_cache import decode_graph, storage
from qada_cache.attention import plan
from qada_cache.decode_graph.capturing import GRAPHS
from qada_cache.kernels import choice

CHOOSE, MAKE_STORER = choice.choose_kernel, plan.make_storer


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device whose graphs count their replays. On a CPU quick kernels compute what they hold; see `interpreted`."""
    monkeypatch.setattr(storage, "PENDING_TOKENS", 9)
    monkeypatch.setenv("QADA_KERNELS", "triton")
    monkeypatch.setattr(RecordedGraph, "replays", 0)
    monkeypatch.setattr(decode_graph, "_proven", weakref.WeakKeyDictionary())  # tests share models
    if request.param == "cpu":
        monkeypatch.setitem(GRAPHS, "cpu", RecordedGraph)
        quick_kernel.serve(monkeypatch)
    else:
        real = GRAPHS["cuda"]

        class Counted(real):  # type: ignore[misc, valid-type]
            def replay(self) -> None:
                RecordedGraph.replays += 1
                super().replay()

        monkeypatch.setitem(GRAPHS, "cuda", Counted)
    return request.param


@pytest.fixture
def interpreted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own kernels are in the graph, on a CPU too."""
    monkeypatch.setattr(choice, "choose_kernel", CHOOSE)
    monkeypatch.setattr(plan, "make_storer", MAKE_STORER)
