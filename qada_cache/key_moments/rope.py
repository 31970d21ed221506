"""A model's rotary positions, found by running the model rather than by knowing its family."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .placement import inputs_device
from .rotation import LAYOUTS, Rotation
from .served import served_config, served_layers
from .sharding import WHOLE, HeadShard

PROBE_POSITIONS = (1, 17, 331)
PROBE_ERROR = 0.05  # relative: rounding in bfloat16 stays below 0.01, a wrong layout is off by about 1
FREQUENCIES_BY_LENGTH = ("dynamic", "longrope")  # rope types whose frequencies depend on the length of the sequence
LOCAL_TOKENS = 128  # of a sequence beside its bulk: sinks and window at their defaults


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a forward pass can be told the tokens' positions."""
    return "position_ids" in inspect.signature(model.forward).parameters


def layer_keys(cache: DynamicCache, index: int, config: PreTrainedConfig, shard: HeadShard) -> Tensor:
    """The keys `[batch, kv_heads, tokens, dim]` that a layer holds, of all heads: every process of the shard's asks.

    Raises:
        ValueError: it holds none of that shape.
    """
    keys = getattr(cache.layers[index], "keys", None)
    if keys is None or keys.dim() != 4:
        raise ValueError(
            f"layer {index} of {config.model_type} keeps no [batch, heads, tokens, dim] keys to take moments of: use "
            'moments="current"'
        )
    return shard.gather(keys, 1)


@torch.no_grad()
def find_rotations(
    model: PreTrainedModel, tokens: Tensor, length: int, shard: HeadShard = WHOLE
) -> dict[int, Rotation | None]:
    """How each full-attention layer turns its keys with position; None where that was not found out.

    A single token attends to itself alone. So in every layer its key at position `p` is its key at position 0, turned
    by that layer's rotation. One forward pass over single tokens shows a layer's rotary frequencies and pairs of dims,
    or that it has no rotary positions.

    Args:
        model: in eval mode.
        tokens: a few different token ids `[tokens]`.
        length: of the sequence of keys to turn back: frequencies may depend on it.
        shard: the heads of this process.
    """
    config = model.config.get_text_config(decoder=True)
    positions = torch.tensor([0, *(position for position in PROBE_POSITIONS if position < length), length - 1])
    cache = DynamicCache(config=config)
    ids = tokens[:, None].expand(-1, len(positions)).reshape(-1, 1)
    position_ids = positions.repeat(len(tokens))[:, None]
    if not takes_positions(model):
        return dict.fromkeys(served_layers(cache))
    device = inputs_device(model)
    model(
        input_ids=ids.to(device),
        position_ids=position_ids.to(device),
        past_key_values=cache,
        use_cache=True,
    )
    candidates = dict.fromkeys(
        tuple(buffer.double().tolist())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and buffer.dim() == 1 and not buffer.is_meta
    )
    found = {}
    for index in served_layers(cache):
        # [kv_heads, tokens, positions, dim]
        keys = layer_keys(cache, index, config, shard)[:, :, 0].unflatten(0, (len(tokens), -1)).permute(2, 0, 1, 3)
        found[index] = _best_rotation(keys.double().cpu(), positions, list(candidates))
    return found


def _best_rotation(keys: Tensor, positions: Tensor, candidates: list[tuple[float, ...]]) -> Rotation | None:
    dim = keys.shape[-1]
    rotations = [Rotation(dim)]
    rotations += [Rotation(dim, found, layout) for found in candidates for layout in LAYOUTS if 2 * len(found) <= dim]

    def error(rotation: Rotation) -> float:
        turned = rotation.turn(keys[:, :, :1].expand_as(keys), positions)
        return float((turned - keys).norm() / keys.norm().clamp_min(1e-30))

    errors = [error(rotation) for rotation in rotations]
    best = min(range(len(rotations)), key=errors.__getitem__)
    return rotations[best] if errors[best] < PROBE_ERROR else None


def rope_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The part of a decoder's config that determines rotary frequencies, JSON-able; empty without rotary positions."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return {}
    config = served_config(config)
    names = ("max_position_embeddings", "hidden_size", "num_attention_heads", "head_dim")
    known = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    if set(parameters) <= set(getattr(config, "layer_types", None) or []):  # parameters by layer type
        known["layer_types"] = list(config.layer_types)
    return {"rope_parameters": parameters, **known}


def frequencies_by_length(settings: dict[str, Any]) -> bool:
    """Whether any layer's frequencies depend on the length of the sequence."""
    parameters = settings.get("rope_parameters", {})
    kinds = parameters.values() if "layer_types" in settings else [parameters]
    return any((kind or {}).get("rope_type") in FREQUENCIES_BY_LENGTH for kind in kinds)


def rotation_at(rotation: Rotation, settings: dict[str, Any], layer: int, length: int) -> Rotation:
    """The rotation of a layer's keys once the bulk has `length` tokens, where frequencies depend on that."""
    parameters = settings.get("rope_parameters", {})
    layer_type = settings["layer_types"][layer] if "layer_types" in settings else None
    parameters = parameters if layer_type is None else parameters.get(layer_type) or {}
    if not rotation.frequencies or parameters.get("rope_type") not in FREQUENCIES_BY_LENGTH:
        return rotation
    fields = {name: value for name, value in settings.items() if name != "layer_types"}
    if layer_type is not None:
        fields["rope_parameters"] = parameters
    config = PreTrainedConfig(**fields)
    frequencies, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length + LOCAL_TOKENS)
    return Rotation(rotation.dim, tuple(frequencies.double().tolist()), rotation.layout)
