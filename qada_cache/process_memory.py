"""This process's memory: what it takes at most, where Linux tells, and what malloc gives back to the system (glibc)."""

import ctypes
import functools
import gc
import mmap
import threading
from pathlib import Path
from typing import Any

WORTH_TRIMMING = 64 * 2**20  # bytes
EVERY = 0.002  # seconds
_PAGES = Path("/proc/self/statm")
_least: int | None = None  # anonymous bytes, at the least since the call that followed the last trim for growth


def trim() -> None:
    """Give the system back what malloc holds for nobody (glibc)."""
    if (release := _find_malloc_trim()) is not None:
        release(0)


def trim_growth() -> None:
    """`trim`, if the process has grown by `WORTH_TRIMMING` since the call after the last time.

    A prompt's temporaries of up to 32 MiB come from malloc's heap, and what a layer keeps lies between them: the heap
    grew by 37 MiB a layer of 8,192 tokens, and stayed. Memory that is given back has to be asked for again, which takes
    time: the next layer does, for its own temporaries, and these are no growth.
    """
    global _least
    held = _read_anonymous()
    _least = held if _least is None else min(_least, held)
    if held - _least > WORTH_TRIMMING:
        trim()
        _least = None


@functools.cache
def _find_malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another malloc; Windows
        return None


def _read_anonymous() -> int:
    """Bytes of the process that no file has; 0 where the system does not tell."""
    try:
        resident, of_files = _PAGES.read_text(encoding="utf-8").split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(of_files)) * mmap.PAGESIZE


class PeakMemory:
    """The anonymous memory that the process takes inside a `with` statement above what it had before it.

    A thread looks every `EVERY` seconds, so what is written in that time may be missed. Pages of files do not count, as
    the system may drop them. Garbage and what malloc holds for nobody go first: a tensor that took their place would
    seem to take nothing.
    """

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        trim()
        self._before = self._highest = _read_anonymous()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._watcher.join()

    @property
    def nbytes(self) -> int | None:
        """Bytes, at the highest; None where the system does not tell."""
        return self._highest - self._before if self._before else None

    def _watch(self) -> None:
        while not self._done.wait(EVERY):
            self._highest = max(self._highest, _read_anonymous())
