"""Measures this process's memory (Linux)."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def taken() -> int:
    """Bytes of memory of this process, without files that it maps. Pages that it maps several times count once.

    Its share of torch's libraries, which are files, would grow whenever another process of the tests ends.
    """
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


@contextmanager
def takes_at_most(size: float) -> Iterator[None]:
    """Assert that the block leaves this process with at most `size` bytes more."""
    before = taken()
    yield
    assert taken() - before <= size
