"""Scratch memory through which the kernels of one decode step pass each other intermediate results. All layers and all
caches share it, as their steps run one after the other."""

import threading
import weakref

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, as torch aligns allocations on a GPU


class Buffer:
    """One tensor of bytes on a device. Growing replaces it, so steps that were bound to the smaller one can go on with
    that."""

    def __init__(self, owner: tuple[int, torch.device, int]) -> None:
        self.owner = owner  # thread, device and CUDA stream
        self.bytes: Tensor | None = None

    def take(self, size: int, device: torch.device) -> Tensor:
        """`size` bytes or more."""
        if self.bytes is None or self.bytes.numel() < size:
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        return self.bytes


class _Buffers(threading.local):
    """A thread's buffers, by device and CUDA stream. A stream runs a thread's steps in order; another thread's kernels
    could come between the kernels of one step, so no buffer is shared with it."""

    def __init__(self) -> None:
        self.by_stream: weakref.WeakValueDictionary[tuple[torch.device, int], Buffer] = weakref.WeakValueDictionary()


_buffers = _Buffers()


class Scratch:
    """Named scratch tensors of one layer's steps, all in the buffer that the calling thread has for its current
    stream."""

    def __init__(self, **parts: tuple[torch.dtype, int]) -> None:
        """`parts`: the dtype and the number of elements of each tensor, by name."""
        self._parts, self._places, self._size = parts, {}, 0
        for name, (dtype, count) in parts.items():
            nbytes = count * dtype.itemsize
            self._places[name] = slice(self._size, self._size + nbytes)
            self._size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._buffer: Buffer | None = None  # kept as long as a step is bound to it
        self._bytes: Tensor | None = None
        self._tensors: dict[str, Tensor] = {}

    def find(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors `[elements]`, by name. A captured graph gets memory of its own."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._cut(torch.empty(self._size, dtype=torch.uint8, device=device))
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        owner, held = (threading.get_ident(), device, stream), self._buffer
        if held is not None and held.owner == owner and held.bytes is self._bytes:
            return self._tensors
        buffer = _buffers.by_stream.get((device, stream))
        if buffer is None:
            buffer = _buffers.by_stream[device, stream] = Buffer(owner)
        if (memory := buffer.take(self._size, device)) is not self._bytes:
            self._buffer, self._bytes, self._tensors = buffer, memory, self._cut(memory)
        return self._tensors

    def keeps(self, tensors: dict[str, Tensor]) -> bool:
        """Whether `tensors` are those of `find` until the buffer grows, and not a captured graph's."""
        return tensors is self._tensors

    def _cut(self, memory: Tensor) -> dict[str, Tensor]:
        return {name: memory[place].view(self._parts[name][0]) for name, place in self._places.items()}
