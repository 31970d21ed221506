"""A capture that CUDA refuses leaves torch as it was."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in import on_gpu
from torch.torch_version import TorchVersion

from qada_cache.decode_graph.capturing import CudaGraph


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A stand-in for CUDA writes here what it is asked, by a torch before 2.12. One capture of it fails."""
    asked: list[Any] = []
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))

    class Graph:
        fails = 1

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
            asked.append(("begin", pool))

        def capture_end(self) -> None:
            asked.append("end")
            if Graph.fails:
                Graph.fails -= 1
                raise RuntimeError("the capture is invalid")

        def pool(self) -> None:
            raise RuntimeError("nothing was captured")

    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": lambda _: stream,
        "current_stream": lambda _: stream,
        "device": contextlib.nullcontext,
        "stream": contextlib.nullcontext,
        "graph_pool_handle": lambda: "pool",
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch.cuda.memory, name, lambda index, pool, name=name: asked.append((name, index, pool)))
    return asked


RECOVERED = ["end", ("_cuda_endAllocateToPool", 0, "pool"), ("_cuda_releasePool", 0, "pool"), ("begin", None), "end"]


def test_a_failed_capture_is_ended_for_torch(calls: list[Any]) -> None:
    """The allocator's part and the generator's, for which another capture ends; the error is the one inside."""
    with pytest.raises(ValueError, match="waits for the device"), CudaGraph(torch.device("cpu")).capture():
        raise ValueError("it waits for the device")
    assert calls == [("begin", "pool"), *RECOVERED]


def test_a_capture_that_fails_at_its_end(calls: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="invalid"), CudaGraph(torch.device("cpu")).capture():
        pass
    assert calls == [("begin", "pool"), *RECOVERED]


@pytest.mark.parametrize(
    ("version", "captured", "releases"),
    [
        ("2.12.0", False, True),
        ("2.13.0+cpu", False, True),
        ("2.13.0", True, False),
        ("2.14.0", False, False),
        ("2.14.0a0+nv26.10", False, False),
    ],
)
def test_a_torch_that_has_ended_it_itself(
    version: str, captured: bool, releases: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is given back once: by torch from 2.14 on, and before if only the graph could not be instantiated."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("not recording to this pool")

    monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", refuse)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    if captured:
        monkeypatch.setattr(torch.cuda.CUDAGraph, "pool", lambda _: "pool")
    with pytest.raises(RuntimeError, match="invalid"), CudaGraph(torch.device("cpu")).capture():
        pass
    released = [("_cuda_releasePool", 0, "pool")] * releases
    assert calls == [("begin", "pool"), "end", *released, ("begin", None), "end"]


@on_gpu
def test_torch_goes_on_behind_a_failed_capture() -> None:
    """Memory comes back, random numbers are drawn, and another capture is replayed."""
    device = torch.device("cuda", 0)
    ones = torch.ones(3, device=device)
    with pytest.raises(RuntimeError), CudaGraph(device).capture():
        ones.sum().item()
    torch.cuda.empty_cache()
    assert torch.rand(3, device=device).shape == (3,)
    graph = CudaGraph(device)
    with graph.capture():
        twos = ones + 1
    graph.replay()
    assert twos.tolist() == [2, 2, 2]
