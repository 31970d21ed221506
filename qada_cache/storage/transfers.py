"""Host memory, and copies between it and the device beside the computation.

Host memory comes in huge pages: with pages of 4 KiB, looking up addresses costs a third of the speed of reading a bulk.
A copy is asynchronous only between pinned host memory and device memory, each contiguous: for anything else the host
waits. So all copies here are of one head of one row, or of few tokens of all heads by a kernel (`kernels/copying.py`).
"""

import contextlib
import functools
import math
import mmap
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from ..forked import renew
from ..kernels.copying import Copier

# The most bytes of copies to the host that are under way, unless a single copy has more: the host waits for older ones.
# Without a bound, a host that runs ahead of the device would find no layer's memory free again: a prefill would need
# the memory of all layers.
IN_FLIGHT_BYTES = 32 * 2**20
# Bytes from which a tensor gets a mapping of its own: malloc would keep the memory of one that a layer has outgrown.
WORTH = 1 << 18
HOST = torch.device("cpu")
Name = TypeVar("Name")


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has memory other than the host's."""
    return device.type != "cpu"


def make_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = HOST) -> Tensor:
    """As `torch.empty`, but large tensors on the CPU have mappings of their own, in huge pages where the system has
    them (Linux)."""
    size = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and size >= WORTH and (memory := map_memory(size)) is not None:
        return torch.frombuffer(memory, dtype=dtype).view(shape)  # the tensor keeps `memory` alive
    return torch.empty(shape, dtype=dtype, device=device)


def map_memory(size: int) -> mmap.mmap | None:
    """`size` bytes of zeros, in huge pages if the kernel has them. None on other systems than Linux, or if the process
    may have no more mappings: malloc may still have memory then."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    with contextlib.suppress(OSError):
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones have small pages
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory
    return None


# Held while a graph is captured, and by those who wait for a whole device: CUDA refuses that while any of its streams
# captures, and ends the capture.
WAITING = renew(threading.RLock())


def wait_for(device: torch.device) -> None:
    """Wait until a device has computed and copied all that was asked of it."""
    with WAITING:
        torch.accelerator.synchronize(device)


@functools.cache
def _find_side_stream(device: torch.device, direction: str) -> Any:
    """The stream of a device on which copies in one direction ("in", "out") run; None if it is no CUDA device."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class AsyncCopy:
    """A bulk's tensors of some tokens of a head, `[1, 1, tokens, *]`, on the device or on their way to it. Read them
    after `wait`."""

    def __init__(self, tensors: tuple[Tensor, ...], event: Any = None) -> None:
        self.tensors, self._event = tensors, event

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, for later computation on the device."""
        if self._event is not None:
            device = self.tensors[0].device
            wait_event(self._event, device)
            for tensor in self.tensors:  # else freed memory would be written to while it is still read
                tensor.record_stream(torch.cuda.current_stream(device))
            self._event = None
        return self.tensors


def wait_event(event: Any, device: torch.device) -> None:
    """Make later computation on `device` wait for `event`; the host does not wait."""
    torch.cuda.current_stream(device).wait_event(event)


def fetch(held: tuple[Tensor, ...], device: torch.device, *, after: Any = None) -> AsyncCopy:
    """Start to copy contiguous host tensors to `device`, after the event of `send` for the last copy into them; None:
    nothing is under way."""
    side = _find_side_stream(device, "in")
    if side is not None and after is not None:
        side.wait_event(after)
    with torch.cuda.stream(side):  # None: the current stream
        tensors = send_to_device(held, device, non_blocking=True)
    return AsyncCopy(tensors, None if side is None else side.record_event())


def make_staging(size: int, device: torch.device) -> Tensor:
    """uint8 `[size]` on `device`, for `refill`. The caller has to `mark` the end of computation with it."""
    with torch.inference_mode(False), torch.cuda.stream(_find_side_stream(device, "in")):  # None: the current stream
        memory = torch.empty(size, dtype=torch.uint8, device=device)
    if memory.is_cuda:  # else freed memory would be written to while it is still read
        memory.record_stream(torch.cuda.current_stream(device))
    return memory


def refill(copies: Iterable[tuple[Tensor, Tensor]], device: torch.device, *, after: Iterable[Any]) -> Any:
    """Start to copy contiguous host tensors into tensors on `device`, `(target, source)` each, after these events (None
    among them: nothing to wait for). Returns an event for the end of the copies; None if they have ended."""
    side = _find_side_stream(device, "in")
    for event in after:
        if event is not None:
            event.synchronize() if side is None else side.wait_event(event)
    with torch.cuda.stream(side):  # None: the current stream
        for target, source in copies:
            target.copy_(source, non_blocking=True)
    return None if side is None else side.record_event()


def bring(tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
    """The same tensors on the host. Those that are elsewhere come in one copy, as the host waits for each."""
    there = {name: each for name, each in tensors.items() if has_own_memory(each.device)}
    brought = {name: each for name, each in tensors.items() if name not in there}
    if there:
        together = torch.cat([each.contiguous().flatten().view(torch.uint8) for each in there.values()]).cpu()
        parts = zip(there.items(), together.split([each.nbytes for each in there.values()]), strict=True)
        # Clones begin where any dtype may.
        brought |= {name: part.clone().view(each.dtype).view(each.shape) for (name, each), part in parts}
    return {name: brought[name] for name in tensors}


def mark(device: torch.device) -> Any:
    """An event after all computation started on `device` so far; None if it is no CUDA device."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def find_reader(device: torch.device) -> Any:
    """The current stream of `device`, on which kernels read host memory; None if it is no CUDA device."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def double_buffer(async_copies: Iterator[tuple[Name, AsyncCopy]]) -> Iterator[tuple[Name, tuple[Tensor, ...]]]:
    """Copies' tensors as they arrive, each under its name. Each copy is started before the one in front of it is used,
    the first at once. At most three are on the device: one in use, one waiting, one under way."""

    def arrive(first: tuple[Name, AsyncCopy] | None) -> Iterator[tuple[Name, tuple[Tensor, ...]]]:
        used: deque[Any] = deque()
        while first is not None:
            if len(used) > 1:
                used.popleft().synchronize()  # a host that runs ahead would find memory that it let go of still in use
            upcoming = next(async_copies, None)
            name, tensors = first[0], first[1].wait()
            yield name, tensors
            if tensors[0].is_cuda:
                used.append(torch.cuda.current_stream(tensors[0].device).record_event())
            first = upcoming

    return arrive(next(async_copies, None))


_incoming: dict[torch.device, deque[tuple[Any, int]]] = {}
_outgoing: dict[torch.device, deque[tuple[Any, int]]] = {}
_booking = renew(threading.Lock())  # caches in several threads send to the host


def send(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, copier: Copier | None = None) -> Any:
    """Start to copy sources on `device` to host tensors: `(target, source)` each, of the same shape, contiguous unless
    a `copier` for them is given.

    The sources may be freed at once. Returns an event for the end of the copies. None: they have ended, or, on an
    accelerator other than CUDA, end with `torch.accelerator.synchronize`.
    """
    side, sent = _find_side_stream(device, "out"), 0
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # None: the current stream
        if copier is not None:
            copier(pairs, device)
        for target, source in pairs:
            if copier is None:
                target.copy_(source, non_blocking=True)
            if source.is_cuda:
                source.record_stream(side)
            sent += source.nbytes
    if side is None:
        return None
    event = side.record_event()
    limit_in_flight(_outgoing.setdefault(device, deque()), event, sent)
    return event


def limit_reads(parts: tuple[Tensor, ...]) -> None:
    """Bound the bytes on the device that were copied there and that computation may still read, as `limit_in_flight`
    does. A host that ran further ahead would find no memory free."""
    device = parts[0].device
    if (event := mark(device)) is not None:
        limit_in_flight(_incoming.setdefault(device, deque()), event, sum(part.nbytes for part in parts))


def limit_in_flight(booked: deque[tuple[Any, int]], event: Any, sent: int) -> None:
    """Book a copy of `sent` bytes that ends with `event`; wait for the oldest ones until `IN_FLIGHT_BYTES` holds."""
    with _booking:
        older = sum(bytes_sent for _, bytes_sent in booked)
        while booked and older + sent > IN_FLIGHT_BYTES:
            oldest, bytes_sent = booked.popleft()
            oldest.synchronize()
            older -= bytes_sent
        booked.append((event, sent))
