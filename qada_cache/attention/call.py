"""One call of attention on keys that a layer of a QAdACache handed out: it is computed, then its tokens are stored.

In some models later layers of the pass attend to the same keys (readers), each with its own queries on the same store.
All of them have to find the store as the first one did. So new tokens of an exact call are stored after the last one.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import BlockMask

from ..kernels.operands import Query
from ..kernels.reference import suspend_autocast
from ..process_memory import trim_growth
from ..state.asker import Asker, refuse_gradients
from ..state.layer import QAdALayer
from ..storage import TokenStore
from . import generation
from .block_mask import read_block_mask
from .checking import check_supported
from .decode import attend_adaptively
from .differential import DifferentialLayer
from .exact import attend_exactly, attend_to_prompt
from .indexed import IndexedLayer, attend_to_picked
from .latent import LatentLayer
from .latent_attention import LatentAttention
from .libraries import build_for_prompt
from .step import follow, note_step

Attention = Callable[..., tuple[Tensor, Tensor | None]]

# By thread, the layer whose new tokens other layers of the pass have yet to attend to.
_lending: dict[int, "weakref.ref[QAdALayer]"] = {}


@dataclass(eq=False)
class Call:
    """New tokens of one layer in a pass, which its own queries and those of its readers attend to."""

    key: Tensor  # `[batch, kv_heads, tokens, dim]`, as the model gives it to attention
    value: Tensor
    new: tuple[Tensor, Tensor]  # keys and values as they are stored; latents, say, differ from `key`
    mask: Any  # as the model gave it
    valid: Tensor | None  # real tokens, as `Padding.extend` returns them
    visible: Tensor | None  # pairs that a mask shows, as `Padding.extend` returns them
    empty: bool  # whether nothing is cached before these tokens
    long: bool  # whether they are absorbed at once, after the call, as a prompt's
    exact: bool  # whether the queries read all cached tokens


def attend(
    layer: QAdALayer,
    base: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """`forward.attention_forward` for keys that `layer` handed out."""
    store, lead = layer.store, layer.shared.forward_pass.lead
    if store is None:  # a layer without a store has handed out no keys
        _refuse_second(layer)
    if lead is not None and (out := follow(lead, layer, module, query, key, value, mask, kwargs)) is not None:
        return out, None
    config = cast(PreTrainedConfig, module.config)
    # Of an int, Triton would make a constant.
    scaling = query.shape[3] ** -0.5 if kwargs["scaling"] is None else float(kwargs["scaling"])
    softcap = kwargs.get("softcap")
    # The model's own attention ignores a cap under "sdpa" in older transformers, and raises in newer ones.
    if softcap is not None and config._attn_implementation == "sdpa":
        softcap = None
    sinks = kwargs.get("s_aux")
    asked = Query(query, scaling, softcap, None if sinks is None else sinks.reshape(-1))

    def attend_by_model() -> Tensor:
        # If other code has put a function into the table, `base` may call us again: untagged keys are then not ours.
        untagged, thread = key.view_as(key), threading.get_ident()
        lending = _lending.pop(thread, None)
        try:
            return base(module, query, untagged, value, mask, **kwargs)[0]
        finally:
            if lending is not None:
                _lending[thread] = lending

    asker: Asker = layer
    twice = layer if isinstance(layer, DifferentialLayer) else None
    call: Call | None = layer.lent
    comes_again = twice is not None and call is None
    if twice is not None and call is not None:
        if twice.find_new(key, value) is None:
            _refuse_second(layer)
        out = twice.take_second()
    else:
        if call is None:
            new = _check_call(layer, module, asked, key, value, mask, kwargs)
            if isinstance(layer, IndexedLayer):
                return attend_to_picked(layer, asked, attend_by_model), None
            call = _take_in(layer, store, asked, key, value, mask, new)
        else:
            asker = _find_reader(layer, module, asked, key, value, mask, kwargs)
        with suspend_autocast(query.device):
            out = _compute(asker, store, call, asked, config)
        if twice is not None:
            out = twice.take_first(out)
    if out is None:
        out = attend_by_model()
    if comes_again:
        layer.lent = call
        return out, None
    if asker is layer.askers[-1]:
        _store(layer, store, call)
        layer.lent = None
        if asker is not layer:
            _lending.pop(threading.get_ident(), None)
    elif asker is layer:
        layer.lent, thread = call, threading.get_ident()
        _lending[thread] = weakref.ref(layer, lambda _: _lending.pop(thread, None))
    if asker is layer:
        layer.incoming = None
        if not call.exact and not call.empty:
            note_step(layer, asked, mask, kwargs)
    else:
        layer.shared.progress.reached = asker.index
        layer.shared.bar.reach(asker.index)
    return out, None


def _check_call(
    layer: QAdALayer, module: nn.Module, asked: Query, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The new keys and values that `layer` stores. Sets what `asked` may see. If the call is refused, the layer forgets
    its tokens."""
    if (new := layer.find_new(key, value)) is None:
        _refuse_second(layer)
    batch, _, queries, _ = asked.states.shape
    first = layer.index == layer.shared.model.layers[0]  # of the pass
    config = cast(PreTrainedConfig, module.config)  # reading its fields is slow: only where a mask asks for it
    if first:
        layer.shared.forward_pass.lead = None
    try:
        check_supported(layer, module, kwargs, tokens=queries, seen=layer.seen, first=first)
        if layer.seen > queries:  # the model's own attention computes a first prompt with gradients
            refuse_gradients(asked.states, key, value, asked.sink_logits)
        if isinstance(layer, LatentLayer):
            layer.check_module(module, key, value)
        tensor_mask = read_block_mask(mask) if isinstance(mask, BlockMask) else mask
        is_bool = tensor_mask is mask and mask is not None and mask.dim() == 4 and mask.dtype == torch.bool
        if is_bool and (name := config._attn_implementation) in ("eager", "flex_attention"):
            raise ValueError(
                f"{name} adds a bool attention mask to scores, as 0 and 1: pass one of 0 and minus infinity, or load "
                "the model with attn_implementation='sdpa'"
            )
        if isinstance(layer, IndexedLayer):
            asked.visible = layer.read_picked(tensor_mask, batch=batch, queries=queries)
        else:
            layer.padding, asked.valid, asked.visible = layer.shared.forward_pass.read_padding(
                layer.padding, tensor_mask, batch=batch, seen=layer.seen, queries=queries, first=first
            )
    except (NotImplementedError, RuntimeError, ValueError):
        layer.abandon(queries)
        raise
    return new


def _take_in(
    layer: QAdALayer, store: TokenStore, asked: Query, key: Tensor, value: Tensor, mask: Any, new: tuple[Tensor, Tensor]
) -> Call:
    """The `Call` of `layer`'s own queries. The first layer of the pass notes whether this is a prompt's chunk."""
    queries, first = asked.states.shape[2], layer.index == layer.shared.model.layers[0]
    forward_pass = layer.shared.forward_pass
    if first:
        # A single token after a decoded one, when tokens are pending, is no chunk: no need to search the stack.
        may_be_chunk = queries > 1 or store.end <= layer.options.window
        reading = generation.find_prompt() if may_be_chunk else generation.Prompt(False, 0)
        forward_pass.is_prefill_chunk = reading.in_chunks
        forward_pass.prompt_tokens = reading.tokens if reading.in_chunks else 0
        # From a row's last position `generate` goes on, also if it is padding, for which no head decides.
        ends_in_padding = asked.valid is not None and not asked.valid[:, -1].all()
        forward_pass.goes_on_from_padding = ends_in_padding and reading.tokens > 0
    empty, long = layer.seen == queries, queries > layer.options.window or forward_pass.is_prefill_chunk
    if first and (empty or long):
        build_for_prompt(layer, asked, key, value, max(layer.seen, reading.tokens))
    exact = long or asked.visible is not None or queries > layer.adaptive_tokens or forward_pass.goes_on_from_padding
    if isinstance(layer, DifferentialLayer):
        value = new[1]
    return Call(key, value, new, mask, asked.valid, asked.visible, empty, empty or long, exact)


def _find_reader(
    layer: QAdALayer, module: nn.Module, asked: Query, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> Asker:
    """The reader whose module attends to keys of `layer`. Its queries may be the last ones of the pass alone."""
    call, queries = layer.lent, asked.states.shape[2]
    reader = layer.readers.get(cast(int, getattr(module, "layer_idx", -1)))
    handed_out = key is call.key and value is call.value
    if not handed_out or reader is None or layer.shared.progress.reached >= reader.index:
        _refuse_second(layer)
    if not (mask is call.mask or _is_end_of(call.mask, mask, queries)):
        raise NotImplementedError(
            f"layer {reader.index} of this {layer.shared.model.model_type} model reads the keys of layer "
            f"{layer.index} under another mask, which QAdACache does not support: use transformers.DynamicCache"
        )
    check_supported(reader, module, kwargs, tokens=key.shape[2], seen=layer.seen, first=False)
    if not call.empty:
        refuse_gradients(asked.states)
    asked.valid, asked.visible = call.valid, call.visible
    if not call.exact and not call.empty and call.valid is not None:
        asked.valid = call.valid[:, -queries:]
    return reader


def _is_end_of(whole: Any, mask: Any, queries: int) -> bool:
    """Whether `mask` is the part of `whole`, `[batch or 1, 1, queries, tokens]`, for its last `queries` queries."""
    if not isinstance(whole, Tensor) or not isinstance(mask, Tensor) or whole.dim() != 4:
        return False
    return torch.equal(whole[:, :, -queries:], mask)


def _compute(asker: Asker, store: TokenStore, call: Call, asked: Query, config: PreTrainedConfig) -> Tensor | None:
    """Attention `[batch, queries, heads, value_dim]`; None if the model's own has to compute it."""
    if call.empty:
        # Under "sdpa" no mask means causal. Other attentions may mark that in another way, or by other masks.
        known = config._attn_implementation == "sdpa" and (call.mask is None or call.mask.dim() == 4)
        return attend_to_prompt(asker, asked, call.key, call.value) if known else None
    work: Callable[[], Tensor]
    if call.exact:
        work = partial(attend_exactly, asker, store, asked, call.key, call.value)
    else:
        if asker.index == asker.keys_of:
            store.bulk.settle()
            store.append(*call.new, call.valid, write=False)
            asked.unstored = call.new if call.valid is None else None
        work = partial(attend_adaptively, asker, store, asked)
        if isinstance(asker, LatentLayer):
            work = LatentAttention(asker, store, asked, call.value.shape[3]).attend_adaptively
    out = asker.shared.placement.retry(work, asked.states.device)
    return out.transpose(1, 2).contiguous()  # as of transformers' own attention: some models view it


def _store(layer: QAdALayer, store: TokenStore, call: Call) -> None:
    """Store the tokens of a call after its last reader, unless `_compute` has appended them already."""
    if not (call.long or call.exact):
        return
    if call.long:
        if store.outgrows(call.key.shape[2]):
            layer.drop_plans()  # they would keep the old buffers beside the new ones
        store.bulk.expected = layer.shared.forward_pass.prompt_tokens
        store.absorb(*call.new, call.valid)
        if call.key.device.type == "cpu":
            trim_growth()
    else:  # a few tokens, perhaps drafts that are cropped again: cheap as long as they are not flushed
        store.append(*call.new, call.valid)
    layer.drop_old_plans(store.version)


def is_lending() -> bool:
    """Whether readers have yet to attend to a layer's new tokens, in any thread: `torch.compile` can trace this."""
    return len(_lending) > 0


def check_shared_keys(module: nn.Module) -> None:
    """RuntimeError if `module`, whose keys have no tag, should have read keys that a layer of a QAdACache handed out:
    it got a copy of them, as on another device."""
    thread = threading.get_ident()
    layer = _lending[thread]() if thread in _lending else None
    if layer is None or layer.lent is None or layer.shared.model.config is not module.config:
        return
    if layer.bound_module is not None and layer.bound_module() is module:  # another cache's pass: ours was interrupted
        del _lending[thread]
    elif (index := getattr(module, "layer_idx", None)) in layer.readers:
        raise RuntimeError(
            f"layer {index} reads the keys of layer {layer.index}, which QAdACache handed out, and got a copy of them, "
            "as on another device: load the model on one device, or use transformers.DynamicCache for "
            f"{layer.shared.model.model_type}"
        )


def _refuse_second(layer: QAdALayer) -> NoReturn:
    """Raise NotImplementedError: the model attends to the same keys a second time, in a way that is not supported."""
    raise NotImplementedError(
        f"{layer.shared.model.model_type} attends more than once to one layer's keys, in that layer or in others, "
        "which QAdACache does not support: use transformers.DynamicCache for this model"
    )
