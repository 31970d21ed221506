"""Copies between host and device that run beside the computation: side streams, and how much may be under way.

A copy is asynchronous only between pinned host memory and device memory, each contiguous: anything else goes through a
pageable temporary, and the host waits for it. So all copies here are of one head of one row.
"""

import functools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from accelerate.utils import send_to_device
from torch import Tensor

# At most so many bytes of copies to the host, or a single copy, are under way: the host waits for older ones. Without a
# bound, a host that runs ahead of the device would find no layer's memory free again, and a prefill would need it all.
IN_FLIGHT_BYTES = 32 * 2**20
Name = TypeVar("Name")


@functools.cache
def _side_stream(device: torch.device, direction: str) -> Any:
    """The stream of a device on which copies in one direction ("in", "out") run; None where there is no such thing."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class Arrival:
    """Keys and values on their way to the device; `tensors` are not to be read before `wait`."""

    def __init__(self, tensors: tuple[Tensor, Tensor], event: Any = None) -> None:
        self.tensors, self._event = tensors, event

    def landed(self) -> bool:
        """Whether they are there, so that nothing would have to wait."""
        return self._event is None or self._event.query()

    def wait(self) -> tuple[Tensor, Tensor]:
        """Keys and values, for later computation on the device."""
        if self._event is not None:
            device = self.tensors[0].device
            join(self._event, device)
            for tensor in self.tensors:  # else freed memory would be written to while it is still read
                tensor.record_stream(torch.cuda.current_stream(device))
        return self.tensors


def join(event: Any, device: torch.device) -> None:
    """Make later computation on `device` wait for `event`; the host does not wait."""
    torch.cuda.current_stream(device).wait_event(event)


def fetch(keys: Tensor, values: Tensor, device: torch.device, *, after: Any = None) -> Arrival:
    """Start to copy `keys` and `values`, contiguous host tensors, to `device`.

    `after`: the event of `send` for the last copy into them, None if nothing is under way.
    """
    side = _side_stream(device, "in")
    if side is None:
        return Arrival(send_to_device((keys, values), device, non_blocking=True))
    if after is not None:
        side.wait_event(after)
    with torch.cuda.stream(side):
        tensors = send_to_device((keys, values), device, non_blocking=True)
    return Arrival(tensors, side.record_event())


def reader(device: torch.device) -> Any:
    """The stream that kernels read host memory on from now on; None where none does."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def outlive(stream: Any, keys: Tensor, values: Tensor) -> None:
    """Let go of host tensors `[batch, heads, tokens, dim]` that kernels on `stream` may still read in place.

    Torch keeps pinned memory until copies of it have ended, and knows nothing of kernels: one token is copied after
    them.
    """
    if stream is not None and not stream.query():
        fetch(keys[:1, :1, :1], values[:1, :1, :1], stream.device, after=stream.record_event())


class Note:
    """A small tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._event = tensor, None
        if tensor.is_cuda:
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Any:
        """The content, as `Tensor.tolist`; None if it is not there yet."""
        return self._tensor.tolist() if self._event is None or self._event.query() else None


def ahead(arrivals: Iterator[tuple[Name, Arrival]]) -> Iterator[tuple[Name, tuple[Tensor, Tensor]]]:
    """Keys and values as they arrive, each under its name. Each copy is started before the one in front of it is used,
    the first at once.

    At most three are on the device: one in use, one waiting, one under way.
    """
    return _ahead(next(arrivals, None), arrivals)


def _ahead(
    first: tuple[Name, Arrival] | None, arrivals: Iterator[tuple[Name, Arrival]]
) -> Iterator[tuple[Name, tuple[Tensor, Tensor]]]:
    used: deque[Any] = deque()
    while first is not None:
        if len(used) > 1:
            used.popleft().synchronize()  # a host that runs ahead would find no memory free that it has let go of
        following = next(arrivals, None)
        name, tensors = first[0], first[1].wait()
        yield name, tensors
        if tensors[0].is_cuda:
            used.append(torch.cuda.current_stream(tensors[0].device).record_event())
        first = following


_outgoing: dict[torch.device, deque[tuple[Any, int]]] = {}
_booking = threading.Lock()  # caches in several threads send to the host


def send(copies: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Any:
    """Start to copy sources on `device` to contiguous host tensors: `(target, source)` each, of the same shape.

    The sources may be freed at once. Returns an event for the end of the copies. None: they have ended, or on an
    accelerator other than CUDA will have after `torch.accelerator.synchronize`.
    """
    side = _side_stream(device, "out")
    if side is None:
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        return None
    side.wait_stream(torch.cuda.current_stream(device))
    sent = 0
    with torch.cuda.stream(side):
        for target, source in copies:
            target.copy_(source, non_blocking=True)
            if source.is_cuda:
                source.record_stream(side)
            sent += source.nbytes
    event = side.record_event()
    hold_back(_outgoing.setdefault(device, deque()), event, sent)
    return event


def hold_back(outgoing: deque[tuple[Any, int]], event: Any, sent: int) -> None:
    """Book a copy of `sent` bytes that ends with `event`; wait for the oldest ones until `IN_FLIGHT_BYTES` holds."""
    with _booking:
        older = sum(bytes_sent for _, bytes_sent in outgoing)
        while outgoing and older + sent > IN_FLIGHT_BYTES:
            oldest, bytes_sent = outgoing.popleft()
            oldest.synchronize()
            older -= bytes_sent
        outgoing.append((event, sent))
