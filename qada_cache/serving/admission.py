"""Whether there is memory for a call before it begins: a process that takes too much is killed, and all others' calls
with it."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from transformers import PreTrainedModel

from ..attention.support import sizes
from .memory import memory_left

_promised: dict[object, int] = {}  # bytes, by call under way
_lock = threading.Lock()


def needed_bytes(model: PreTrainedModel, tokens: int, at_once: int) -> int:
    """Host memory that `tokens` more tokens take at the peak, `at_once` of them read in one pass: roughly, rather more.

    Every layer's keys and values, with a sketch and room to grow; one layer's activations, if the model is on the host.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_attention_heads", None) is None:  # states alone, which do not grow with a text
        return 0
    layers, heads, kv_heads, dim = sizes(config)
    width = model.dtype.itemsize
    kept = 1.5 * 2 * layers * kv_heads * dim * width
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widest = max(wide) if isinstance(wide, (list, tuple)) else wide
    passing = (3 * widest + 8 * config.hidden_size) * width + 8 * heads * dim * 4
    return int(tokens * kept + (at_once * passing if model.device.type == "cpu" else 0))


@contextlib.contextmanager
def promised(tokens: int, needed: int, *, forget: Callable[[], int]) -> Iterator[None]:
    """Set `needed` bytes aside while a call that reads `tokens` tokens is under way.

    What calls have taken already counts as well as what they were promised, so that together they take less.

    Args:
        forget: drops one kept conversation, and says whether there was one.

    Raises:
        MemoryError: there is not so much left.
    """
    call = object()
    with _lock:
        # Measured anew after each: what a cache took need not have gone back to the system.
        while (left := memory_left() - sum(_promised.values())) < needed and forget():
            pass
        if left < needed:
            raise MemoryError(
                f"to read {tokens} tokens takes about {needed / 2**20:,.0f} MiB of host memory and "
                f"{max(left, 0) / 2**20:,.0f} MiB are left for it: shorten the prompt, set prefill_chunk_size, or ask "
                "again when other calls are done"
            )
        _promised[call] = needed
    try:
        yield
    finally:
        with _lock:
            del _promised[call]
