"""Names that differ between supported versions of transformers, or change in the next."""

import inspect
from typing import Any

from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

# Names of the argument of models and of `generate` that takes a cache: since 5.24, before (which 5.24 takes too, with a
# warning at every call), and before in some models without attention.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# The name in this version. The field of results that has the cache has the same name.
CACHE = next(
    name for name in CACHE_NAMES if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)


def pass_cache(cache: Any) -> dict[str, Any]:
    """`cache` as a keyword of a model, or of its `generate`: `model(ids, **pass_cache(cache))`."""
    return {CACHE: cache}


# All private names of other packages that this one reads, by the objects that have them.
PRIVATE = {
    "config": (
        "_attn_implementation",  # the name of a model's attention
        "_name_or_path",  # where it was loaded from
    ),
    "model": (
        "_can_set_attn_implementation",  # whether a model goes by that name
        "_tp_size",  # how many processes tensor parallelism splits it over
        "_prefill",  # its frame on the stack says that a chunk of a prompt is being read
        "_prepare_generation_config",  # joins all settings of a call of `generate`
    ),
    "table of models": ("_model_mapping",),  # classes by config: says whose modeling file a type uses
    "module": (
        *("_buffers", "_modules", "_non_persistent_buffers_set", "_parameters", "_save_to_state_dict"),
        *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
        "_compiled_call_impl",  # of `module.compile()`
    ),
    "all modules": ("_global_forward_hooks", "_global_forward_pre_hooks"),
    "compiled model": ("_orig_mod",),
    "compiled function": ("_torchdynamo_orig_callable",),
    "lock": ("_at_fork_reinit",),  # makes it free
    "tensor": ("_version",),  # how often it was written to
    "torch": ("_C", "_dynamo", "_foreach_add_", "_foreach_copy_"),
    "memory of CUDA": ("_cuda_endAllocateToPool", "_cuda_releasePool"),
    "module by accelerate": ("_hf_hook",),
    "model of lm-eval": ("_detect_batch_size",),
}
PRIVATE_ONCE = ("_commit_hash",)  # of older transformers' configs: which commit of a repository a model was loaded from


def find_missing() -> list[str]:
    """The private names that this version of transformers lacks. The package then works without them."""
    config, classes = PreTrainedConfig(), (PreTrainedModel, GenerationMixin)
    missing = [name for name in PRIVATE["config"] if not hasattr(config, name)]
    return missing + [name for name in PRIVATE["model"] if not any(hasattr(kind, name) for kind in classes)]
