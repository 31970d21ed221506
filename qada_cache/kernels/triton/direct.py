"""Direct launches of compiled kernels: without Triton's own lookup, which takes the host longer than the launch."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

_HERE = contextlib.nullcontext()


class Field(NamedTuple):
    """Stands in for an argument that changes from step to step: its place among all such."""

    place: int


class DirectLaunch:
    """A launch of a compiled kernel as Triton does it, but for a description of all arguments that only a hook would
    read."""

    def __init__(self, compiled: Any, grid: tuple[int, int, int], args: Iterable[Any]) -> None:
        """`args`: all of the kernel's, constants included, with a `Field` for each that changes. Tensors may be given
        by their addresses: Triton would ask each tensor for its address, and the driver for each of these."""
        self._run, self._arguments = compiled.run, _list_arguments(compiled, grid, None, args)
        self._runs = _find_runs(self._arguments)

    def launch(self, stream: int, changing: Sequence[Any] = ()) -> None:
        """Launch it. `changing` has the value of each `Field`."""
        arguments = self._arguments
        arguments[3] = stream
        for places, fields in self._runs:
            arguments[places] = changing[fields]
        self._run(*arguments)


def launch_once(compiled: Any, grid: tuple[int, int, int], args: Iterable[Any]) -> None:
    """As a `DirectLaunch`, of which nothing is kept."""
    compiled.run(*_list_arguments(compiled, grid, find_stream(), args))


def _list_arguments(compiled: Any, grid: tuple[int, int, int], stream: int | None, args: Iterable[Any]) -> list[Any]:
    """Arguments of Triton's launcher: no metadata for hooks, and no hooks; then the kernel's own."""
    return [*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args]


def _find_runs(arguments: list[Any]) -> list[tuple[slice, slice]]:
    """The places of each `Field` among all arguments and among those that change. Neighbours are written at once, so
    they are found together."""
    runs: list[tuple[int, int, int]] = []  # both, and their number
    for place, each in enumerate(arguments):
        if isinstance(each, Field):
            first, field, count = runs[-1] if runs else (0, 0, 0)
            if (place, each.place) == (first + count, field + count):
                runs[-1] = first, field, count + 1
            else:
                runs.append((place, each.place, 1))
    return [(slice(first, first + count), slice(field, field + count)) for first, field, count in runs]


def find_stream() -> int:
    """The handle of the current device's current stream."""
    active = driver.active
    return active.get_current_stream(active.get_current_device())


def at_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Inside, Triton launches on this device, which is the current one. To set it costs as much as a launch, so that is
    done only if need be."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return _HERE if is_current else torch.cuda.device(device)
