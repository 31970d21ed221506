"""Pinned host memory of any size: mappings that are registered with CUDA.

Torch rounds the size of pinned memory up to a power of two, so up to twice what is asked for, and the driver maps its
pages one by one. The mappings here have huge pages, which all threads touch before they are pinned.

Copies and kernels may be under way when a tensor is dropped. So its memory stays pinned until more is asked for, or
memory runs short (`release`). Then it is used again or freed, after the devices have been waited for.
"""

import contextlib
import ctypes
import math
import mmap
import weakref

import torch
from torch import Tensor

from . import transfers

FLAGS = 3  # cudaHostRegisterPortable, for every device, and cudaHostRegisterMapped, for kernels to read it in place
REUSED = 1.5  # unused memory is used again for a size if it is at most this many times as large
_held: dict[int, int] = {}  # bytes of memory in use, by address
_retired: list[mmap.mmap] = []  # pinned memory whose tensors are gone; devices may still use it
_idle: list[mmap.mmap] = []  # pinned memory that neither tensors nor devices use
_devices: set[torch.device] = set()  # those that may use any of this memory


def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor in pinned memory, for copies to and from a CUDA device. RuntimeError, if the system has
    or allows no more."""
    count = math.prod(shape)
    size = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    _devices.add(device)
    memory = _take_idle(size) or _pin(size, device)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    address = ctypes.addressof(view)
    _held[address] = len(memory)
    weakref.finalize(view, _retire, memory, address).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count).view(shape)  # the tensor keeps `view` alive


def serve(device: torch.device) -> None:
    """Note that `device` uses memory that was made for another device, so that it is waited for, too."""
    _devices.add(device)


def count_bytes(tensor: Tensor) -> int:
    """Bytes of memory behind a whole tensor. If torch pinned it, they are a power of two (torch's default)."""
    if (held := _held.get(tensor.data_ptr())) is not None:
        return held
    return 1 << (tensor.nbytes - 1).bit_length() if tensor.nbytes and tensor.is_pinned() else tensor.nbytes


def _retire(memory: mmap.mmap, address: int) -> None:
    """Note memory whose last tensor is gone. Any thread may drop a tensor at any point, so this waits for nothing."""
    _held.pop(address, None)
    _retired.append(memory)


def _take_idle(size: int) -> mmap.mmap | None:
    """Unused pinned memory of `size` bytes up to `REUSED` times that. If there is none: None, and all unused pinned
    memory is freed."""
    with transfers.WAITING:  # caches in several threads ask for memory
        _wait_for_retired()
        fitting = [memory for memory in _idle if size <= len(memory) <= REUSED * size]
        if fitting:
            _idle.remove(best := min(fitting, key=len))
            return best
        _free_idle()
    return None


def release() -> int:
    """Give all unused pinned memory back to the system; returns its bytes. RuntimeError, if CUDA does not let it go."""
    with transfers.WAITING:
        _wait_for_retired()
        freed = sum(map(len, _idle))
        _free_idle()
    return freed


def _wait_for_retired() -> None:
    """Wait for devices that may still use memory whose tensors are gone, so that it is idle then."""
    if retired := [_retired.pop() for _ in range(len(_retired))]:
        try:
            for device in tuple(_devices):
                _synchronize(device)
        except BaseException:  # devices may still use it
            _retired.extend(retired)
            raise
        _idle.extend(retired)


def _free_idle() -> None:
    while _idle:
        _unregister(_find_address(_idle[-1]))  # before `del` unmaps its pages
        del _idle[-1]


def _pin(size: int, device: torch.device) -> mmap.mmap:
    memory = transfers.map_memory(size)
    if memory is None:
        raise RuntimeError("the system maps no more memory")
    if hasattr(mmap, "MADV_DONTFORK"):  # after a fork, a write may move a page that the device goes on to use
        memory.madvise(mmap.MADV_DONTFORK)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()  # touches the pages, by all threads
    _register(_find_address(memory), size, device)
    return memory


def _find_address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _register(address: int, size: int, device: torch.device) -> None:
    with torch.cuda.device(device):  # CUDA takes memory on the current one, which may be none that is used
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, FLAGS))
    if code:
        _clear_error()
        raise RuntimeError(f"CUDA refuses to pin {size} bytes (error {code})")


def _unregister(address: int) -> None:
    if code := int(torch.cuda.cudart().cudaHostUnregister(address)):
        _clear_error()
        raise RuntimeError(f"CUDA does not let go of memory that it has pinned (error {code})")


def _clear_error() -> None:
    """Launch a kernel on each device that raises CUDA's last error: CUDA keeps it for the next launch."""
    for device in tuple(_devices):
        with contextlib.suppress(RuntimeError):
            torch.ones((), dtype=torch.float32, device=device)


def _synchronize(device: torch.device) -> None:
    torch.cuda.synchronize(device)
