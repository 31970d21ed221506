"""The graph of a device's launches, and the host's state, which a pass changes while a graph is captured."""

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from ..state import Shared
from ..state.layer import QAdALayer


class CudaGraph:
    """A CUDA graph: launches on a device, captured once, replayed often."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph, self._stream = device, torch.cuda.CUDAGraph(), torch.cuda.Stream(device)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Inside, launches are recorded into the graph, and not computed."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield
            finally:
                self._graph.capture_end()
        current.wait_stream(self._stream)

    def replay(self) -> None:
        """Compute all launches on the current stream."""
        self._graph.replay()


GRAPHS: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaGraph}  # by the type of device


class HostState:
    """The host's state of a cache before a capture. A capture changes it as a pass does, but computes nothing."""

    def __init__(self, layers: list[Any], shared: Shared) -> None:
        """`layers` are all layers of a cache."""
        self._shared, self._progress = shared, (shared.progress.reached, dict(shared.progress.visits))
        self._is_prefill_chunk = shared.forward_pass.is_prefill_chunk
        ours = [layer for layer in layers if isinstance(layer, QAdALayer)]
        parts = ((asker, asker.counters) for layer in ours for asker in layer.askers)
        objects = [*layers, *(layer.store for layer in ours), *chain.from_iterable(parts)]
        self._attributes = [(each, {name: _copy(value) for name, value in vars(each).items()}) for each in objects]

    def restore(self) -> None:
        """Put all attributes back as they were."""
        self._shared.progress.reached, self._shared.progress.visits = self._progress
        self._shared.forward_pass.is_prefill_chunk = self._is_prefill_chunk
        for each, before in self._attributes:
            vars(each).update(before)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value
