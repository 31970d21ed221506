"""Latent attention (DeepSeek-V2's, MLA): which models cache one latent a token, and how a layer expands it.

A module of these hands a cache `rank` channels `latent` and `rope` channels `rotary` a token, for all heads together.
Its method `expand_kv` makes keys `[W_k latent | rotary]` and values `W_v latent` of them, by `kv_b_proj`.

Some have an indexer, which picks the tokens that a query reads. Such a module makes a mask as wide as the keys that it
was given, so it has to be given as many as there are tokens. `expand_kv` of these classes therefore asks the layer that
handed out a latent, if it is one of ours, what to return.
"""

import functools
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

from .plain import find_origin

EXPANDING = "kv_b_proj"  # the projection that makes heads' keys and values of a latent
INDEXED = "indexed_attention"  # type of a layer with an indexer, its own or an earlier layer's
_TENSOR_PARALLELISM = "transformers.distributed.tensor_parallel"  # which puts a function before a module's `forward`
_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
_asking: list[Any] = []  # classes whose `expand_kv` asks


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
    types = getattr(config, "layer_types", None) or ()
    indexed = types.index(INDEXED) if INDEXED in types else None
    own = config if indexed is None or not config.is_heterogeneous else config.per_layer_config[indexed]
    rank, rope = (getattr(own, name, None) or 0 for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if not rank or not (rope or indexed is not None):
        return None
    return LatentSizes(rank, rope) if _find_classes(config) else None


def has_indexers(config: PreTrainedConfig) -> bool:
    """Whether a decoder has layers of latents whose tokens an indexer picks."""
    return INDEXED in (getattr(config, "layer_types", None) or ()) and find_latent_sizes(config) is not None


def find_indexer_dim(config: PreTrainedConfig, layer: int) -> int:
    """Channels of a token's key in the indexer of a decoder's layer; 0 of a layer without one of its own."""
    if not has_indexers(config) or config.layer_types[layer] != INDEXED:
        return 0
    if (kinds := getattr(config, "indexer_types", None)) is not None and kinds[layer] == "shared":
        return 0
    # Keys that are pooled come with as many gates, and whether the token is real.
    return 2 * config.index_head_dim + 1 if pools_keys(config) else config.index_head_dim


def pools_keys(config: PreTrainedConfig) -> bool:
    """Whether a decoder's indexers cache, last of all channels of a key, whether its token is real."""
    return bool(getattr(config, "index_kpool", 0))


def have_ask(config: PreTrainedConfig) -> None:
    """Have `expand_kv` of the modules of such a decoder ask the layer that a latent is tagged with, by its
    `expand(own, module, latent, rotary)`, with the method as it was as `own`. Idempotent."""
    for kind in _find_classes(config) if has_indexers(config) else ():
        if not hasattr(kind.expand_kv, "_qada_own"):
            kind.expand_kv = _ask_first(kind.expand_kv)
            _asking.append(kind)


def have_ask_no_more() -> None:
    """Undo `have_ask`."""
    while _asking:
        kind = _asking.pop()
        kind.expand_kv = kind.expand_kv._qada_own


def _ask_first(own: Any) -> Any:
    @functools.wraps(own)
    def expand_kv(self: nn.Module, kv_nope: Tensor, k_rot: Tensor) -> Any:
        layer = getattr(kv_nope, "_qada_layer", None)
        return own(self, kv_nope, k_rot) if layer is None else layer.expand(own, self, kv_nope, k_rot)

    expand_kv._qada_own = own  # type: ignore[attr-defined]
    return expand_kv


def _find_classes(config: PreTrainedConfig) -> list[Any]:
    """Those of a decoder's attention that cache latents."""
    # Some types have another one's modeling file, which only transformers' own table of classes tells.
    own = type(config).__module__.replace("configuration_", "modeling_")
    known = getattr(AutoModel, "_model_mapping", {}).get(type(config), None)
    files = [sys.modules.get(name) for name in (own, getattr(known, "__module__", own))]
    return [kind for file in files if file is not None for kind in vars(file).values() if has_latents(kind)]


def check_tunable(config: PreTrainedConfig) -> None:
    """Raise NotImplementedError for a decoder whose layers cache latents."""
    if find_latent_sizes(config) is not None:
        raise NotImplementedError(
            f"caches read all tokens of latent attention by default, which {config.model_type} has: there are no "
            "thresholds to tune"
        )


def has_latents(module: Any) -> bool:
    """Whether an attention module, or a class of some, caches latents."""
    return hasattr(module, "expand_kv")


def is_plain(module: nn.Module) -> bool:
    """Whether the weight of `kv_b_proj`, or the rows of it that this process has, is all that expands latents: no
    adapter, quantized weight, or hook has a say."""
    found: Any = getattr(module, EXPANDING, None)
    if type(found) is not nn.Linear or found._forward_hooks or found._forward_pre_hooks:
        return False
    if (forward := vars(found).get("forward")) is not None and find_origin(forward) != _TENSOR_PARALLELISM:
        return False
    parts = [_read_own(parameter) for parameter in (found.weight, found.bias) if parameter is not None]
    return all(type(each) in (nn.Parameter, Tensor) and each.dtype in _FLOATING and not each.is_meta for each in parts)


def read_projections(module: nn.Module, sizes: LatentSizes, heads: int, nope: int) -> Projections:
    """Those of a module that `is_plain`, for the heads that this process has: views of its weight, whose rows are those
    of each head in turn."""
    projection: Any = module.kv_b_proj
    weight, bias = _read_own(projection.weight).detach().view(heads, -1, sizes.rank), projection.bias
    if bias is None:
        return Projections(weight[:, :nope], weight[:, nope:])
    bias = _read_own(bias).detach().view(heads, -1)
    return Projections(weight[:, :nope], weight[:, nope:], bias[:, :nope], bias[:, nope:])


def _read_own(parameter: Any) -> Tensor:
    """This process's part of a parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


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


def add_bias(made: Tensor, bias: Tensor | None) -> Tensor:
    """`[batch, heads, tokens, dim]` with a bias `[heads, dim]`."""
    return made if bias is None else made + bias.unsqueeze(-2)


def absorb(states: Tensor, by: Projections, sizes: LatentSizes) -> Tensor:
    """Queries `[batch, heads, queries, nope + rope]` as they meet latents, `[.., rank + rope]`: `[q W_k | q_rotary]`,
    in the dtype of projections."""
    own, rotary = states.split((by.keys.shape[1], sizes.rope), dim=-1)
    own = own.to(by.keys.dtype)
    return torch.cat((own @ by.keys, rotary.to(own)), dim=-1)


def expand(module: nn.Module, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[batch, heads, tokens, nope + rope]` and values of latents `[batch, 1, tokens, rank]` and `rope`."""
    weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    dtype = weight.dtype if isinstance(weight, Tensor) and weight.dtype in _FLOATING else latent.dtype
    return module.expand_kv(latent.to(dtype), rotary.to(dtype))  # type: ignore[operator]
