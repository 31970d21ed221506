"""Latent attention (DeepSeek-V2's, MLA): which models cache one latent a token, and how a layer expands it.

An attention module of these caches `rank` channels `latent` and `rope` channels `rotary` a token, for all heads. Its
method `expand_kv` computes keys `[W_k latent | rotary]` and values `W_v latent` from them, by `kv_b_proj`.

Some modules have an indexer, which picks the tokens that a query reads. They build a mask as wide as the keys that
`expand_kv` returned, so it must return a key for each token. If a `QAdALayer` handed out the latent, `expand_kv` of
these classes therefore returns what `QAdALayer`'s `expand` returns.
"""

import functools
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

from .plain import find_origin

EXPANDING = "kv_b_proj"  # the projection of a latent to heads' keys and values
INDEXED = "indexed_attention"  # type of a layer whose tokens an indexer picks, its own or an earlier layer's
_TENSOR_PARALLELISM = "transformers.distributed.tensor_parallel"  # which puts a function before a module's `forward`
_FLOATING = (torch.float32, torch.float16, torch.bfloat16)
_asking: list[Any] = []  # classes whose `expand_kv` asks our layers, see `have_ask`


class LatentSizes(NamedTuple):
    """Channels of a token in the cache: `rank` of its latent, `rope` of its rotary part."""

    rank: int
    rope: int

    @property
    def dim(self) -> int:
        """All channels of a token."""
        return self.rank + self.rope


class Projections(NamedTuple):
    """A layer's projection of a latent: keys are `latent @ keys.mT + key_bias`, values alike."""

    keys: Tensor  # `[heads, nope, rank]`, of the channels that do not turn
    values: Tensor  # `[heads, value_dim, rank]`
    key_bias: Tensor | None = None  # `[heads, nope]`
    value_bias: Tensor | None = None  # `[heads, value_dim]`


def find_latent_sizes(config: PreTrainedConfig) -> LatentSizes | None:
    """The sizes of a decoder whose full-attention layers cache latents; None for any other. Some decoders of older
    transformers expand latents and cache keys and values; for these it is None, too."""
    types = getattr(config, "layer_types", None) or ()
    indexed = types.index(INDEXED) if INDEXED in types else None
    layer_config = config if indexed is None or not config.is_heterogeneous else config.per_layer_config[indexed]
    rank, rope = (getattr(layer_config, name, None) or 0 for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if not rank or not (rope or indexed is not None):
        return None
    return LatentSizes(rank, rope) if _find_classes(config) else None


def has_indexers(config: PreTrainedConfig) -> bool:
    """Whether a decoder has layers of latents whose tokens an indexer picks."""
    return INDEXED in (getattr(config, "layer_types", None) or ()) and find_latent_sizes(config) is not None


def find_indexer_dim(config: PreTrainedConfig, layer: int) -> int:
    """Channels that the indexer of a decoder's layer caches a token; 0 if the layer has none, or an earlier layer's."""
    if not has_indexers(config) or config.layer_types[layer] != INDEXED:
        return 0
    if (kinds := getattr(config, "indexer_types", None)) is not None and kinds[layer] == "shared":
        return 0
    # Pooled keys are cached with a gate for each channel, and a flag: whether the token is real.
    return 2 * config.index_head_dim + 1 if pools_keys(config) else config.index_head_dim


def pools_keys(config: PreTrainedConfig) -> bool:
    """Whether a decoder's indexers pool keys; the last cached channel then says whether the token is real."""
    return bool(getattr(config, "index_kpool", 0))


def have_ask(config: PreTrainedConfig) -> None:
    """Replace `expand_kv` of the attention classes of a decoder with indexers. For a latent that is tagged with a layer
    it calls the layer's `expand(original, module, latent, rotary)`, where `original` is the class's method. Idempotent.
    """
    for kind in _find_classes(config) if has_indexers(config) else ():
        if not hasattr(kind.expand_kv, "_qada_own"):
            kind.expand_kv = _ask_first(kind.expand_kv)
            _asking.append(kind)


def have_ask_no_more() -> None:
    """Undo `have_ask`."""
    while _asking:
        kind = _asking.pop()
        kind.expand_kv = kind.expand_kv._qada_own


def _ask_first(original: Any) -> Any:
    @functools.wraps(original)
    def expand_kv(self: nn.Module, kv_nope: Tensor, k_rot: Tensor) -> Any:
        layer = getattr(kv_nope, "_qada_layer", None)
        return original(self, kv_nope, k_rot) if layer is None else layer.expand(original, self, kv_nope, k_rot)

    expand_kv._qada_own = original  # type: ignore[attr-defined]
    return expand_kv


def _find_classes(config: PreTrainedConfig) -> list[Any]:
    """The attention classes of a decoder that cache latents."""
    # Some configs use another type's modeling file. Only transformers' table of model classes says which.
    by_config = type(config).__module__.replace("configuration_", "modeling_")
    model_class = getattr(AutoModel, "_model_mapping", {}).get(type(config), None)
    files = [sys.modules.get(name) for name in (by_config, getattr(model_class, "__module__", by_config))]
    return [kind for file in files if file is not None for kind in vars(file).values() if has_latents(kind)]


def check_tunable(config: PreTrainedConfig) -> None:
    """Raise NotImplementedError for a decoder whose layers cache latents."""
    if find_latent_sizes(config) is not None:
        raise NotImplementedError(
            f"caches read all tokens of latent attention by default, which {config.model_type} has: there are no "
            "thresholds to tune"
        )


def has_latents(module: Any) -> bool:
    """Whether an attention module, or a class of attention modules, caches latents."""
    return hasattr(module, "expand_kv")


def is_plain(module: nn.Module) -> bool:
    """Whether latents are expanded by the weight of `kv_b_proj` alone, or by this process's rows of it: no adapter,
    quantization or hook."""
    projection: Any = getattr(module, EXPANDING, None)
    if type(projection) is not nn.Linear or projection._forward_hooks or projection._forward_pre_hooks:
        return False
    if (forward := vars(projection).get("forward")) is not None and find_origin(forward) != _TENSOR_PARALLELISM:
        return False
    parameters = (projection.weight, projection.bias)
    parts = [_read_local(parameter) for parameter in parameters if parameter is not None]
    return all(type(each) in (nn.Parameter, Tensor) and each.dtype in _FLOATING and not each.is_meta for each in parts)


def read_projections(module: nn.Module, sizes: LatentSizes, heads: int, nope: int) -> Projections:
    """The projections of a module that `is_plain`, for this process's heads: views of its weight, which has each head's
    `nope + value_dim` rows in turn."""
    projection: Any = module.kv_b_proj
    weight, bias = _read_local(projection.weight).detach().view(heads, -1, sizes.rank), projection.bias
    if bias is None:
        return Projections(weight[:, :nope], weight[:, nope:])
    bias = _read_local(bias).detach().view(heads, -1)
    return Projections(weight[:, :nope], weight[:, nope:], bias[:, :nope], bias[:, nope:])


def _read_local(parameter: Any) -> Tensor:
    """This process's part of a parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def ask_projections(module: nn.Module, sizes: LatentSizes, nope: int, like: Tensor) -> Projections:
    """The projections of any module, from its output for the identity and for zero; dtype and device are those of its
    output for latents `like`. It costs as much as to expand `rank` tokens."""
    units = like.new_zeros(1, 1, sizes.rank + 1, sizes.rank)
    units[0, 0, : sizes.rank].fill_diagonal_(1)
    keys, values = expand(module, units, units.new_zeros(1, 1, sizes.rank + 1, sizes.rope))
    keys, values = keys[0, :, :, :nope], values[0]
    if not (keys[:, -1:].any() or values[:, -1:].any()):
        return Projections(keys[:, :-1].mT, values[:, :-1].mT)
    key_part, value_part = ((part[:, :-1] - part[:, -1:]).mT for part in (keys, values))
    return Projections(key_part, value_part, keys[:, -1], values[:, -1])


def add_bias(projected: Tensor, bias: Tensor | None) -> Tensor:
    """`projected` `[batch, heads, tokens, dim]` plus a bias `[heads, dim]`."""
    return projected if bias is None else projected + bias.unsqueeze(-2)


def absorb(states: Tensor, by: Projections, sizes: LatentSizes) -> Tensor:
    """Absorbed queries `[batch, heads, queries, rank + rope]` of queries `[batch, heads, queries, nope + rope]`:
    `[q W_k | q_rotary]`, in the dtype of projections."""
    nope, rotary = states.split((by.keys.shape[1], sizes.rope), dim=-1)
    nope = nope.to(by.keys.dtype)
    return torch.cat((nope @ by.keys, rotary.to(nope)), dim=-1)


def expand(module: nn.Module, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[batch, heads, tokens, nope + rope]` and values `[batch, heads, tokens, value_dim]` of `latent` `[batch, 1,
    tokens, rank]` and `rotary` `[batch, 1, tokens, rope]`."""
    weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    dtype = weight.dtype if isinstance(weight, Tensor) and weight.dtype in _FLOATING else latent.dtype
    return module.expand_kv(latent.to(dtype), rotary.to(dtype))  # type: ignore[operator]
