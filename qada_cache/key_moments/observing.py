"""Observes a model that reads a text: the keys that its layers keep, and their queries. With latent attention these are
latents with rotary channels, and queries that have absorbed the projection of keys."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..models import attention_table, find_full_attention_layers, find_inputs_device
from ..models.latent import absorb, ask_projections, find_latent_sizes, has_latents
from ..models.shared_keys import find_readers
from ..versions import pass_cache


class _Tagging(DynamicCache):
    """Tags the keys that it hands out with their layer. HRM calls one module for several layers of a cache."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        keys._qada_read = layer_idx  # type: ignore[attr-defined]  # the tag that `observe_queries` looks for
        return keys, values


def read_keys(
    model: PreTrainedModel, ids: Tensor, positions: Tensor | None, *, chunk: int, done: Callable[[int], object]
) -> dict[int, Tensor]:
    """Keys `[batch, kv_heads, tokens, dim]` of every full-attention layer, of this process's heads, on the CPU. The
    model reads `chunk` tokens of `ids` `[batch, tokens]` at a time, at `positions` `[batch, tokens]` (None: its own).
    After each chunk `done` is called with its number of tokens. A ValueError if a layer keeps other keys, or if the
    model reads no text by itself."""
    config = model.config.get_text_config(decoder=True)
    cache, device = _Tagging(config=config), find_inputs_device(model)
    for index in (layers := find_full_attention_layers(cache, config)):
        if type(cache.layers[index]) is DynamicSlidingWindowLayer:  # one that hides nothing, and still drops keys
            cache.layers[index] = DynamicLayer()
    # With hidden states wanted, layers that read other layers' keys get all queries, and not the last one alone.
    asked: dict[str, Any] = {"output_hidden_states": True} if find_readers(config) else {}
    asked |= {"use_cache": True, "logits_to_keep": 1}
    for start in range(0, ids.shape[1], chunk):
        part = slice(start, start + chunk)
        place = {} if positions is None else {"position_ids": positions[:, part].to(device)}
        try:
            model(input_ids=ids[:, part].to(device), **pass_cache(cache), **asked, **place)
        except (AttributeError, TypeError, ValueError) as error:  # of what the model has not been given
            raise ValueError(
                f"this {type(model).__name__} does not read the text that key moments are taken of, as it says "
                f'({error}): use moments="current"'
            ) from error
        done(len(ids[0, part]))
    found, sizes = {}, find_latent_sizes(config)
    for index in layers:
        keys = getattr(cache.layers[index], "keys", None)
        rotary = getattr(cache.layers[index], "values", None)  # beside latents
        if sizes is not None and keys is not None and rotary is not None:
            keys = torch.cat((keys, rotary), dim=-1)
        if keys is None or keys.dim() != 4:
            raise ValueError(
                f"layer {index} of {config.model_type} keeps no [batch, heads, tokens, dim] keys to take moments of: "
                'use moments="current"'
            )
        found[index] = keys.cpu()
    return found


@contextmanager
def observe_queries(
    model: PreTrainedModel,
    observe: Callable[[int, Tensor], None],
    values: dict[int, tuple[Tensor, float]] | None = None,
) -> Iterator[None]:
    """Inside, `observe(layer, query)` is called with the queries `[batch, heads, tokens, dim]` of each of the model's
    layers that take their attention function from transformers' table. `values`, if given, is filled for layers of
    latents, by their index: with the squared norms `‖V_i‖²` over heads of the columns of the projection of values,
    float64 `[rank]` on the CPU, and the scaling of scores."""
    ours, sizes = set(model.modules()), find_latent_sizes(model.config.get_text_config(decoder=True))

    def attention(base: Callable[..., Any], module: nn.Module, query: Tensor, *args: object, **kwargs: object) -> Any:
        index = getattr(args[0] if args else None, "_qada_read", getattr(module, "layer_idx", None))
        if module in ours and isinstance(index, int):
            observed = query
            if sizes is not None and has_latents(module):
                projections = ask_projections(module, sizes, query.shape[3] - sizes.rope, query)
                observed = absorb(query, projections, sizes)
                scaling = kwargs.get("scaling")
                if values is not None and index not in values and isinstance(scaling, float):
                    values[index] = projections.values.double().square().sum(dim=(0, 1)).cpu(), scaling
            observe(index, observed)
        return base(module, query, *args, **kwargs)

    attention_table.place(attention, tables=attention_table.find_own_tables(model, model.config))
    try:
        yield
    finally:
        attention_table.displace(attention)
