"""Rotary positions: a model's, found by running it, and the moments of keys that are turned by them.

Position `n` turns a key's pairs of dims `(i, partner(i))` by the angles `n * frequency(i)`; dims without a frequency
stay as they are. If unturned keys do not depend on their positions, the moments of a bulk at positions `first .. first
+ length - 1` follow from theirs in closed form, for any length: every second moment is one of the unturned keys times a
mean of `cos` and `sin` of sums and differences of two frequencies.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import isclose
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..models import find_full_attention_config
from ..models.sharding import UNSHARDED, HeadShard
from .observing import read_keys

LAST = " at the end"
LAYOUTS = ("half", "interleaved", f"half{LAST}", f"interleaved{LAST}")
PROBE_POSITIONS = (1, 17, 331)
PROBE_ERROR = 0.05  # relative: rounding in bfloat16 stays below 0.01, a wrong layout is off by about 1
FREQUENCIES_BY_LENGTH = ("dynamic", "longrope")  # rope types whose frequencies depend on the length of the sequence
# Key of `KeyMoments.origin`, if frequencies depend on the length: whether a probe found those of transformers' formula.
AS_KNOWN = "frequencies change as known"
_ROPE_SIZES = ("max_position_embeddings", "hidden_size", "num_attention_heads", "head_dim")
ROPE_SETTINGS = frozenset({*_ROPE_SIZES, "rope_parameters", "layer_types"})  # all names of `read_rope_settings`
CPU = torch.device("cpu")
LOCAL_TOKENS = 128  # tokens of a sequence outside its bulk: sinks and window at their defaults


@dataclass(frozen=True)
class Rotation:
    """How one layer turns its keys; without frequencies it does not."""

    dim: int  # of a key
    frequencies: tuple[float, ...] = ()  # radians per position of each pair; the first `2 * len(frequencies)` dims turn
    # Dim `i` is paired with dim `i + len(frequencies)`; "interleaved": dim `2i` with `2i + 1`; "at the end": those are
    # of the last `2 * len(frequencies)` dims.
    layout: str = "half"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown rotary layout {self.layout!r}: use one of {', '.join(LAYOUTS)}")
        if 2 * len(self.frequencies) > self.dim:
            raise ValueError(f"{len(self.frequencies)} rotary frequencies need more than {self.dim} dims")

    @cached_property
    def by_dim(self) -> tuple[Tensor, Tensor]:
        """Frequencies `[dim]`, negative for the first dim of a pair; and partners' indices `[dim]`, of unturned dims
        their own."""
        frequency = torch.zeros(self.dim, dtype=torch.float64, device="cpu")
        partner = torch.arange(self.dim, dtype=torch.int64, device="cpu")
        pair = torch.arange(pairs := len(self.frequencies), dtype=torch.int64, device="cpu")
        one, other = (pair, pair + pairs) if self.layout.startswith("half") else (2 * pair, 2 * pair + 1)
        if self.layout.endswith(LAST):
            one, other = one + self.dim - 2 * pairs, other + self.dim - 2 * pairs
        frequency[other] = torch.tensor(self.frequencies, dtype=torch.float64, device="cpu")
        frequency[one] = -frequency[other]
        partner[one], partner[other] = other, one
        return frequency, partner

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys `[..., tokens, dim]` of position 0 at `positions` `[tokens]`; negative positions turn back. Angles are
        computed in float64 on the CPU, as some devices have none."""
        frequency, partner = self.by_dim
        angle = positions.cpu().double()[:, None] * frequency
        return keys * angle.cos().to(keys) + keys[..., partner.to(keys.device)] * angle.sin().to(keys)

    def average(
        self, mean: Tensor, covariance: Tensor, *, first: int, length: int, device: torch.device = CPU
    ) -> tuple[Tensor, Tensor]:
        """Moments of keys at every position of `first .. first + length - 1`, each key at each position, float64 on
        `device`; from their mean `[..., dim]` and population covariance `[..., dim, dim]` at position 0."""
        partner, cos, sin, cos_cos, cos_sin, sin_sin = _find_tables(self, first, length, device)
        mean = mean.to(device).double()
        second = covariance.to(device).double() + mean[..., :, None] * mean[..., None, :]
        columns = second[..., partner]
        rotated = cos_cos * second + cos_sin * columns + (cos_sin * columns).transpose(-1, -2)
        rotated += sin_sin * columns[..., partner, :]
        mean = cos * mean + sin * mean[..., partner]
        return mean, rotated - mean[..., :, None] * mean[..., None, :]


@lru_cache(maxsize=2)  # layers ask for the same ones, one after the other
def _find_tables(rotation: Rotation, first: int, length: int, device: torch.device) -> tuple[Tensor, ...]:
    """For each dim its partner, and the means of `_find_means`, of dims `[dim]` and of every two `[dim, dim]`."""
    places, *tables = _find_means(rotation, first, length)
    by_dim = (table[(places[:, None], places)[-table.dim() :]] for table in tables)
    return tuple(table.to(device) for table in (rotation.by_dim[1], *by_dim))


@lru_cache(maxsize=64)
def _find_means(rotation: Rotation, first: int, length: int) -> tuple[Tensor, ...]:
    """The place `[dim]` of each dim among distinct frequencies, as most dims of latents share one; then means over
    positions of `cos` and `sin` of each frequency, and of `cos_a cos_b`, `cos_a sin_b`, `sin_a sin_b` of every two. The
    mean of `exp(i n turn)` is that of a geometric series (Dirichlet's kernel): its middle term times a ratio of
    sines."""
    frequency, places = rotation.by_dim[0].unique(return_inverse=True)
    one, other = frequency.expand(len(frequency), -1), frequency[:, None]
    turn = torch.stack([one, other - one, other + one])
    half, middle = turn / 2, (first + (length - 1) / 2) * turn
    whole_turns = (half.sin().abs() < 1e-15) | (turn == 0)  # 0/0: the limit is 1
    ratio = torch.where(whole_turns, 1.0, (length * half).sin() / (length * half.sin()))
    (cos, less_cos, more_cos), (sin, less_sin, more_sin) = ratio * middle.cos(), ratio * middle.sin()
    return places, cos[0], sin[0], (less_cos + more_cos) / 2, (more_sin - less_sin) / 2, (less_cos - more_cos) / 2


def round_length(length: int) -> int:
    """`length` rounded up by at most 64 tokens or one part in 32, for moments. A growing sequence seldom needs new
    moments then, and a row gets the same ones in any batch."""
    step = 1 << max(6, (length - 1).bit_length() - 6)
    return -(-length // step) * step


@torch.no_grad()
def find_rotations(
    model: PreTrainedModel, tokens: Tensor, length: int, shard: HeadShard = UNSHARDED
) -> dict[int, Rotation | None]:
    """The rotation of each full-attention layer's keys, by layer; None if no candidate fits its keys.

    A single token attends to itself alone. So in every layer its key at position `p` is its key at position 0, turned
    by that layer's rotation. One forward pass over a few single `tokens` `[tokens]` shows a layer's rotary frequencies
    and pairs of dims, or that it has no rotary positions. Frequencies may depend on the `length` of the sequence.
    """
    probed = [0, *(position for position in PROBE_POSITIONS if position < length), length - 1]
    positions = torch.tensor(probed, dtype=torch.int64, device="cpu")
    ids, places = tokens.repeat_interleave(len(positions)), positions.repeat(len(tokens))
    read = read_keys(model, ids[:, None], places[:, None], chunk=1, done=lambda tokens: None)
    candidates = dict.fromkeys(  # after the pass: some models' frequencies depend on the positions read last
        tuple(buffer.cpu().double().tolist())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and buffer.dim() == 1 and not buffer.is_meta
    )
    rotations = {}
    for index, keys in read.items():
        keys = shard.gather(keys[:, :, 0], 1).unflatten(0, (len(tokens), -1)).permute(2, 0, 1, 3)
        rotations[index] = _choose_rotation(keys.double(), positions, candidates)
    return rotations


def _choose_rotation(keys: Tensor, positions: Tensor, candidates: Iterable[tuple[float, ...]]) -> Rotation | None:
    """The rotation of keys `[kv_heads, tokens, positions, dim]`, with one of these frequencies or without any; None if
    each leaves an error of `PROBE_ERROR` or more."""
    rotations = [Rotation(dim := keys.shape[-1])]
    fitting = [frequencies for frequencies in candidates if 2 * len(frequencies) <= dim]
    rotations += [Rotation(dim, frequencies, layout) for frequencies in fitting for layout in LAYOUTS]

    def measure_error(rotation: Rotation) -> float:
        rotated = rotation.rotate(keys[:, :, :1].expand_as(keys), positions)
        return float((rotated - keys).norm() / keys.norm().clamp_min(1e-30))

    best = min(rotations, key=measure_error)
    return best if measure_error(best) < PROBE_ERROR else None


def read_rope_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The part of a decoder's config that determines rotary frequencies, JSON-able; empty without rotary positions."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return {}
    config = find_full_attention_config(config)
    settings = {name: getattr(config, name) for name in _ROPE_SIZES if getattr(config, name, None) is not None}
    if set(parameters) <= set(getattr(config, "layer_types", None) or []):  # parameters by layer type
        settings["layer_types"] = list(config.layer_types)
    return {"rope_parameters": parameters, **settings}


def find_growing_parameters(settings: dict[str, Any], layer: int) -> dict[str, Any] | None:
    """A layer's rope parameters if its frequencies depend on the length of the sequence, else None."""
    parameters = settings.get("rope_parameters", {})
    if "layer_types" in settings:
        parameters = parameters.get(settings["layer_types"][layer]) or {}
    return parameters if parameters.get("rope_type") in FREQUENCIES_BY_LENGTH else None


def list_changes(settings: dict[str, Any], layers: Iterable[int]) -> dict[int, int]:
    """The longest sequence that each of these layers reads by its first frequencies, for those that change them."""
    growing = {layer: each for layer in layers if (each := find_growing_parameters(settings, layer)) is not None}
    names = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
    return {layer: (settings | each)[names[each["rope_type"]]] for layer, each in growing.items()}


def change_as_known(
    model: PreTrainedModel,
    tokens: Tensor,
    length: int,
    rotations: dict[int, Rotation],
    settings: dict[str, Any],
    shard: HeadShard = UNSHARDED,
) -> bool:
    """Whether `find_rotation_at` knows the frequencies of these `rotations`, which were found for sequences of
    `length`, and those of a far longer sequence. Some models (Hunyuan, Phi-MoE) compute them in a way of their own."""
    changes = list_changes(settings, rotations)
    longer = max([length, *(2 * change for change in changes.values())])
    beyond = find_rotations(model, tokens, longer, shard)
    for layer in changes:
        for seen, found in ((length, rotations[layer]), (longer, beyond[layer])):
            known = find_rotation_at(rotations[layer], settings, layer, seen - LOCAL_TOKENS).frequencies
            if found is None or len(found.frequencies) != len(known):
                return False
            if not all(map(partial(isclose, rel_tol=1e-4), found.frequencies, known)):
                return False
    return True


def find_rotation_at(rotation: Rotation, settings: dict[str, Any], layer: int, length: int) -> Rotation:
    """The rotation of a layer's keys once the bulk has `length` tokens, where frequencies depend on that."""
    parameters = find_growing_parameters(settings, layer)
    if not rotation.frequencies or parameters is None:
        return rotation
    sizes = {name: value for name, value in settings.items() if name != "layer_types"}
    config = PreTrainedConfig(**sizes | {"rope_parameters": parameters})
    frequencies, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length + LOCAL_TOKENS)
    return replace(rotation, frequencies=tuple(frequencies.double().tolist()))
