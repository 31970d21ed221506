"""Whether a forward pass reads one of the chunks of `generate(prefill_chunk_size=...)`."""

import inspect

from transformers import GenerationMixin


def reads_chunk() -> bool:
    """Whether `generate` is on the stack, reading its prompt in chunks.

    No argument of a forward pass tells: a last chunk looks like a short turn. A prompt that is read by other code is
    taken for turns.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is GenerationMixin._prefill.__code__:
            return getattr(frame.f_locals.get("generation_config"), "prefill_chunk_size", None) is not None
        frame = frame.f_back
    return False
