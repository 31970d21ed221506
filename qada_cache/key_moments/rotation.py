"""Rotary positions: a model's, found by running it, and the moments of keys that are turned by them.

Position `n` turns a key's pairs of dims `(i, partner(i))` by the angles `n * frequency(i)`; dims without a frequency
stay as they are. If unturned keys do not depend on their positions, the moments of a bulk at positions `first .. first
+ length - 1` follow from theirs in closed form, for any length: every second moment is one of the unturned keys times a
mean of `cos` and `sin` of sums and differences of two frequencies.
"""

import inspect
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .models import UNSHARDED, HeadShard, full_attention_config, full_attention_layers, inputs_device, layer_keys

LAYOUTS = ("half", "interleaved")
PROBE_POSITIONS = (1, 17, 331)
PROBE_ERROR = 0.05  # relative: rounding in bfloat16 stays below 0.01, a wrong layout is off by about 1
FREQUENCIES_BY_LENGTH = ("dynamic", "longrope")  # rope types whose frequencies depend on the length of the sequence
LOCAL_TOKENS = 128  # of a sequence beside its bulk: sinks and window at their defaults


@dataclass(frozen=True)
class Rotation:
    """How one layer turns its keys; without frequencies it does not.

    Args:
        dim: dims of a key.
        frequencies: radians per position of each pair of dims; the first `2 * len(frequencies)` dims are turned.
        layout: pairs of dims: "half", dim `i` with dim `i + len(frequencies)`; "interleaved", dim `2i` with `2i + 1`.
    """

    dim: int
    frequencies: tuple[float, ...] = ()
    layout: str = "half"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown rotary layout {self.layout!r}: use one of {', '.join(LAYOUTS)}")
        if 2 * len(self.frequencies) > self.dim:
            raise ValueError(f"{len(self.frequencies)} rotary frequencies need more than {self.dim} dims")

    @property
    def partners(self) -> Tensor:
        """The index of every dim's partner int64 `[dim]`; unturned dims are their own partners."""
        return _by_dim(self)[1]

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys `[..., tokens, dim]` of position 0 at `positions` `[tokens]`; negative positions turn back."""
        frequency, partner, sign = (tensor.to(keys.device) for tensor in _by_dim(self))
        angle = positions.to(keys.device, torch.float64)[:, None] * frequency
        return keys * angle.cos().to(keys.dtype) + keys[..., partner] * (angle.sin() * sign).to(keys.dtype)

    def average(self, mean: Tensor, covariance: Tensor, *, first: int, length: int) -> tuple[Tensor, Tensor]:
        """Moments of keys at every position of `first .. first + length - 1`, each key at each position.

        Args:
            mean: of the keys at position 0, `[..., dim]`.
            covariance: population covariance of the same, `[..., dim, dim]`.
            first, length: in tokens.

        Returns:
            mean `[..., dim]` and population covariance `[..., dim, dim]`, float64 on the CPU.
        """
        _, partner, _ = _by_dim(self)
        cos, sin, cos_cos, cos_sin, sin_sin = _means(self, first, length)
        mean = mean.double().cpu()
        second = covariance.double().cpu() + mean[..., :, None] * mean[..., None, :]
        columns = second[..., partner]
        rotated = cos_cos * second + cos_sin * columns + (cos_sin * columns).transpose(-1, -2)
        rotated += sin_sin * columns[..., partner, :]
        mean = cos * mean + sin * mean[..., partner]
        return mean, rotated - mean[..., :, None] * mean[..., None, :]


@lru_cache(maxsize=64)
def _by_dim(rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Of every dim: its frequency, its partner's index, and the sign of the partner's sine; all `[dim]`."""
    dim, pairs = rotation.dim, len(rotation.frequencies)
    frequency, partner, sign = torch.zeros(dim, dtype=torch.float64), torch.arange(dim), torch.zeros(dim).double()
    pair = torch.arange(pairs)
    one, other = (pair, pair + pairs) if rotation.layout == "half" else (2 * pair, 2 * pair + 1)
    frequency[one] = frequency[other] = torch.tensor(rotation.frequencies, dtype=torch.float64)
    partner[one], partner[other] = other, one
    sign[one], sign[other] = -1.0, 1.0
    return frequency, partner, sign


@lru_cache(maxsize=64)
def _means(rotation: Rotation, first: int, length: int) -> tuple[Tensor, ...]:
    """Means over the positions of `cos`, `sin` `[dim]`, and of their products for two dims `[dim, dim]`.

    The sines carry the sign of their dim. `cos_sin[a, b]` is the mean of `cos_a * sin_b`.
    """
    frequency, _, sign = _by_dim(rotation)
    cos, sin = _mean_cos_sin(frequency, first, length)
    cos_less, sin_less = _mean_cos_sin(frequency[:, None] - frequency[None, :], first, length)
    cos_more, sin_more = _mean_cos_sin(frequency[:, None] + frequency[None, :], first, length)
    cos_cos, sin_sin = (cos_less + cos_more) / 2, (cos_less - cos_more) / 2 * sign[:, None] * sign[None, :]
    cos_sin = (sin_more - sin_less) / 2 * sign[None, :]
    return cos, sin * sign, cos_cos, cos_sin, sin_sin


def _mean_cos_sin(frequency: Tensor, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Means of `cos(n * frequency)` and `sin(n * frequency)` over `n = first .. first + length - 1`, float64.

    The sum of a geometric series (Dirichlet's kernel): its middle term's cosine or sine, times a ratio of sines.
    """
    half = frequency / 2
    whole_turns = (half.sin().abs() < 1e-15) | (frequency == 0)  # 0/0: the limit is 1
    ratio = (length * half).sin() / (length * half.sin()).masked_fill(whole_turns, 1.0)
    ratio = ratio.masked_fill(whole_turns, 1.0)
    middle = (first + (length - 1) / 2) * frequency
    return ratio * middle.cos(), ratio * middle.sin()


def round_length(length: int) -> int:
    """`length` rounded up by at most 64 tokens or one part in 32, for moments. A growing sequence seldom needs new
    moments then, and a row gets the same ones in any batch.
    """
    step = max(64, 1 << max(0, math.ceil(math.log2(max(length, 1))) - 6))
    return -(-length // step) * step


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a forward pass can be told the tokens' positions."""
    return "position_ids" in inspect.signature(model.forward).parameters


@torch.no_grad()
def find_rotations(
    model: PreTrainedModel, tokens: Tensor, length: int, shard: HeadShard = UNSHARDED
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
    positions = torch.tensor([0, *(position for position in PROBE_POSITIONS if position < length), length - 1])
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if not takes_positions(model):
        return dict.fromkeys(full_attention_layers(cache))
    ids = tokens[:, None].expand(-1, len(positions)).reshape(-1, 1)
    position_ids = positions.repeat(len(tokens))[:, None]
    device = inputs_device(model)
    model(input_ids=ids.to(device), position_ids=position_ids.to(device), past_key_values=cache, use_cache=True)
    candidates = dict.fromkeys(
        tuple(buffer.double().tolist())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and buffer.dim() == 1 and not buffer.is_meta
    )
    found = {}
    for index in full_attention_layers(cache):
        keys = shard.gather(layer_keys(cache, index, config), 1)[:, :, 0].unflatten(0, (len(tokens), -1))
        # [kv_heads, tokens, positions, dim]
        found[index] = _best_rotation(keys.permute(2, 0, 1, 3).double().cpu(), positions, list(candidates))
    return found


def _best_rotation(keys: Tensor, positions: Tensor, candidates: list[tuple[float, ...]]) -> Rotation | None:
    dim = keys.shape[-1]
    rotations = [Rotation(dim)]
    rotations += [Rotation(dim, found, layout) for found in candidates for layout in LAYOUTS if 2 * len(found) <= dim]

    def error(rotation: Rotation) -> float:
        rotated = rotation.rotate(keys[:, :, :1].expand_as(keys), positions)
        return float((rotated - keys).norm() / keys.norm().clamp_min(1e-30))

    errors = [error(rotation) for rotation in rotations]
    best = min(range(len(rotations)), key=errors.__getitem__)
    return rotations[best] if errors[best] < PROBE_ERROR else None


def rope_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The part of a decoder's config that determines rotary frequencies, JSON-able; empty without rotary positions."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return {}
    config = full_attention_config(config)
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
