"""Host memory: how much this process may take, and whether enough is left for a call before it begins.

A process that takes too much is killed, and all others' calls with it.
"""

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Protocol

import psutil  # which accelerate requires
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from ..forked import renew
from ..models import (
    count_state_elements,
    find_inputs_device,
    find_served_layers,
    forgets_states,
    list_token_sizes,
    read_sizes,
)
from ..sketch import MIN_TOKENS
from ..sketch.coded import RecordLayout
from ..state import BULK_BITS
from ..state.snapshots import EVERY, Snapshots
from ..storage import pinned

_GROUPS = Path("/proc/self/cgroup")
_TREE = Path("/sys/fs/cgroup")
# By hierarchy: files of the limit and of the usage, and fields of memory.stat that the system can reclaim.
_FILES = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),  # version 2
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
_reserved: list[int] = []  # bytes of each call under way
_lock = renew(threading.Lock())


def find_host_memory() -> int:
    """Bytes: the machine's, a control group's (a container's) or those of `ulimit -v`, whichever is least."""
    return min(most for most, _ in _read_limits())


def find_memory_left() -> int:
    """Bytes that this process may still take: the least over these limits."""
    return max(0, min(most - taken for most, taken in _read_limits()))


def _read_limits() -> Iterator[tuple[int, int]]:
    """For each limit, the bytes that may be taken, and those that are."""
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
        group = _TREE / hierarchy / path.lstrip("/")
        # Up to the root, which in a container is its own group.
        for folder in (group, *group.parents[: len(Path(path).parts) - 1]):
            most, taken = _read_text(folder / limit).strip(), _read_text(folder / usage).strip()
            if most.isdigit() and taken.isdigit():
                parts = dict(re.findall(r"(?m)^(\w+) (\d+)$", _read_text(folder / "memory.stat")))
                yield int(most), int(taken) - sum(int(parts.get(name, 0)) for name in cached)


def _read_text(path: Path) -> str:
    """The text of a system file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def estimate_bytes(
    model: PreTrainedModel,
    tokens: int,
    at_once: int,
    bulk_bits: int = BULK_BITS,
    *,
    offloading: bool = True,
    device_budget: int | float | str = 0,
    held: int = 0,
    rows: int = 1,
    snapshots: bool = True,
) -> int:
    """Bytes of host memory that `tokens` more tokens of all `rows` take at the peak, `at_once` of them in one pass,
    behind `held` ones: an estimate on the high side. It counts each layer's keys and values, or records with the last
    tokens in full precision, with sketch and room to grow, linear states, `snapshots` of layers that are not ours, for
    one row, and one layer's activations. If the model computes elsewhere, the host has snapshots, and with `offloading`
    our layers but for those that a `device_budget` has room for."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_attention_heads", None) is None:  # only linear layers, whose states do not grow
        return 0
    _, heads, *_ = read_sizes(config)
    kv_heads, dim, _ = map(max, zip(*list_token_sizes(config), strict=True))
    element_bytes, on_host = model.dtype.itemsize, find_inputs_device(model).type == "cpu"
    # Bytes of one KV head: of each token, and besides of the last tokens in full precision.
    whole_bytes, records = 3.0 * dim * element_bytes, RecordLayout.from_bits(dim, dim, bulk_bits)
    token_bytes, last = (whole_bytes, 0) if records is None else (1.5 * (records.size + dim / 4), MIN_TOKENS)
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest = max(wide) if isinstance(wide, (list, tuple)) else wide
    activation_bytes = (3 * widest + 8 * config.hidden_size) * element_bytes + 8 * heads * dim * 4  # of one token
    served = find_served_layers(cache := DynamicCache(config=config), config)

    def count_served(tokens: int) -> float:
        layer_bytes, placed = kv_heads * (tokens * token_bytes + min(tokens, last) * whole_bytes), 0.0
        if not on_host and not isinstance(device_budget, str):
            share = isinstance(device_budget, float)
            placed = device_budget * len(served) if share else device_budget // max(layer_bytes, 1)
        return max(0, len(served) - int(placed)) * layer_bytes

    others = [layer for index, layer in enumerate(cache.layers) if index not in served]
    windows = [getattr(layer, "sliding_window", inf) for layer in others if isinstance(layer, DynamicLayer)]
    linear = sum(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in others)
    most_heads = max(kv_heads, getattr(config, "num_key_value_heads", None) or heads)
    state_bytes = 4 * linear * count_state_elements(config) if linear else 0  # of a row, in float32
    # A sliding layer keeps the memory of a whole pass until the next one.
    others_tokens = sum(min(tokens, rows * window + at_once) for window in windows)
    others_bytes = rows * state_bytes + others_tokens * most_heads * whole_bytes
    snapshot_bytes = 0.0
    if served and snapshots and not forgets_states(config):
        ends = len(Snapshots(EVERY).plan(tokens, least=1))  # where snapshots share no token if windows are short
        kept = sum(min(tokens, window * ends) for window in windows)
        snapshot_bytes = ends * state_bytes + kept * most_heads * 2 * dim * element_bytes
    served_bytes = count_served(held + tokens) - count_served(held)
    if not on_host:
        return int(snapshot_bytes + (served_bytes if offloading else 0))
    return int(snapshot_bytes + served_bytes + others_bytes + at_once * activation_bytes)


class Kept(Protocol):
    """Kept conversations, as `conversations.AllConversations`."""

    def forget_one(self) -> bool:
        """Drop one; returns whether there was one."""

    def count_host_bytes(self) -> int:
        """Bytes of their caches in the host's memory."""


@contextlib.contextmanager
def reserve_memory(tokens: int, needed: int, kept: Kept) -> Iterator[None]:
    """Set `needed` bytes aside while a call that reads `tokens` tokens is under way.

    Memory that calls under way have taken is counted, and so is all that they reserved. So calls together take less
    than there is. If less is left, unused pinned memory goes back to the system. Conversations of `kept` are dropped
    then, one after the other, unless all together would be too few. MemoryError, if less is left after that.
    """
    with _lock:
        # Measured anew after each step: the memory of a dropped cache need not go back to the system, and what it has
        # pinned does not before it is released.
        while (left := find_memory_left() - sum(_reserved)) < needed:
            if not pinned.release() and not (needed <= left + kept.count_host_bytes() and kept.forget_one()):
                break
        if left < needed:
            raise MemoryError(
                f"to read {tokens} tokens takes about {needed / 2**20:,.0f} MiB of host memory and "
                f"{max(left, 0) / 2**20:,.0f} MiB are left for it: shorten the prompt, lower max_new_tokens, set "
                "prefill_chunk_size, or ask again when other calls are done"
            )
        _reserved.append(needed)
    try:
        yield
    finally:
        with _lock:
            _reserved.remove(needed)
