"""Refusals of a call of attention: options of a model, or of a call, that this cache does not compute."""

import weakref
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig

from ..models.sharding import UNSHARDED, check_sharding
from ..state.asker import Asker
from . import generation

# Arguments some models hand to attention that change its result in ways this cache does not compute.
_UNSUPPORTED = {
    "sinks": "learned attention sinks",
    "position_bias": "a position bias",
    "sliding_window": "a sliding window on a layer the config calls full attention",
    "indices": "sparse attention indices",
    "block_indices": "sparse attention indices",
    "cache": "paged attention",
    "cu_seq_lens_q": "texts packed into one row",
}

# All arguments that `check_supported` looks at.
_WATCHED = {*_UNSUPPORTED, "softcap", "is_causal", "output_attentions"}


def list_watched(kwargs: dict[str, Any]) -> tuple[str, ...] | None:
    """The names in `kwargs` of arguments that `check_supported` looks at; None, if one of them has a value. A later
    call with None for all of them needs no new look."""
    # A window that was accepted is the config's, and the pass's first layer compares the text with that.
    found = tuple(name for name in kwargs if name in _WATCHED and (name != "sliding_window" or kwargs[name] is None))
    return None if any(kwargs[name] is not None for name in found) else found


def check_supported(
    asker: Asker, module: nn.Module, kwargs: dict[str, Any], *, tokens: int, seen: int, first: bool
) -> None:
    """Raise the errors of `forward.attention_forward`, for a call with `tokens` new tokens, which are the last of
    `seen`. `first`: the layer is the pass's first one."""
    managed = asker.shared.model
    name = managed.model_type
    way_out = "use transformers.DynamicCache for this model"
    for argument, meaning in () if kwargs.keys().isdisjoint(_UNSUPPORTED) else _UNSUPPORTED.items():
        known = argument == "sliding_window" and kwargs.get(argument) == managed.window
        if kwargs.get(argument) is not None and not known:
            raise NotImplementedError(f"QAdACache does not support {meaning} ({argument}), as {name} uses: {way_out}")
    if asker.options.kernels == "triton" and kwargs.get("softcap") is not None:
        raise NotImplementedError(
            f"no Triton kernel computes soft-capped scores (softcap), as {name} uses: use kernels='auto'"
        )
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"QAdACache supports causal attention only, {name} asks for bidirectional: {way_out}")
    # Once a pass: a look into the config takes as long as the other checks.
    if kwargs.get("output_attentions") or (first and cast(PreTrainedConfig, module.config).output_attentions):
        raise NotImplementedError(
            "QAdACache cannot return attention weights, as it never computes most of them: "
            "drop output_attentions=True, or use transformers.DynamicCache with attn_implementation='eager'"
        )
    if module.training or kwargs["dropout"]:
        raise RuntimeError("QAdACache serves inference only: call model.eval(), or train without a cache")
    if first and managed.window is not None and seen > managed.window:
        raise NotImplementedError(
            f"this text has {seen} tokens, and {name} hides those before its newest {managed.window} (sliding_window): "
            f"QAdACache serves it up to there, for longer texts {way_out}"
        )
    if managed.config is not None and managed.config is not module.config:
        generation.refuse_other_model(name)
    if first and 1 < tokens < seen:
        generation.check_repeated(seen - tokens)
    if asker.bound_module is None or seen == tokens:  # nothing cached yet: another module may take the layer
        if managed.shard is UNSHARDED:  # also of a cache that was built from a config alone, which knows no more
            check_sharding(module, name)
        asker.bound_module = weakref.ref(module)
    elif asker.bound_module() is not module:
        raise RuntimeError(
            "this QAdACache already holds tokens of another model: build one QAdACache per model, or reset() it first"
        )
