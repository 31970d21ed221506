"""When Python may collect garbage."""

import contextlib
import gc
import threading
from collections.abc import Iterator

from .forked import renew

_counting = renew(threading.Lock())
_inside, _collected = 0, False  # how many are inside, and whether garbage was collected before the first of them


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Inside, no garbage is collected by itself, in any thread, until the last thread inside leaves."""
    global _inside, _collected
    with _counting:
        if not _inside:
            _collected = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _counting:
            _inside -= 1
            if not _inside and _collected:
                gc.enable()
