"""Reads from the frames of transformers' `generate` on the stack how it uses a cache: no argument of a pass says it."""

import inspect
import logging
import threading
import traceback
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..models import rope_deltas
from ..said_once import warn_once
from ..versions import CACHE, CACHE_NAMES

logger = logging.getLogger(__name__)

_GENERATION = GenerationMixin.__module__
# Private, and so perhaps gone in another version: then prompts in chunks are taken for turns.
_PREFILL = getattr(getattr(GenerationMixin, "_prefill", None), "__code__", None)
_CHUNK = {"past_length", "chunk_idx", "chunk_size", "prefill_ids"}  # its variables; older ones have fewer
_LONGEST = "original_max_position_embeddings"


class Prompt(NamedTuple):
    """The prompt that `generate` is reading."""

    in_chunks: bool
    tokens: int  # tokens of the prompt and those cached before it; 0 if `generate` reads none


class _Asked(threading.local):
    """The cache that was last asked for its length in this thread, weakly, and that length."""

    last: tuple[Any, int] | None = None


_asked = _Asked()


def find_prompt() -> Prompt:
    """The prompt that a `generate` on the stack is reading. A prompt that other code reads is taken for turns.

    No argument of a forward pass says so: a last chunk looks like a short turn. `generate` gives the chunks' size to
    its own `_prefill` alone; the model, its config and the cache never hold it.
    """
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_code is _PREFILL:
            variables = frame.f_locals
            in_chunks = getattr(variables.get("generation_config"), "prefill_chunk_size", None) is not None
            tokens = variables["input_ids"].shape[1] if "input_ids" in variables else 0
            if variables.keys() >= _CHUNK:  # behind a text that is held `generate` may be given new tokens alone
                before = variables["past_length"] - variables["chunk_idx"] * variables["chunk_size"]
                tokens = before + variables["prefill_ids"].shape[1]
            return Prompt(in_chunks, tokens)
    return Prompt(False, 0)


def is_in_pass() -> bool:
    """Whether a model's forward function is on the stack. If not, the caller makes the mask, and may write to it."""
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe()) if frame.f_code.co_name == "forward"]
    return any(isinstance(frame.f_locals.get("self"), PreTrainedModel) for frame in frames)


def is_at_work(part: "weakref.ref[Any] | None") -> bool:
    """Whether the innermost model's forward function on the stack, or a function that it has called, has this object
    among its local variables: it was given the object, or made it."""
    if part is None or part() is None:
        return False
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        variables = frame.f_locals
        if any(each is part() for each in variables.values()):
            return True
        if frame.f_code.co_name == "forward" and isinstance(variables.get("self"), PreTrainedModel):
            return False
    return False


def check_repeated(held: int) -> None:
    """Look whether the pass under way gives the whole text to a cache that holds `held` tokens of it. `generate` does
    so at every step but the first if it is told to use no cache: that is logged, once. It does so at the first step of
    assisted decoding: RuntimeError, as the text would be read twice."""
    for frame, _ in _find_own_call():
        variables = frame.f_locals
        if frame.f_code is _PREFILL or not isinstance(given := variables.get("model_kwargs"), dict):
            return
        if given.get("use_cache") is False:
            warn_once(
                logger,
                "generate was given a QAdACache and use_cache=False, by which it does not use the cache but gives it "
                "the whole text again at every step: leave out use_cache=False (of generation_config too) or the cache",
            )
        elif variables.get("is_first_iteration") and "candidate_input_ids" in variables:
            text, mask = variables["input_ids"].shape[1], given.get("attention_mask")
            # If `generate` was given new tokens alone, their mask covers the tokens held, too.
            if held < text and (mask is None or mask.shape[1] < held + text):
                raise RuntimeError(
                    f"assisted decoding and prompt lookup give a cache that holds {held} tokens the whole text again, "
                    f"{text} tokens: give generate the new tokens alone, with the attention mask of all, reset() the "
                    "cache, or decode without them"
                )
        return


def note_asked(cache: Any, length: int) -> None:
    """Note that somebody asks how many tokens `cache` holds: `generate` does before it gives it to the model.
    RuntimeError if it will give it to another model, which may not even look at it."""
    _asked.last = weakref.ref(cache), length
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back  # the caller of the cache's method that calls this
    if frame and frame.f_code is _PREFILL and isinstance(model := frame.f_locals.get("self"), PreTrainedModel):
        check_own(cache, model)
    if frame and rope_deltas.NAME in frame.f_code.co_names:  # the caller goes on to read the model's
        cache._shared.rope_deltas.put_back(length)


def check_own(cache: Any, model: PreTrainedModel) -> None:
    """Raise RuntimeError if a part of `model` is not the decoder that `cache` was built for."""
    managed = cache._shared.model
    configs = (part.config for part in model.modules() if isinstance(part, PreTrainedModel))
    if model.config is not managed.config and not any(config is managed.config for config in configs):
        refuse_other_model(managed.model_type)


def refuse_other_model(model_type: str) -> None:
    """Raise RuntimeError: a cache of a model of this type is used with another model."""
    raise RuntimeError(
        f"this QAdACache was built for another model (of type {model_type}), or with a config that is not this model's "
        "own: build one QAdACache per model, by QAdACache(model)"
    )


def drops_caches(model: PreTrainedModel) -> bool:
    """Whether this kind of model drops a cache where its rotary frequencies change (Phi 3 and its kin): `generate` then
    gives it the whole text again, for a cache of its own."""
    prepare = inspect.unwrap(cast(Any, model).prepare_inputs_for_generation)
    return _LONGEST in prepare.__code__.co_names and isinstance(getattr(model.config, _LONGEST, None), int)


@torch.compiler.disable
def find_dropped(decoder: nn.Module, kwargs: dict[str, Any]) -> Any:
    """The QAdACache that `generate` was given and this pass was not, emptied, as the pass has the whole text; or None.

    RuntimeError if the pass has a part of the text alone, as Phi 4's has: the model would go on without the rest.
    """
    cache, length = (_asked.last[0](), _asked.last[1]) if _asked.last else (None, 0)
    if cache is None or cache._shared.model.config is not decoder.config or kwargs.get("use_cache") is False:
        return None
    longest = getattr(decoder.config, _LONGEST)
    if length > longest or not any(_is_given(frame, cache) for frame, called in _find_own_call() if called):
        return None
    given = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
    tokens, mask, positions = given.shape[1], kwargs.get("attention_mask"), kwargs.get("position_ids")
    ends = 0 if positions is None else int(positions.max()) + 1
    if (text := max(longest + 1, 0 if mask is None else mask.shape[-1], ends)) > tokens:
        raise RuntimeError(
            f"this {decoder.config.model_type} model drops its cache of {length} tokens, as the text is longer than "
            f"{_LONGEST} ({longest}), and reads {tokens} of {text} tokens: cache.reset(), and give the whole text so "
            "far to another generate"
        )
    cache.reset()
    return cache


def check_name(kwargs: dict[str, Any]) -> None:
    """Raise TypeError if a QAdACache came to attention as a keyword that this version of transformers does not read:
    models pass it on, and the cache stays empty. Newer ones read it."""
    if CACHE_NAMES[0] != CACHE and hasattr(kwargs.get(CACHE_NAMES[0]), "_decode_graph"):
        raise TypeError(
            f"transformers {transformers.__version__} has no keyword {CACHE_NAMES[0]}=: give the model a QAdACache as "
            f"{CACHE}="
        )


def warn_of_unused(module: nn.Module, tokens: int) -> None:
    """Log, once, if `generate` was given a QAdACache and reads without it. Every attention call over `tokens` keys of
    other caches, or of none, comes here: nearly all return at the first line."""
    if _asked.last is None or getattr(module, "is_cross_attention", False):
        return
    cache, length = _asked.last[0](), _asked.last[1]
    if cache is not None and cache._shared.model.config is not module.config:
        return  # a part of the model that reads images, or another model: the decoder's pass is still to come
    grown = cache is None or cache.get_seq_length() != length
    _asked.last = None
    if grown or not any(_is_given(frame, cache) for frame, called in _find_own_call() if called):
        return
    config = cache._shared.model.config
    longest, name = getattr(config, _LONGEST, None), config.model_type
    reason = f"its prepare_inputs_for_generation or a custom_generate leaves it out: use DynamicCache for {name}"
    if longest is not None and length <= longest:
        reason = (
            f"it drops a cache of up to {_LONGEST} ({longest}) tokens when the text is longer. A cache that was built "
            "by QAdACache(model), of a model without accelerate's hooks, reads the text again. Others are kept if they "
            f"hold more tokens: read a long prompt by model(input_ids[:, :-1], {CACHE}=cache) first, then generate"
        )
    warn_once(
        logger,
        f"generate was given a QAdACache that this {name} model does not use: it has read {tokens} tokens with a cache "
        f"of its own, in full, and the QAdACache stays at {length} tokens, because {reason}",
    )


def _find_own_call() -> Iterator[tuple[FrameType, bool]]:
    """The frames of the innermost `generate` on the stack, from the inside out, each with True, if `generate` itself
    or the function `custom_generate` that it was given calls the model. If a logits processor or an assistant within
    it calls the model: the innermost of these frames alone, with False."""
    inner: FrameType | None = None
    called = None
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_globals.get("__name__") == _GENERATION:
            if called is None:
                custom = getattr(frame.f_locals.get("custom_generate"), "__code__", None)
                called = inner is not None and (
                    inner.f_code is custom or isinstance(inner.f_locals.get("self"), PreTrainedModel)
                )
            yield frame, called
            if not called or frame.f_code.co_name == "generate":
                return
        inner = frame


def _is_given(frame: FrameType, cache: Any) -> bool:
    """Whether this is the frame of `generate`, and `cache` was given to it."""
    given = frame.f_locals.get("kwargs")
    return frame.f_code.co_name == "generate" and isinstance(given, dict) and any(v is cache for v in given.values())
