"""The attention function that comes before transformers' own, and which models it serves.

A model finds its attention by name, `config._attn_implementation`, in a table. Building a QAdACache leaves the name and
puts our function before all that models find there (`models/attention_table.py`). Our function computes calls with keys
of a QAdACache. It passes any other call on to the function that the model would have called, so other models and caches
compute what they did.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from ..models import attention_table, decoder_forward, latent, unwrap_model
from ..state.forward_pass import MaskSize, Seen
from ..storage.padding import refuse_shape
from . import generation
from .call import Attention, attend, check_shared_keys, is_lending
from .latent import find_expanding_layer, is_expanding

# Names of attentions that are served, beside flash attention's, some of which name kernels of the Hub.
_SERVED = ("eager", "sdpa", "flex_attention")
# The name that was in each config when its last cache was built. Configs are compared by identity.
_switched_on: Any = WeakIdKeyDictionary()


class _Masks(threading.local):
    """Whether models make masks that hide tokens, by thread."""

    hide = True


_masks = _Masks()

# For torch.compile: what is read depends on what the keys hold, and it is stored in place.
outside_graphs = torch.compiler.disable(
    reason="what QAdACache reads depends on what the keys hold: compile without fullgraph=True, or use DynamicCache"
)


def check_implementation(config: PreTrainedConfig) -> None:
    """Raise ValueError if the config belongs to no model yet, or its attention is not known to be softmax attention
    over all keys."""
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


@contextlib.contextmanager
def without_masks() -> Iterator[None]:
    """Inside, models make no masks in this thread: each row's new token sees all that layers hold. For layers that are
    not ours they make zeros on the device, as some models need a mask."""
    _masks.hide = False
    try:
        yield
    finally:
        _masks.hide = True


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
    """An attention function, with `base`, the model's own, before the arguments of transformers. Returns `[batch,
    tokens, heads, dim]` and weights (None unless `base` computes).

    The first call on an empty cache is exact but for `prefill_threshold`, by the model's own unless ours is faster
    (`attend_to_prompt`). A call of another cache is the model's own. A call with more new tokens than
    `QAdALayer.adaptive_tokens`, or of a chunk of `generate`'s prompt, or with a mask that is not causal among its
    tokens, is exact attention over everything; any other is query-adaptive. NotImplementedError, if the model asks for
    something this cache does not compute; RuntimeError in training mode, or at keys of a cache already used with
    another model; ValueError at a mask this cache cannot follow; TypeError at a cache that the model does not read.
    """
    kwargs.update(scaling=scaling, dropout=dropout)
    layer = getattr(key, "_qada_layer", None)
    if layer is None and is_expanding():
        layer = _find_latent_layer(module, key)
    if layer is None:
        if is_lending() and hasattr(module, "is_kv_shared_layer"):  # modules of models whose layers share keys
            _check_shared_keys(module)
        if not torch.compiler.is_compiling():
            generation.check_name(kwargs)
            generation.warn_of_unused(module, key.shape[-2])
        return base(module, query, key, value, attention_mask, **kwargs)
    return _attend(layer, base, module, query, key, value, attention_mask, kwargs)


def _make_mask(base: Callable[..., Any], **kwargs: Any) -> Any:
    """The mask that `base` makes. For a turn that continues a QAdACache only its padding, None or bool `[batch,
    tokens]`: `[queries, tokens]` would be the largest tensor of a long turn.

    Functions that make masks get numbers of a cache and not the cache. So its number of tokens is a `Seen`, which says
    that it is ours, and which `ForwardPass` has to know whether the mask hides tokens.
    """
    tokens, padding = kwargs["kv_length"], kwargs.get("attention_mask")
    if not _masks.hide:
        if isinstance(tokens, Seen):
            return None
        shape = kwargs["batch_size"], 1, kwargs["q_length"], tokens
        return torch.zeros(shape, dtype=kwargs["dtype"], device=kwargs["device"])
    if not isinstance(tokens, MaskSize):
        return base(**kwargs)
    if padding is not None and padding.dim() == 2 and kwargs["q_length"] != padding.shape[1] < tokens:
        # `base` would hide the newest tokens: a prompt's mask, say, that was not extended with the text. One of a text
        # that is read again has errors of its own.
        refuse_shape(padding.shape, seen=int(tokens), queries=kwargs["q_length"])
    if not isinstance(tokens, Seen):
        return base(**kwargs | {"kv_length": int(tokens)})
    window = kwargs.get("local_size")
    if window is not None and kwargs.get("allow_is_causal_skip", False) and tokens <= window:
        # A window that hides nothing. Transformers forbids to leave out masks to which it has added something else.
        kwargs |= {"mask_function": causal_mask_function, "local_size": None}
    causal = kwargs.get("mask_function") is causal_mask_function
    plain = causal and kwargs.get("allow_is_causal_skip", False)
    fits = padding is None or padding.shape[1:] == (tokens,)
    # For a single token others' masks are `[batch, 1, 1, tokens]` or None; flex attention compiles even that one.
    fewest = 1 if getattr(kwargs.get("config"), "_attn_implementation", None) == "flex_attention" else 2
    skips = plain and fits and fewest <= kwargs.get("q_length", 1) < tokens
    # An int, as block masks keep the number, and compiled graphs do not know the class `Seen`.
    made = padding if skips else base(**kwargs | {"kv_length": int(tokens)})
    if tokens.forward_pass is not None:
        shows_all = causal and fits and generation.is_in_pass() and (padding is None or bool(padding.all()))
        tokens.forward_pass.note_mask(made, int(tokens) if shows_all else 0)
    return made


_find_latent_layer = outside_graphs(find_expanding_layer)
_check_shared_keys = outside_graphs(check_shared_keys)
_attend = outside_graphs(attend)
