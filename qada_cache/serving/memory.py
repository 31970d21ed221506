"""How much memory this process may have, and whether there is enough for a call before it begins.

A process that takes too much is killed, and all others' calls with it.
"""

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # which accelerate requires
from transformers import PreTrainedModel

from ..models import list_token_sizes, read_sizes
from ..sketch import MIN_TOKENS
from ..sketch.coded import RecordLayout
from ..state import BULK_BITS

_GROUPS = Path("/proc/self/cgroup")
_TREE = Path("/sys/fs/cgroup")
_FILES = {  # by name of the hierarchy: the limit, what is taken, and the parts of it that the system can take back
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),  # version 2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
_reserved: list[int] = []  # bytes, of the calls under way
_lock = threading.Lock()


def find_host_memory() -> int:
    """Bytes: the machine's, a control group's (a container's) or those of `ulimit -v`, whichever is least."""
    return min(most for most, _ in _read_limits())


def find_memory_left() -> int:
    """Of them, bytes that this process may still take."""
    return max(0, min(most - taken for most, taken in _read_limits()))


def _read_limits() -> Iterator[tuple[int, int]]:
    """Bytes that may be taken, and that are."""
    machine = psutil.virtual_memory()
    yield machine.total, machine.total - machine.available
    if sys.platform != "win32":
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            yield soft, psutil.Process().memory_info().vms
    for line in _read_text(_GROUPS).splitlines():
        _, hierarchy, path = line.split(":", 2)
        if hierarchy not in _FILES:
            continue
        limit, usage, cached = _FILES[hierarchy]
        own = _TREE / hierarchy / path.lstrip("/")
        for folder in (own, *own.parents[: len(Path(path).parts) - 1]):  # up to the tree's root, a container's own
            most, taken = _read_text(folder / limit).strip(), _read_text(folder / usage).strip()
            if most.isdigit() and taken.isdigit():
                parts = dict(re.findall(r"(?m)^(\w+) (\d+)$", _read_text(folder / "memory.stat")))
                yield int(most), int(taken) - sum(int(parts.get(name, 0)) for name in cached)


def _read_text(path: Path) -> str:
    """What a file of the system says, nothing if it is not there."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def estimate_bytes(model: PreTrainedModel, tokens: int, at_once: int, bulk_bits: int = BULK_BITS) -> int:
    """Host memory that `tokens` more tokens take at the peak, `at_once` of them read in one pass: roughly, rather more.
    It is every layer's keys and values, or records with the last tokens as they are, with a sketch and room to grow,
    and one layer's activations on the host."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_attention_heads", None) is None:  # states alone, which do not grow with a text
        return 0
    layers, heads, *_ = read_sizes(config)
    kv_heads, dim, _ = map(max, zip(*list_token_sizes(config), strict=True))
    element_bytes = model.dtype.itemsize
    kept, records = 3.0 * dim * element_bytes, RecordLayout.from_bits(dim, dim, bulk_bits)  # of one KV head
    beside = 0.0 if records is None else min(tokens, MIN_TOKENS) * kept
    if records is not None:
        kept = 1.5 * (records.size + dim / 4)
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest = max(wide) if isinstance(wide, (list, tuple)) else wide
    passing = (3 * widest + 8 * config.hidden_size) * element_bytes + 8 * heads * dim * 4
    held = layers * kv_heads * (tokens * kept + beside)
    return int(held + (at_once * passing if model.device.type == "cpu" else 0))


@contextlib.contextmanager
def reserve_memory(tokens: int, needed: int, *, forget: Callable[[], int]) -> Iterator[None]:
    """Set `needed` bytes aside while a call that reads `tokens` tokens is under way.

    What calls have taken already counts as well as what they were promised, so that together they take less. `forget`
    drops one kept conversation, and says whether there was one. MemoryError, if there is not so much left.
    """
    with _lock:
        # Measured anew after each: what a cache took need not have gone back to the system.
        while (left := find_memory_left() - sum(_reserved)) < needed and forget():
            pass
        if left < needed:
            raise MemoryError(
                f"to read {tokens} tokens takes about {needed / 2**20:,.0f} MiB of host memory and "
                f"{max(left, 0) / 2**20:,.0f} MiB are left for it: shorten the prompt, set prefill_chunk_size, or ask "
                "again when other calls are done"
            )
        _reserved.append(needed)
    try:
        yield
    finally:
        with _lock:
            _reserved.remove(needed)
