"""The layers of a model that a cache serves, and their part of its config, as layers may differ in size."""

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")


def served_layers(cache: DynamicCache) -> list[int]:
    """The layers of `DynamicCache(config=...)` that keep every key: those a QAdACache takes over."""
    # Exact type: subclasses (sliding windows, indexers, linear attention) keep their own states.
    return [index for index, layer in enumerate(cache.layers) if type(layer) is DynamicLayer]


def served_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A decoder's config as its served layers have it; the config itself unless it has others for some layers.

    Raises:
        NotImplementedError: these layers differ in their heads.
    """
    if not config.is_heterogeneous:
        return config
    # Without any, the cache acts as DynamicCache, and the first layer stands for all.
    layers = served_layers(DynamicCache(config=config)) or [0]
    configs = [config.per_layer_config[index] for index in layers]
    found = sorted({tuple(getattr(own, name, None) or 0 for name in _SIZES) for own in configs})
    if len(found) > 1:
        raise NotImplementedError(
            f"the full-attention layers of {config.model_type} differ in ({', '.join(_SIZES)}), {found}, and QAdACache "
            f"keeps tables of one shape for all: use transformers.DynamicCache for {config.model_type}"
        )
    return configs[0]
