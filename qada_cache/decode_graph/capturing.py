"""The graph of a device's launches, and the host's state, which a pass changes while a graph is captured."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from ..state import Shared
from ..state.layer import QAdALayer


@functools.cache
def _find_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: torch gives its 32 out again and again, also those that copies run on."""
    return torch.cuda.Stream(device)


class CudaGraph:
    """A CUDA graph: launches on a device, captured once, replayed often."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph = device, torch.cuda.CUDAGraph()
        self._stream = _find_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Inside, launches are recorded into the graph, and not computed. RuntimeError, if CUDA cannot record one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):  # which says less than the error inside
                    self._end()
                raise
            self._end()
        current.wait_stream(self._stream)

    def _end(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:
            _end_failed_capture(self._graph, self._device, self._pool)
            raise

    def replay(self) -> None:
        """Compute all launches on the current stream."""
        self._graph.replay()


def _end_failed_capture(graph: Any, device: torch.device, pool: Any) -> None:
    """Free torch of a capture on the current stream that CUDA has ended with an error. Before torch 2.12 the allocator
    takes it for one under way: then memory that several streams have used never comes back, and `empty_cache` raises.
    The generator of random numbers takes it so as well, and raises at the next one, until another capture has ended.
    Before torch 2.14 nothing gives the capture's own memory back."""
    index = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError, AttributeError):  # of a torch that has ended it itself
        torch.cuda.memory._cuda_endAllocateToPool(index, pool)
    if not _gives_back(graph):
        with contextlib.suppress(RuntimeError, AttributeError):
            torch.cuda.memory._cuda_releasePool(index, pool)
    with contextlib.suppress(RuntimeError):
        other = torch.cuda.CUDAGraph()
        other.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, dtype=torch.float32, device=device)  # torch warns of an empty graph
        other.capture_end()


def _gives_back(graph: Any) -> bool:
    """Whether a graph that could not be captured gives its pool back when it goes. A second time would end the
    process."""
    if torch.__version__ >= "2.14.dev0":  # compared as versions, those before a release too
        return True
    try:
        graph.pool()  # it was captured, and could not be instantiated
    except RuntimeError:
        return False
    return True


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
        self._shared.progress.changing = ""  # a failed capture may have left a layer in the middle of an update
        self._shared.forward_pass.is_prefill_chunk = self._is_prefill_chunk
        for each, before in self._attributes:
            vars(each).update(before)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value
