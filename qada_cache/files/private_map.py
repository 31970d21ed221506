"""Files as memory that each holder may write to: a page is copied when it is written to, and not before."""

import math
import os
import signal
import weakref

import torch
from torch import Tensor

# Linux, where an open file can be mapped again by its descriptor, and memory can be a file.
AVAILABLE = hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")
WORTH = 4 << 20  # bytes; to copy less costs nothing


class OpenFile:
    """A descriptor, closed when nobody refers to this any more. Others may find its file at `path` (None: nowhere), and
    rename, replace or delete it."""

    def __init__(self, descriptor: int, path: str | None) -> None:
        self._descriptor, self.path = descriptor, path
        weakref.finalize(self, os.close, descriptor)
        self._before = os.fstat(descriptor)

    @property
    def quiet(self) -> bool:
        """Whether nobody has it open for writing; False if the system cannot tell, as of network file systems, and of
        a file that is another user's."""
        import fcntl

        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored; the default one ends us
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # else writers would wait
        except OSError:
            return False
        return True

    def map(self, *, shared: bool) -> Tensor:
        """The file's content, uint8 `[size]`; writes go to it if `shared`. A RuntimeError if the system has no room."""
        size = os.fstat(self._descriptor).st_size
        return torch.from_file(f"/proc/self/fd/{self._descriptor}", shared=shared, size=size, dtype=torch.uint8)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if others have written to it since it was opened: its maps may show that."""
        now, before = os.fstat(self._descriptor), self._before
        if self.path is not None and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise RuntimeError(
                f"{self.path} was written to in place after this cache was loaded from it, so tokens may have changed: "
                "reset() or load it again, and replace such files by save() or a rename"
            )


class PrivateMap:
    """A file's content, uint8 `[size]`, as memory of one holder; nobody may write to the file. `copy.deepcopy` maps it
    once more: the copy holds the file's content, without writes to this map. Pages that nobody has written to take
    memory once, however often they are mapped."""

    def __init__(self, file: OpenFile) -> None:
        self.file, self.content = file, file.map(shared=False)

    def __deepcopy__(self, memo: dict) -> "PrivateMap":
        return PrivateMap(self.file)

    def view_tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor that begins at byte `start`, a multiple of its elements' size."""
        size = math.prod(shape) * dtype.itemsize
        return self.content[start : start + size].view(dtype).view(shape)

    def find_same(self, tensor: Tensor) -> Tensor:
        """The tensor that lies here where `tensor` lies in another map of the file."""
        return self.view_tensor(int(tensor.storage_offset()) * tensor.element_size(), tensor.shape, tensor.dtype)


def create_anonymous(size: int) -> OpenFile:
    """A file of `size` zeros in memory alone, which takes memory for its written pages; an OSError if there is none."""
    file = OpenFile(os.memfd_create("qada-cache"), None)
    os.ftruncate(file._descriptor, size)
    return file
