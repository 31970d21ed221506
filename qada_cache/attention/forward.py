"""The attention function that comes before transformers' own, and which models it serves.

A model finds its attention by name, `config._attn_implementation`, in a table. Building a QAdACache leaves the name and
puts our function before all that models find there (`models/attention_table.py`): for the keys of a QAdACache it
computes, any other call it passes on to what the model would have called. So other models and caches compute what they
did.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import BlockMask, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from ..kernels.operands import Query
from ..kernels.reference import suspend_autocast
from ..models import attention_table, decoder_forward, latent, unwrap_model
from ..models.sharding import UNSHARDED, check_sharding
from ..process_memory import trim_growth
from ..state.layer import QAdALayer, Seen
from . import generation
from .block_mask import read_block_mask
from .decode import attend_adaptively
from .exact import attend_exactly, attend_to_prompt
from .indexed import IndexedLayer, attend_to_picked
from .latent import LatentLayer, find_expanding_layer, is_expanding
from .libraries import build_for_prompt

Attention = Callable[..., tuple[Tensor, Tensor | None]]

# Beside the names of flash attention, which are those of kernels from the Hub, too.
_SERVED = ("eager", "sdpa", "flex_attention")
# The name that was in each config when its last cache was built. Configs are compared by identity.
_switched_on: Any = WeakIdKeyDictionary()

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

_NOT_IN_TRITON = {"s_aux": "learned attention sinks", "softcap": "soft-capped scores"}

# For torch.compile: what is read depends on what the keys hold, and it is stored in place.
outside_graphs = torch.compiler.disable(
    reason="what QAdACache reads depends on what the keys hold: compile without fullgraph=True, or use DynamicCache"
)


def check_implementation(config: PreTrainedConfig) -> None:
    """Raise ValueError if the config belongs to no model yet, or its attention is none that is known to be softmax
    attention over all keys."""
    name = getattr(config, "_attn_implementation", None)
    if name is None:
        raise ValueError(
            "this config belongs to no model (it names no attention implementation): pass model.config, or the model"
        )
    is_flash = is_flash_attention_requested(requested_attention_implementation=name) and "|" not in name
    if name not in _SERVED and not (is_flash and name in ALL_ATTENTION_FUNCTIONS):
        raise ValueError(
            f"QAdACache cannot stand in for the attention implementation {name!r}: load the model with "
            f"attn_implementation set to one of {', '.join(_SERVED)}, or to flash attention"
        )


def switch_on(config: PreTrainedConfig, model: PreTrainedModel | None = None) -> None:
    """Have the model that owns `config` (its text config) served by our function. Idempotent."""
    own = attention_table.find_own_tables(model, config)
    attention_table.place(attention_forward, _make_mask, tables=own)
    latent.have_ask(config)
    if model is not None and generation.drops_caches(model) and not decoder_forward.is_taken(model):
        decoder_forward.put_before(model, generation.find_dropped)
    _switched_on[config] = config._attn_implementation


def check_switched_on(config: PreTrainedConfig) -> None:
    """Raise RuntimeError if the model with this config is no longer served, or by another function than it was."""
    if not is_switched_on(config):
        how = "changed" if config in _switched_on else "restored"
        raise RuntimeError(
            f"the model's attention implementation was {how} after this QAdACache was built "
            f"(to {config._attn_implementation!r}): build a new QAdACache"
        )


def is_switched_on(config: PreTrainedConfig) -> bool:
    """Whether a model with this config is served by our function, as it was when its last cache was built."""
    name = _switched_on.get(config)  # asked in every pass
    return name is not None and name == config._attn_implementation


def restore_attention(model: PreTrainedModel | PreTrainedConfig) -> None:
    """Undo what building a QAdACache did to `model`.

    Caches built for the model stop working (they say so when used) until a new QAdACache is built. When no model with a
    QAdACache is left, our function leaves transformers' table. Until then it passes on the calls of all others.
    """
    model = unwrap_model(model)
    config = model.config if isinstance(model, PreTrainedModel) else model
    if isinstance(model, PreTrainedModel):
        decoder_forward.take_away(model)
    _switched_on.pop(config.get_text_config(decoder=True), None)
    if not _switched_on:
        attention_table.displace(attention_forward, _make_mask)
        latent.have_ask_no_more()


def attention_forward(
    base: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The signature transformers gives attention functions, after `base`, the model's own of them; returns
    `[batch, tokens, heads, dim]` and weights.

    The first call on an empty cache is exact but for `prefill_threshold`, by the model's own unless ours is faster
    (`attend_to_prompt`). A call of another cache is the model's own. A call with more new tokens than
    `QAdALayer.adaptive_tokens`, or of a chunk of `generate`'s prompt, or with a mask that is not causal among its
    tokens, is exact attention over everything; any other is query-adaptive. NotImplementedError, if the model asks for
    something this cache does not compute; RuntimeError in training mode, or at keys of a cache already used with
    another model; ValueError at a mask this cache cannot follow.
    """
    kwargs.update(scaling=scaling, dropout=dropout)
    layer = getattr(key, "_qada_layer", None)
    if layer is None and is_expanding():
        layer = _find_latent_layer(module, key)
    if layer is None:
        if not torch.compiler.is_compiling():
            generation.warn_of_unused(module, key.shape[-2])
        return base(module, query, key, value, attention_mask, **kwargs)
    return _attend(layer, base, module, query, key, value, attention_mask, kwargs)


def _make_mask(base: Callable[..., Any], **kwargs: Any) -> Any:
    """The mask that `base` makes; of a call that continues a QAdACache only what it says of tokens, None or bool
    `[batch, tokens]`: `[queries, tokens]` would be the largest tensor of a long turn.

    Functions that make masks are told numbers of a cache and not the cache, so one of these says whose it is (`Seen`).
    """
    tokens, padding = kwargs["kv_length"], kwargs.get("attention_mask")
    if not isinstance(tokens, Seen):
        return base(**kwargs)
    plain = kwargs.get("mask_function") is causal_mask_function and kwargs.get("allow_is_causal_skip", False)
    fits = padding is None or padding.shape[1:] == (tokens,)
    # For a single token others' masks are `[batch, 1, 1, tokens]` or None; flex attention compiles even that one.
    fewest = 1 if getattr(kwargs.get("config"), "_attn_implementation", None) == "flex_attention" else 2
    return padding if plain and fits and fewest <= kwargs.get("q_length", 1) < tokens else base(**kwargs)


_find_latent_layer = outside_graphs(find_expanding_layer)


@outside_graphs
def _attend(
    layer: QAdALayer,
    base: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict,
) -> tuple[Tensor, Tensor | None]:
    """`attention_forward` for keys that a layer of a QAdACache handed out."""
    # A layer without a store has handed out nothing.
    if layer.store is None or (new := layer.find_new(key, value)) is None:
        raise NotImplementedError(
            f"{layer.shared.model.model_type} attends more than once to one layer's keys, in that layer or in others, "
            "which QAdACache does not support: use transformers.DynamicCache for this model"
        )
    batch, _, queries, dim = query.shape
    first = layer.index == layer.shared.model.layers[0]  # of the pass
    config = cast(PreTrainedConfig, module.config)  # a look into it takes as long as a small product: not at every call
    try:
        _check_supported(module, layer, queries, kwargs, first=first)
        if isinstance(layer, LatentLayer):
            layer.check_module(module, key, value)
        told = read_block_mask(mask) if isinstance(mask, BlockMask) else mask
        is_bool = told is mask and mask is not None and mask.dim() == 4 and mask.dtype == torch.bool
        if is_bool and (name := config._attn_implementation) in ("eager", "flex_attention"):
            raise ValueError(
                f"{name} adds a bool attention mask to scores, as 0 and 1: pass one of 0 and minus infinity, or load "
                "the model with attn_implementation='sdpa'"
            )
        if not isinstance(layer, IndexedLayer):
            layer.padding, valid, visible = layer.shared.forward_pass.read_padding(
                layer.padding, told, batch=batch, seen=layer.seen, queries=queries, first=first
            )
        else:
            valid, visible = None, layer.read_picked(told, batch=batch, queries=queries)
    except (NotImplementedError, RuntimeError, ValueError):
        layer.abandon(queries)
        raise
    scaling = dim**-0.5 if kwargs["scaling"] is None else kwargs["scaling"]
    softcap = kwargs.get("softcap")
    # As the model's own attention does it: that of older transformers under "sdpa" takes no cap, the newer one raises.
    if softcap is not None and config._attn_implementation == "sdpa":
        softcap = None
    asked = Query(query, scaling, softcap, kwargs.get("s_aux"), valid, visible)
    if isinstance(layer, IndexedLayer):
        untagged = key.view_as(key)
        return attend_to_picked(layer, asked, lambda: base(module, query, untagged, value, mask, **kwargs)[0]), None
    forward_pass = layer.shared.forward_pass
    if first:
        # After a decoded token there are pending ones beside the window, and a single token is no chunk.
        may_be_chunk = queries > 1 or layer.store.end <= layer.options.window
        reading = generation.find_prompt() if may_be_chunk else generation.Prompt(False, 0)
        forward_pass.is_prefill_chunk = reading.in_chunks
        forward_pass.prompt_tokens = reading.tokens if reading.in_chunks else 0
    empty, long = layer.seen == queries, queries > layer.options.window or forward_pass.is_prefill_chunk
    if first and (empty or long):
        build_for_prompt(layer, asked, key, value, max(layer.seen, reading.tokens))
    exact = long or visible is not None or queries > layer.adaptive_tokens
    if empty:
        untagged = key.view_as(key)  # `base` may lead back to us, where others put a function into the table
        # Without a mask only these know that a prompt is causal, and a mask of another shape is theirs to read.
        known = config._attn_implementation == "sdpa" and (mask is None or mask.dim() == 4)
        with suspend_autocast(query.device):
            found = attend_to_prompt(layer, asked, key, value) if known else None
        out = base(module, query, untagged, value, mask, **kwargs)[0] if found is None else found
    else:
        if exact:
            work = partial(attend_exactly, layer, layer.store, asked, key, value)
        else:
            layer.store.bulk.settle()
            layer.store.append(*new, valid, write=False)
            asked.unstored = new if valid is None else None
            work = partial(attend_adaptively, layer, layer.store, asked)
        with suspend_autocast(query.device):
            out = layer.shared.placement.retry(work, query.device)
        out = out.transpose(1, 2).contiguous()  # some models view it, as transformers' own attention makes it so
    if empty or long:
        layer.plan = None
        layer.store.bulk.expected = forward_pass.prompt_tokens
        layer.store.absorb(*new, valid)
        if query.device.type == "cpu":
            trim_growth()
    elif exact:  # a few tokens, of which drafts are cropped again: that is cheap while they have not been flushed
        layer.plan = None
        layer.store.append(*new, valid)
    layer.incoming = None
    return out, None


def _check_supported(module: nn.Module, layer: QAdALayer, tokens: int, kwargs: dict, *, first: bool) -> None:
    managed = layer.shared.model
    name = managed.model_type
    way_out = "use transformers.DynamicCache for this model"
    for argument, meaning in () if kwargs.keys().isdisjoint(_UNSUPPORTED) else _UNSUPPORTED.items():
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
        generation.refuse_other_model(name)
    if first and 1 < tokens < layer.seen:
        generation.warn_of_repeated()
    if layer.bound_module is None or layer.seen == tokens:  # nothing cached yet: another module may have it
        if managed.shard is UNSHARDED:  # as far as is known, of a cache that was built from a config alone
            check_sharding(module, name)
        layer.bound_module = weakref.ref(module)
    elif layer.bound_module() is not module:
        raise RuntimeError(
            "this QAdACache already holds tokens of another model: build one QAdACache per model, or reset() it first"
        )
