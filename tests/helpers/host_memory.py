"""What this process takes of the machine's memory (Linux)."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def taken() -> int:
    """Bytes that this process takes, but for files; pages that it maps several times count once.

    Files are left out: its part of torch's own grows when another process of the tests ends.
    """
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


@contextmanager
def takes_at_most(size: float) -> Iterator[None]:
    before = taken()
    yield
    assert taken() - before <= size
