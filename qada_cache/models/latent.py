"""Latent attention (DeepSeek-V2's, MLA): which models cache one latent a token, and how a layer expands it.

A module of these hands a cache `rank` channels `latent` and `rope` channels `rotary` a token, for all heads together.
Its method `expand_kv` makes keys `[W_k latent | rotary]` and values `W_v latent` of them, by `kv_b_proj`.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

_FLOATING = (torch.float32, torch.float16, torch.bfloat16)


class LatentSizes(NamedTuple):
    """Channels of a token in the cache, of which there are `dim`."""

    rank: int
    rope: int

    @property
    def dim(self) -> int:
        """Both together."""
        return self.rank + self.rope


class Projections(NamedTuple):
    """How a layer makes keys and values of a latent: `latent @ keys.mT + key_bias`, and the values likewise."""

    keys: Tensor  # `[heads, nope, rank]`, of the channels that do not turn
    values: Tensor  # `[heads, value_dim, rank]`
    key_bias: Tensor | None = None  # `[heads, nope]`
    value_bias: Tensor | None = None  # `[heads, value_dim]`


def find_latent_sizes(config: PreTrainedConfig) -> LatentSizes | None:
    """Those of a decoder whose full-attention layers cache latents; None for another, one that caches expanded keys and
    values of its latents included, as some in older transformers do."""
    rank, rope = (getattr(config, name, None) or 0 for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if not rank or not rope:
        return None
    # Some types have another one's modeling file, which only transformers' own table of classes tells.
    own = type(config).__module__.replace("configuration_", "modeling_")
    known = getattr(AutoModel, "_model_mapping", {}).get(type(config), None)
    files = [sys.modules.get(name) for name in (own, getattr(known, "__module__", own))]
    expands = any(has_latents(kind) for file in files if file is not None for kind in vars(file).values())
    return LatentSizes(rank, rope) if expands else None


def check_decides(config: PreTrainedConfig) -> None:
    """Raise NotImplementedError for a decoder whose layers cache latents: all of these are read."""
    if find_latent_sizes(config) is not None:
        raise NotImplementedError(
            f"QAdACache reads all tokens of latent attention, which {config.model_type} has: nothing is decided, so "
            "there are no moments to collect and no thresholds to tune"
        )


def has_latents(module: Any) -> bool:
    """Whether an attention module, or a class of some, caches latents."""
    return hasattr(module, "expand_kv")


def is_plain(module: nn.Module) -> bool:
    """Whether the weight of `kv_b_proj` is all that expands latents: no adapter, quantized weight, part of one, or hook
    has a say."""
    found: Any = getattr(module, "kv_b_proj", None)
    if type(found) is not nn.Linear or "forward" in vars(found) or found._forward_hooks or found._forward_pre_hooks:
        return False
    parameters = [parameter for parameter in (found.weight, found.bias) if parameter is not None]
    return all(type(each) is nn.Parameter and each.dtype in _FLOATING and not each.is_meta for each in parameters)


def read_projections(module: nn.Module, sizes: LatentSizes, heads: int, nope: int) -> Projections:
    """Those of a module that `is_plain`: views of its weight, whose rows are those of each head in turn."""
    projection: Any = module.kv_b_proj
    weight, bias = projection.weight.detach().view(heads, -1, sizes.rank), projection.bias
    if bias is None:
        return Projections(weight[:, :nope], weight[:, nope:])
    bias = bias.detach().view(heads, -1)
    return Projections(weight[:, :nope], weight[:, nope:], bias[:, :nope], bias[:, nope:])


def ask_projections(module: nn.Module, sizes: LatentSizes, nope: int, like: Tensor) -> Projections:
    """Those of any module, in the dtype and on the device of its output for latents `like`: what it makes of the
    identity, and of zero. That costs as much as to expand `rank` tokens."""
    units = like.new_zeros(1, 1, sizes.rank + 1, sizes.rank)
    units[0, 0, : sizes.rank].fill_diagonal_(1)
    keys, values = expand(module, units, units.new_zeros(1, 1, sizes.rank + 1, sizes.rope))
    keys, values = keys[0, :, :, :nope], values[0]
    if not (keys[:, -1:].any() or values[:, -1:].any()):
        return Projections(keys[:, :-1].mT, values[:, :-1].mT)
    key_part, value_part = ((part[:, :-1] - part[:, -1:]).mT for part in (keys, values))
    return Projections(key_part, value_part, keys[:, -1], values[:, -1])


def expand(module: nn.Module, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[batch, heads, tokens, nope + rope]` and values of latents `[batch, 1, tokens, rank]` and `rope`."""
    weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    dtype = weight.dtype if isinstance(weight, Tensor) and weight.dtype in _FLOATING else latent.dtype
    return module.expand_kv(latent.to(dtype), rotary.to(dtype))  # type: ignore[operator]
