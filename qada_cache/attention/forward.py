"""The attention function QAdACache registers with transformers, and which models it is switched on for.

A model finds its attention by name, `config._attn_implementation`. Building a QAdACache replaces that name by one
of ours, which remembers the original: for the keys of a QAdACache our function computes, for any other call it
passes straight through to what the model used before. `restore_attention` puts the old name back.
"""

import inspect
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from ..kernels.reference import without_autocast
from ..key_moments.models import UNSHARDED, check_sharding, own_attention, unwrap_model
from ..state.layer import QAdALayer, Seen
from .decode import CallOptions, attend_adaptively, attend_exactly
from .support import find_reader

# The dispatcher treats names that hold "sdpa", "flash", "paged" or "/" specially, so ours hold none of them.
# Flash attention is not among them: transformers' function for it loads its kernel by the name in the config.
_OUR_NAMES = {"eager": "qada_over_eager", "sdpa": "qada_over_torch"}
_BASES = {ours: base for base, ours in _OUR_NAMES.items()}

# Arguments some models hand to attention that change its result in ways this cache does not compute.
_UNSUPPORTED = {
    "sinks": "learned attention sinks",
    "position_bias": "a position bias",
    "sliding_window": "a sliding window on a layer the config calls full attention",
    "indices": "sparse attention indices",
    "block_indices": "sparse attention indices",
    "cache": "paged attention",
}

_NOT_IN_TRITON = {"s_aux": "learned attention sinks", "softcap": "soft-capped scores"}

# For torch.compile: what is read depends on what the keys hold, and it is stored in place.
outside_graphs = torch.compiler.disable(
    reason="what QAdACache reads depends on what the keys hold: compile without fullgraph=True, or use DynamicCache"
)


def check_readers(model: PreTrainedModel | None, config: PreTrainedConfig) -> None:
    """Raise NotImplementedError if the model's own code would do something else under our name than under its own, and
    ValueError if the config belongs to no model yet, or its attention implementation is not one we can wrap."""
    name = config._attn_implementation
    if name is None:
        raise ValueError(
            "this config belongs to no model (it names no attention implementation): pass model.config, or the model"
        )
    if name not in (*_OUR_NAMES, *_BASES):
        raise ValueError(
            f"QAdACache cannot wrap the attention implementation {name!r}: load the model with attn_implementation "
            f"set to one of {', '.join(_OUR_NAMES)}"
        )
    if name in _BASES or (place := find_reader(model, config, name, _OUR_NAMES[name])) is None:
        return
    others = [other for other, ours in _OUR_NAMES.items() if find_reader(model, config, other, ours) is None]
    way_out = "".join(f", or load it with attn_implementation={other!r}" for other in others)
    raise NotImplementedError(
        f"the code of {config.model_type} asks whether its attention is {name!r} ({place}), which QAdACache would "
        f"change, and with it the model's own outputs: use transformers.DynamicCache for {config.model_type}{way_out}"
    )


def switch_on(config: PreTrainedConfig) -> None:
    """Make the model that owns `config` (its text config) ask our function for attention. Idempotent."""
    if not is_switched_on(config):
        current = config._attn_implementation
        ours = _OUR_NAMES[current]
        AttentionInterface.register(ours, attention_forward)
        AttentionMaskInterface.register(ours, partial(_mask, ALL_MASK_ATTENTION_FUNCTIONS[current]))
        config._attn_implementation = ours


def is_switched_on(config: PreTrainedConfig) -> bool:
    """Whether a model with this config asks our function for attention."""
    return config._attn_implementation in _BASES


def restore_attention(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Undo what building a QAdACache did to `model`: its attention implementation is again what it was.

    Caches built for the model stop working (they say so when used) until a new QAdACache is built.
    """
    model = unwrap_model(model)
    config = model.config if isinstance(model, PreTrainedModel) else model
    config = config.get_text_config(decoder=True)
    config._attn_implementation = _BASES.get(config._attn_implementation, config._attn_implementation)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The signature transformers gives attention functions; returns `[batch, tokens, heads, dim]` and weights.

    The first call on an empty cache, and every call of another cache, is the model's own implementation. A call
    with more new tokens than the window, or of a chunk of `generate`'s prompt, or with a mask that is not causal among
    its tokens, is exact attention over everything; any other is query-adaptive. NotImplementedError, if the model asks
    for something this cache does not compute; RuntimeError in training mode, or at keys of a cache already used with
    another model; ValueError at a mask this cache cannot follow.
    """
    kwargs.update(scaling=scaling, dropout=dropout)
    if (layer := getattr(key, "_qada_layer", None)) is None:
        return _base(module)(module, query, key, value, attention_mask, **kwargs)
    return _attend(layer, module, query, key, value, attention_mask, kwargs)


def _mask(base: Callable[..., Tensor | None], **kwargs: Any) -> Tensor | None:
    """The mask that `base` makes; of a call that continues a QAdACache only what it says of tokens, None or bool
    `[batch, tokens]`: `[queries, tokens]` would be the largest tensor of a long turn."""
    tokens, padding = kwargs["kv_length"], kwargs.get("attention_mask")
    plain = kwargs.get("mask_function") is causal_mask_function and kwargs.get("allow_is_causal_skip", False)
    fits = padding is None or padding.shape[1:] == (tokens,)
    if isinstance(tokens, Seen) and plain and fits and 1 < kwargs.get("q_length", 1) < tokens:
        return padding
    return base(**kwargs)


def _base(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The model's own attention."""
    return own_attention(module, _BASES[cast(PreTrainedConfig, module.config)._attn_implementation])


@outside_graphs
def _attend(
    layer: QAdALayer, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict
) -> tuple[Tensor, Tensor | None]:
    """`attention_forward` for keys that a layer of a QAdACache handed out."""
    if layer.store is None or layer.incoming is not key:  # a layer without a store has handed out nothing
        raise NotImplementedError(
            f"{layer.shared.model.model_type} attends more than once to one layer's keys, in that layer or in others, "
            "which QAdACache does not support: use transformers.DynamicCache for this model"
        )
    batch, _, queries, dim = query.shape
    first = layer.index == layer.shared.model.layers[0]  # of the pass
    eager = cast(PreTrainedConfig, module.config)._attn_implementation == _OUR_NAMES["eager"]
    try:
        _check_supported(module, layer, queries, kwargs, first=first)
        if eager and mask is not None and mask.dim() == 4 and mask.dtype == torch.bool:
            raise ValueError(
                "eager attention adds a bool attention mask to scores, as 0 and 1: pass one of 0 and minus infinity, "
                "or load the model with attn_implementation='sdpa'"
            )
        layer.padding, valid, visible = layer.padding.after(
            mask, batch=batch, seen=layer.seen, queries=queries, first=first
        )
    except (NotImplementedError, RuntimeError, ValueError):
        layer.abandon(queries)
        raise
    scaling = dim**-0.5 if kwargs["scaling"] is None else kwargs["scaling"]
    softcap = kwargs.get("softcap")
    # As the model's own attention does it: that of older transformers under "sdpa" takes no cap, the newer one raises.
    if softcap is not None and not eager:
        softcap = None
    options = CallOptions(scaling, softcap, valid, sink_logits=kwargs.get("s_aux"), visible=visible)
    forward_pass = layer.shared.forward_pass
    if first:
        # After a decoded token there are pending ones beside the window, and a single token is no chunk.
        forward_pass.is_prefill_chunk = (queries > 1 or layer.store.end <= layer.options.window) and _reads_chunk()
    empty, long = layer.seen == queries, queries > layer.options.window or forward_pass.is_prefill_chunk
    exact = long or visible is not None
    if empty:
        out, _ = _base(module)(module, query, key, value, mask, **kwargs)
    else:
        if exact:
            work = partial(attend_exactly, layer, layer.store, query, key, value, options)
        else:
            layer.store.append(key, value, valid)
            work = partial(attend_adaptively, layer, layer.store, query, options)
        with without_autocast(query.device):
            out = layer.shared.residents.retried(work)
        out = out.transpose(1, 2).contiguous()  # some models view it, as transformers' own attention makes it so
    if empty or long:
        layer.store.absorb(key, value, valid)
    elif exact:  # a few tokens, of which drafts are cropped again: that is cheap while they have not been flushed
        layer.store.append(key, value, valid)
    layer.incoming = None
    return out, None


def _check_supported(module: nn.Module, layer: QAdALayer, tokens: int, kwargs: dict, *, first: bool) -> None:
    managed = layer.shared.model
    name = managed.model_type
    way_out = "use transformers.DynamicCache for this model"
    for argument, meaning in _UNSUPPORTED.items():
        if kwargs.get(argument) is not None:
            raise NotImplementedError(f"QAdACache does not support {meaning} ({argument}), as {name} uses: {way_out}")
    for argument, meaning in _NOT_IN_TRITON.items() if layer.options.kernels == "triton" else ():
        if kwargs.get(argument) is not None:
            raise NotImplementedError(
                f"no Triton kernel computes {meaning} ({argument}), as {name} uses: use kernels='auto'"
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
    if managed.config is not None and managed.config is not module.config:
        raise RuntimeError(
            f"this QAdACache was built for another model (of type {name}): build one QAdACache per model"
        )
    if layer.bound_module is None or layer.seen == tokens:  # nothing cached yet: another module may have it
        if managed.shard is UNSHARDED:  # as far as is known, of a cache that was built from a config alone
            check_sharding(module, name)
        layer.bound_module = weakref.ref(module)
    elif layer.bound_module() is not module:
        raise RuntimeError(
            "this QAdACache already holds tokens of another model: build one QAdACache per model, or reset() it first"
        )


def _reads_chunk() -> bool:
    """Whether `generate` is on the stack, reading its prompt in chunks. No argument of a forward pass tells: a last
    chunk looks like a short turn. A prompt that is read by other code is taken for turns."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        if frame.f_code is GenerationMixin._prefill.__code__:
            return getattr(frame.f_locals.get("generation_config"), "prefill_chunk_size", None) is not None
    return False
