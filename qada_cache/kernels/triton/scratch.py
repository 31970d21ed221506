"""Memory by which the kernels of one step tell each other numbers. Steps take turns at it, as layers and caches do."""

import threading
import weakref

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, as of an allocation


class Buffer:
    """Bytes of a device. More are another tensor, so that steps which were bound to fewer may go on with these."""

    def __init__(self) -> None:
        self.bytes: Tensor | None = None

    def take(self, size: int, device: torch.device) -> Tensor:
        """`size` bytes or more."""
        if self.bytes is None or self.bytes.numel() < size:
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        return self.bytes


class _Buffers(threading.local):
    """By the stream that orders what its steps do. Another thread's might come between two kernels of one of them."""

    def __init__(self) -> None:
        self.of: weakref.WeakValueDictionary[tuple[torch.device, int], Buffer] = weakref.WeakValueDictionary()


_buffers = _Buffers()


class Scratch:
    """Tensors of one layer's steps, by name, all in the buffer that its thread has for the current stream."""

    def __init__(self, **parts: tuple[torch.dtype, int]) -> None:
        """`parts` are dtypes and numbers of elements."""
        self._parts, self._places, self._size = parts, {}, 0
        for name, (dtype, count) in parts.items():
            nbytes = count * dtype.itemsize
            self._places[name] = slice(self._size, self._size + nbytes)
            self._size += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._buffer: Buffer | None = None  # kept as long as a step is bound to it
        self._bytes: Tensor | None = None
        self._tensors: dict[str, Tensor] = {}

    def find(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors `[elements]`, by name. A captured graph gets memory that is its own."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._cut(torch.empty(self._size, dtype=torch.uint8, device=device))
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        buffer = _buffers.of.get((device, stream))
        if buffer is None:
            buffer = _buffers.of[device, stream] = Buffer()
        if (found := buffer.take(self._size, device)) is not self._bytes:
            self._buffer, self._bytes, self._tensors = buffer, found, self._cut(found)
        return self._tensors

    def keeps(self, tensors: dict[str, Tensor]) -> bool:
        """Whether they are those that `find` gives until a step needs more, and no captured graph's."""
        return tensors is self._tensors

    def _cut(self, found: Tensor) -> dict[str, Tensor]:
        return {name: found[place].view(self._parts[name][0]) for name, place in self._places.items()}
