"""A stand-in for a CUDA graph on a CPU: a replay repeats the captured operators on the very tensors of the capture.

A real graph computes nothing during its capture. Here operators compute, since later ones need shapes of results, and
tensors that they wrote to are restored afterwards. Operators that read numbers on the host raise, as during a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qada_cache.kernels.triton import launching

LOOKS = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero")


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph, self.paused = graph, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return function(*args, **kwargs)
        if function.overloadpacket.__name__ in LOOKS:
            raise RuntimeError(f"{function} waits for the device, which no graph does")
        if function._schema.is_mutable:
            self.graph.keep(args, kwargs)
        found = function(*args, **kwargs)
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        # Under inference mode some operators return a view or a copy: the storages of results say which.
        made = [leaf for leaf in tree_leaves(found) if torch.is_tensor(leaf)]
        places = [None if leaf.untyped_storage().data_ptr() in given else leaf for leaf in made]
        if function._schema.is_mutable or any(place is not None for place in places):
            self.graph.steps.append((lambda: function(*args, **kwargs), places))
        return found


class RecordedGraph:
    """Stands in for `decode_graph.capturing.CudaGraph`. `steps` are operators and launches with their results."""

    replays = 0  # of all graphs

    def __init__(self, device: torch.device) -> None:
        self.steps: list[tuple[Callable[[], Any], list[Tensor | None]]] = []
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, *given: Any) -> None:
        """Remember the contents of these tensors' storages, before they are written to."""
        for leaf in tree_leaves(given):
            if torch.is_tensor(leaf) and leaf.numel():
                whole = torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage())
                self._kept.setdefault(whole.data_ptr(), (whole, whole.clone()))

    @contextmanager
    def capture(self) -> Iterator[None]:
        launch, recorder = launching.Launches.launch, _Recorder(self)

        def record(own: Any, kernel: Any, grid: Any, variant: Any, *args: Any) -> None:
            recorder.paused = True
            try:
                self.keep(args)
                launch(own, kernel, grid, variant, *args)
            finally:
                recorder.paused = False
            self.steps.append((lambda: launch(own, kernel, grid, variant, *args), []))

        try:
            with mock.patch.object(launching.Launches, "launch", record), recorder:
                yield
        finally:
            for now, before in self._kept.values():
                now.copy_(before)
            self._kept.clear()

    def replay(self) -> None:
        RecordedGraph.replays += 1
        for step, places in self.steps:
            made = [leaf for leaf in tree_leaves(step()) if torch.is_tensor(leaf)]
            for place, one in zip(places, made, strict=bool(places)):
                if place is not None:
                    place.copy_(one)
