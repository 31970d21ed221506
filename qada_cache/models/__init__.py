"""A model as a cache meets it: wrappers, its inputs' device, its full-attention layers and their sizes."""

from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from .decoder_forward import find_decoder
from .latent import find_latent_sizes, has_indexers

# Names in configs of the heads of linear layers, and of the sides of a head's state: of delta rules, and of Mamba 2.
_LINEAR_SIZES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("linear_num_heads", "linear_head_dim", "linear_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
)


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
    return _find_hooked_device(model.get_input_embeddings()) or model.device


def list_layer_devices(model: PreTrainedModel | None, layers: int) -> list[torch.device]:
    """The device where each of so many decoder layers computes; the CPU, without a model."""
    if model is None:
        return [torch.device("cpu")] * layers
    devices = [find_inputs_device(model)] * layers
    for part in (find_decoder(model) or model).modules():
        index, weight = getattr(part, "layer_idx", None), next(part.parameters(), None)
        if isinstance(index, int) and 0 <= index < layers and weight is not None:
            devices[index] = _find_hooked_device(part) or (devices[index] if weight.is_meta else weight.device)
    return devices


def _find_hooked_device(module: nn.Module) -> torch.device | None:
    """The device where accelerate has a module compute; None without its hook."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        if (device := getattr(part, "execution_device", None)) is not None:
            return torch.device(device)
    return None


def check_loaded(model: PreTrainedModel) -> None:
    """Raise ValueError, if weights of a model hold nothing, and nobody brings them as they are used."""
    elsewhere = any(hasattr(part, "_hf_hook") for part in model.modules())  # accelerate does
    if not elsewhere and any(weight.is_meta for weight in model.parameters()):
        raise ValueError(
            "weights of this model are on the meta device, where nothing is computed: load them first "
            "(from_pretrained, or to_empty and load_state_dict), then build the cache"
        )


def find_long_window(config: PreTrainedConfig) -> int | None:
    """The tokens of the sliding window of a decoder's layers, if it is at least as long as the model's positions (Phi 3
    has one): such a window hides nothing from a text that is no longer than it. None, if they have none."""
    if config.is_heterogeneous:  # the config itself refuses to name what its layers have of their own
        return None
    window, longest = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    if not window or not longest or window < longest:
        return None
    return window if any(_has_window(layer, window) for layer in DynamicCache(config=config).layers) else None


def _has_window(layer: Any, window: int | None) -> bool:
    """Whether a layer of a `DynamicCache` has this sliding window. A chunk of chunked attention stands where a window
    does, and is none."""
    return type(layer) is DynamicSlidingWindowLayer and layer.sliding_window == window


def find_full_attention_layers(cache: DynamicCache, config: PreTrainedConfig) -> list[int]:
    """The layers of `DynamicCache(config=...)` that keep every key, and attend to all."""
    return _find_layers(cache, config, (DynamicLayer,))


def find_served_layers(cache: DynamicCache, config: PreTrainedConfig) -> list[int]:
    """Those that a QAdACache takes over: of full attention, and of latents that an indexer picks from."""
    return _find_layers(cache, config, (DynamicLayer, DynamicIndexedLayer) if has_indexers(config) else (DynamicLayer,))


def _find_layers(cache: DynamicCache, config: PreTrainedConfig, kinds: tuple[type, ...]) -> list[int]:
    """The layers of these kinds, and those whose sliding window hides nothing."""
    window = find_long_window(config)
    # Exact types: subclasses (sliding windows, indexers, linear attention) keep their own states.
    return [index for index, layer in enumerate(cache.layers) if type(layer) in kinds or _has_window(layer, window)]


def find_full_attention_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A decoder's config as its first managed layer has it; the config itself unless it has others for some layers."""
    return _list_configs(config)[0]


def _list_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Those of the managed layers, or the one of all layers."""
    if not config.is_heterogeneous:
        return [config]
    # Without any, the cache acts as DynamicCache, and the first layer stands for all.
    layers = find_served_layers(DynamicCache(config=config), config) or [0]
    return [config.per_layer_config[index] for index in layers]


def list_sizes(config: PreTrainedConfig) -> list[tuple[int, int, int]]:
    """`(heads, kv_heads, dim)`, the last of a head's keys, of each managed layer; one for all, if they are alike.
    Latents are keys of one head."""
    found, latents = [], find_latent_sizes(config)
    for own in _list_configs(config):
        heads = own.num_attention_heads
        kv_heads = getattr(own, "num_key_value_heads", None) or heads
        if latents is not None:
            found.append((heads, 1, latents.dim))
            continue
        found.append((heads, kv_heads, getattr(own, "head_dim", None) or own.hidden_size // heads))
    return found if len(set(found)) > 1 else found[:1]


def read_sizes(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """`(layers, heads, kv_heads, dim)` of tables of all layers, which the greatest of those served fit."""
    heads, kv_heads, dim = map(max, zip(*list_sizes(config), strict=True))
    return config.num_hidden_layers, heads, kv_heads, dim


def list_token_sizes(config: PreTrainedConfig) -> list[tuple[int, int, int]]:
    """`(kv_heads, dim, value_dim)` of a token as each managed layer stores it; one for all, if they are alike."""
    if (latents := find_latent_sizes(config)) is not None:
        turned = getattr(config, "no_rope_layers", None)  # 0 where a layer has no rotary channels
        if turned is None:
            return [(1, latents.dim, 0)]
        layers = find_served_layers(DynamicCache(config=config), config)
        return [(1, latents.dim if turned[layer] else latents.rank, 0) for layer in layers]
    return [(kv_heads, dim, find_value_dim(config, dim)) for _, kv_heads, dim in list_sizes(config)]


def find_value_dim(config: PreTrainedConfig, dim: int) -> int:
    """That of a value as it is stored beside a key of `dim` channels."""
    if attends_twice(config.model_type):
        return 2 * dim
    return getattr(find_full_attention_config(config), "v_head_dim", None) or dim


def count_state_elements(config: PreTrainedConfig) -> int:
    """Elements of the states of one linear layer for a row of text, rather too many than too few: a matrix of each
    head, and 4 tokens before a convolution. A head's matrix is as for attention if the config has no name known here.
    """
    for names in _LINEAR_SIZES:
        heads, rows, columns = (getattr(config, name, None) for name in names)
        if heads and rows and columns:
            break
    else:
        own = find_full_attention_config(config)
        heads = own.num_attention_heads
        rows = columns = getattr(own, "head_dim", None) or own.hidden_size // heads
    return heads * (rows * columns + 4 * 2 * (rows + columns))


def attends_twice(model_type: str) -> bool:
    """Whether a module of this type of decoder attends twice to its keys, with half of the values' heads each time."""
    return model_type == "diffllama"


def picks_blocks(config: PreTrainedConfig) -> bool:
    """Whether layers beside ours pick blocks of tokens (MiniMax M3): they cut the mask of all layers by queries, and
    find a token's block by its position, which has to be its place among the keys."""
    return "minimax_m3_sparse" in (getattr(config, "layer_types", None) or ())


def forgets_states(config: PreTrainedConfig) -> bool:
    """Whether a decoder has layers of Mamba's first kind (Jamba). In transformers these forget what a cache holds when
    they are given several tokens."""
    return getattr(config, "mamba_dt_rank", None) is not None
