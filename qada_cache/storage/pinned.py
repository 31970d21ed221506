"""Pinned host memory of any size: mappings that are registered with CUDA.

Torch's own comes in powers of two, so up to twice of what is asked for, and the driver brings its pages one by one.
These are huge pages, brought by all threads before they are pinned.

Copies and kernels may be under way when memory is let go of. So it stays pinned until more is asked for. Then it is
used again or freed, after the devices have been waited for.
"""

import contextlib
import ctypes
import math
import mmap
import threading
import weakref

import torch
from torch import Tensor

from . import transfers

FLAGS = 3  # cudaHostRegisterPortable, for every device, and cudaHostRegisterMapped, for kernels to read it in place
REUSED = 1.5  # memory of at most so many times the size is used again
_held: dict[int, int] = {}  # bytes of memory in use, by address
_retired: list[mmap.mmap] = []  # let go of, and pinned still
_idle: list[mmap.mmap] = []  # of these, what devices have been waited for
_choosing = threading.Lock()  # caches in several threads ask for memory
_devices: set[torch.device] = set()  # that may use any of it


def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised, for copies to and from a CUDA device; RuntimeError, if the system has or allows no more."""
    count = math.prod(shape)
    size = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    _devices.add(device)
    memory = _take_idle(size) or _pin(size)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    address = ctypes.addressof(view)
    _held[address] = len(memory)
    weakref.finalize(view, _retire, memory, address).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count).view(shape)  # which keeps the view


def serve(device: torch.device) -> None:
    """Memory that was made for another device is used by this one, too."""
    _devices.add(device)


def count_bytes(tensor: Tensor) -> int:
    """Bytes that a whole tensor's memory takes: of what torch pins a power of two (unless it is told otherwise)."""
    if (held := _held.get(tensor.data_ptr())) is not None:
        return held
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.nbytes and tensor.is_pinned() else tensor.nbytes


def _retire(memory: mmap.mmap, address: int) -> None:
    """Note memory whose last tensor is gone. Any thread may drop it, in the middle of anything: this waits for
    nothing."""
    _held.pop(address, None)
    _retired.append(memory)


def _take_idle(size: int) -> mmap.mmap | None:
    """Memory of `size` bytes or somewhat more, pinned already. If there is none, all that was let go of is freed."""
    with _choosing:
        if retired := [_retired.pop() for _ in range(len(_retired))]:
            for device in tuple(_devices):
                _synchronize(device)
            _idle.extend(retired)
        fitting = [memory for memory in _idle if size <= len(memory) <= REUSED * size]
        if fitting:
            _idle.remove(best := min(fitting, key=len))
            return best
        while _idle:
            memory = _idle.pop()
            _unregister(_find_address(memory))  # before its pages go, as this reference does
            del memory
    return None


def _pin(size: int) -> mmap.mmap:
    memory = transfers.map_memory(size)
    if memory is None:
        raise RuntimeError("the system maps no more memory")
    if hasattr(mmap, "MADV_DONTFORK"):  # a fork would have pages copied that the device goes on to use
        memory.madvise(mmap.MADV_DONTFORK)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()  # brings the pages
    _register(_find_address(memory), size)
    return memory


def _find_address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _register(address: int, size: int) -> None:
    if code := int(torch.cuda.cudart().cudaHostRegister(address, size, FLAGS)):
        _clear_error()
        raise RuntimeError(f"CUDA refuses to pin {size} bytes (error {code})")


def _unregister(address: int) -> None:
    if code := int(torch.cuda.cudart().cudaHostUnregister(address)):
        _clear_error()
        raise RuntimeError(f"CUDA does not let go of memory that it has pinned (error {code})")


def _clear_error() -> None:
    """CUDA keeps an error for the next launch to raise: this one raises it."""
    for device in tuple(_devices):
        with contextlib.suppress(RuntimeError):
            torch.ones((), dtype=torch.float32, device=device)


def _synchronize(device: torch.device) -> None:
    torch.cuda.synchronize(device)
