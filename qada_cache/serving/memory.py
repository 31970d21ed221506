"""How much memory this process may have, and how much of it is left."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_TREE = Path("/sys/fs/cgroup")
_FILES = {  # by name of the hierarchy: the limit, what is taken, and the parts of it that the system can take back
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),  # version 2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def host_memory() -> int:
    """Bytes: the machine's, a control group's (a container's) or those of `ulimit -v`, whichever is least."""
    return min((most for most, _ in _limits()), default=sys.maxsize)


def memory_left() -> int:
    """Of them, bytes that this process may still take; 2^63 - 1 on a system that does not say."""
    return max(0, min((most - taken for most, taken in _limits()), default=sys.maxsize))


def _limits() -> Iterator[tuple[int, int]]:
    """Bytes that may be taken, and that are."""
    machine = _table(Path("/proc/meminfo"))
    if "MemTotal" in machine:
        total = 1024 * machine["MemTotal"]
        yield total, total - 1024 * machine.get("MemAvailable", machine["MemTotal"])
    elif "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0
    yield from _control_groups()
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            pages = _text(Path("/proc/self/statm")).split()
            yield soft, int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _control_groups() -> Iterator[tuple[int, int]]:
    """Of this process's own group and of all around it, those that have a limit."""
    for line in _text(_GROUPS).splitlines():
        _, hierarchy, path = line.split(":", 2)
        if hierarchy not in _FILES:
            continue
        limit, usage, cached = _FILES[hierarchy]
        own = _TREE / hierarchy / path.lstrip("/")
        for folder in (own, *own.parents[: len(Path(path).parts) - 1]):  # up to the tree's root, a container's own
            most, taken = _text(folder / limit).strip(), _text(folder / usage).strip()
            if most.isdigit() and taken.isdigit():
                parts = _table(folder / "memory.stat")
                yield int(most), int(taken) - sum(parts.get(name, 0) for name in cached)


def _table(path: Path) -> dict[str, int]:
    """Numbers by name, as Linux writes them."""
    rows = (line.replace(":", "").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    """What a file of the system says, nothing if it is not there."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
