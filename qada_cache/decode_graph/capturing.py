"""A graph of launches, and what a pass changes on the host while one is captured."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..state import Shared
from ..state.layer import QAdALayer


class CudaGraph:
    """Launches on a device, to be repeated."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph, self._stream = device, torch.cuda.CUDAGraph(), torch.cuda.Stream(device)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """What is launched meanwhile belongs to the graph and is not computed."""
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
        """Compute all of it on the current stream."""
        self._graph.replay()


GRAPHS: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaGraph}  # by the type of device


class HostState:
    """What a pass changes on the host, to be put back: while a graph is captured nothing is computed."""

    def __init__(self, layers: list[QAdALayer], shared: Shared) -> None:
        self._shared, self._progress = shared, (shared.progress.reached, dict(shared.progress.visits))
        self._is_prefill_chunk = shared.forward_pass.is_prefill_chunk
        self._layers = [(layer, vars(layer).copy(), vars(layer.counters).copy()) for layer in layers]
        self._stores = [(layer.store, _copy_lists(vars(layer.store))) for layer in layers]

    def restore(self) -> None:
        """As it was."""
        self._shared.progress.reached, self._shared.progress.visits = self._progress
        self._shared.forward_pass.is_prefill_chunk = self._is_prefill_chunk
        for layer, before, counted in self._layers:
            vars(layer).update(before)
            vars(layer.counters).update(counted)
            layer.counters._unsummed.clear()
        for store, before in self._stores:
            vars(store).update(before)


def _copy_lists(held: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in held.items()}
