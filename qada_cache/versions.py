"""What transformers calls by another name in one supported version than in another."""

import inspect
from typing import Any

from transformers import GenerationMixin

# Names of the argument of models and of `generate` that takes a cache: since 5.24, before (which 5.24 takes too, with a
# warning at every call), and before in some models without attention.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# This version's, and the field of results that has the cache.
CACHE = next(
    name for name in CACHE_NAMES if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)


def pass_cache(cache: Any) -> dict[str, Any]:
    """`cache` as a keyword of a model, or of its `generate`: `model(ids, **pass_cache(cache))`."""
    return {CACHE: cache}
