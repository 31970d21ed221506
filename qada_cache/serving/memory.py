"""How much memory this process may have."""

import os
import sys
from pathlib import Path

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # version 2, version 1


def host_memory() -> int:
    """Bytes: the least of the machine's, the container's and the rest under `ulimit -v`."""
    found = [_machine(), *filter(None, map(_number, _CGROUPS))]
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        found += [] if soft == resource.RLIM_INFINITY else [soft]
    return min(found)


def _machine() -> int:
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sys.maxsize  # unknown: the number and age of conversations are limits too


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max"
