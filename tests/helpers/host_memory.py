"""What this process takes of the machine's memory (Linux)."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def taken() -> int:
    """Bytes that this process takes; pages it has in common with others, or maps several times, count once."""
    gc.collect()
    (line,) = (line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


@contextmanager
def takes_at_most(size: float) -> Iterator[None]:
    before = taken()
    yield
    assert taken() - before <= size
