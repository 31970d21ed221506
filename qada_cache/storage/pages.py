"""Host memory in huge pages: with pages of 4 KiB, looking up addresses costs a third of the speed of reading a bulk."""

import contextlib
import math
import mmap

import torch
from torch import Tensor

WORTH = 4 << 20  # bytes; less fits few huge pages of 2 MiB


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As `torch.empty` on the CPU, in huge pages where the system has them (Linux) and the tensor is large enough."""
    size = math.prod(shape) * dtype.itemsize
    if size < WORTH or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages only
    with contextlib.suppress(OSError):  # a kernel without them: pages of the usual size, then
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)  # which keeps the memory


def held_bytes(tensor: Tensor) -> int:
    """Host memory that a tensor takes, rounded up where it is pinned."""
    return pinned_bytes(tensor.nbytes) if tensor.is_pinned() else tensor.nbytes


def pinned_bytes(size: int) -> int:
    """The block of `size` bytes that torch pins: a power of two (unless it is told otherwise)."""
    return 1 << (size - 1).bit_length()
