"""A model as a cache meets it: its wrappers, the device of its inputs, its full-attention layers and their queries."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import OptimizedModule
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")
_observing = threading.Lock()  # two at once would restore each other's entry in the one table


def unwrap_model(model: Any) -> Any:
    """The model that `torch.compile` or peft wrapped; anything else as it is.

    Both compute by the very model that they hold: peft puts its adapters into that one's layers.

    Raises:
        NotImplementedError: peft's prompt learning.
    """
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if hasattr(model, "get_base_model"):
        settings = model.active_peft_config
        if settings.is_prompt_learning:
            raise NotImplementedError(
                f"QAdACache does not serve peft's prompt learning ({settings.peft_type}), which may hand the model a "
                "cache of its own: generate without a cache, or build it for get_base_model() and use that"
            )
        model = model.get_base_model()
    return model


def inputs_device(model: PreTrainedModel) -> torch.device:
    """The device for token ids: the embeddings compute there, and may be kept elsewhere."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        if (device := getattr(part, "execution_device", None)) is not None:
            return torch.device(device)
    return model.device


def full_attention_layers(cache: DynamicCache) -> list[int]:
    """The layers of `DynamicCache(config=...)` that keep every key: those a QAdACache takes over."""
    # Exact type: subclasses (sliding windows, indexers, linear attention) keep their own states.
    return [index for index, layer in enumerate(cache.layers) if type(layer) is DynamicLayer]


def full_attention_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A decoder's config as its managed layers have it; the config itself unless it has others for some layers.

    Raises:
        NotImplementedError: these layers differ in their heads.
    """
    if not config.is_heterogeneous:
        return config
    # Without any, the cache acts as DynamicCache, and the first layer stands for all.
    layers = full_attention_layers(DynamicCache(config=config)) or [0]
    configs = [config.per_layer_config[index] for index in layers]
    found = sorted({tuple(getattr(own, name, None) or 0 for name in _SIZES) for own in configs})
    if len(found) > 1:
        raise NotImplementedError(
            f"the full-attention layers of {config.model_type} differ in ({', '.join(_SIZES)}), {found}, and QAdACache "
            f"keeps tables of one shape for all: use transformers.DynamicCache for {config.model_type}"
        )
    return configs[0]


def layer_keys(cache: DynamicCache, index: int, config: PreTrainedConfig) -> Tensor:
    """The keys `[batch, kv_heads, tokens, dim]` that a layer holds.

    Raises:
        ValueError: it holds none of that shape.
    """
    keys = getattr(cache.layers[index], "keys", None)
    if keys is None or keys.dim() != 4:
        raise ValueError(
            f"layer {index} of {config.model_type} keeps no [batch, heads, tokens, dim] keys to take moments of: use "
            'moments="current"'
        )
    return keys


def own_attention(module: torch.nn.Module, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that `module` calls under the attention implementation `name`."""
    # Eager attention is not registered anywhere, each modeling file defines or imports its own; and a file may have a
    # table of its own. A class derived elsewhere uses those of the file it derives from.
    wanted = "eager_attention_forward" if name == "eager" else "ALL_ATTENTION_FUNCTIONS"
    for kind in type(module).__mro__:
        if (found := getattr(sys.modules.get(kind.__module__), wanted, None)) is not None:
            return found if name == "eager" else found[name]
    return ALL_ATTENTION_FUNCTIONS[name]


@contextmanager
def observed(model: PreTrainedModel, observe: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside, `observe(layer, query)` sees the queries `[batch, heads, tokens, dim]` of each of the model's layers.

    Models that do not take their attention function from transformers' table are not seen.
    """
    ours = set(model.modules())
    name = model.config.get_text_config(decoder=True)._attn_implementation
    table = ALL_ATTENTION_FUNCTIONS

    def attention(module: torch.nn.Module, query: Tensor, *args: object, **kwargs: object) -> tuple:
        if module in ours and isinstance(index := getattr(module, "layer_idx", None), int):
            observe(index, query)
        return (original or own_attention(module, name))(module, query, *args, **kwargs)

    with _observing:
        original = table.get(name)  # none for eager attention
        table[name] = attention
        try:
            yield
        finally:
            del table[name]
            if original is not None and table.get(name) is not original:  # the table had an entry of its own
                table[name] = original
