"""A model as a cache meets it: wrappers, its inputs' device, its full-attention layers and their sizes."""

from typing import Any

import torch
from torch._dynamo import OptimizedModule
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from .latent import find_latent_sizes, has_indexers

_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")


def unwrap_model(model: Any) -> Any:
    """The model that `torch.compile` or peft wrapped; anything else as it is. Peft's prompt learning is refused."""
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


def find_inputs_device(model: PreTrainedModel) -> torch.device:
    """The device for token ids: the embeddings compute there, and may be kept elsewhere."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        if (device := getattr(part, "execution_device", None)) is not None:
            return torch.device(device)
    return model.device


def find_full_attention_layers(cache: DynamicCache) -> list[int]:
    """The layers of `DynamicCache(config=...)` that keep every key, and attend to all."""
    # Exact type: subclasses (sliding windows, indexers, linear attention) keep their own states.
    return [index for index, layer in enumerate(cache.layers) if type(layer) is DynamicLayer]


def find_served_layers(cache: DynamicCache, config: PreTrainedConfig) -> list[int]:
    """Those that a QAdACache takes over: of full attention, and of latents that an indexer picks from."""
    kinds = (DynamicLayer, DynamicIndexedLayer) if has_indexers(config) else (DynamicLayer,)
    return [index for index, layer in enumerate(cache.layers) if type(layer) in kinds]


def find_full_attention_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A decoder's config as its managed layers have it; the config itself unless it has others for some layers.
    Managed layers that differ in their heads are refused."""
    if not config.is_heterogeneous:
        return config
    # Without any, the cache acts as DynamicCache, and the first layer stands for all.
    layers = find_served_layers(DynamicCache(config=config), config) or [0]
    configs = [config.per_layer_config[index] for index in layers]
    found = sorted({tuple(getattr(own, name, None) or 0 for name in _SIZES) for own in configs})
    if len(found) > 1:
        raise NotImplementedError(
            f"the full-attention layers of {config.model_type} differ in ({', '.join(_SIZES)}), {found}, and QAdACache "
            f"keeps tables of one shape for all: use transformers.DynamicCache for {config.model_type}"
        )
    return configs[0]


def read_sizes(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """`(layers, heads, kv_heads, dim)`, the last of a head's keys; of the layers that are served."""
    config = find_full_attention_config(config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, heads, kv_heads, dim


def read_token_sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
    """`(kv_heads, dim, value_dim)` of a token as it is stored by the layers that are served."""
    if (latents := find_latent_sizes(config)) is not None:
        return 1, latents.dim, 0
    _, _, kv_heads, dim = read_sizes(config)
    return kv_heads, dim, getattr(config, "v_head_dim", None) or dim
