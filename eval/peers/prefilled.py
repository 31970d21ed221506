"""What other methods start from: a text read exactly into transformers' own cache, which each of them makes smaller.

Nothing of QAdACache takes part. What follows the text attends exactly to what is left of it, and stands where it would
if all had been kept.
"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from eval.deciding.following import SPARE
from eval.deciding.tokens import split
from eval.deciding.ways import Way
from eval.peers.evicting import kept
from eval.peers.queries import Queries
from eval.texts.documents import Document
from qada_cache.key_moments.served import observed
from qada_cache.tuning.measuring import VALUE_BITS

EVICTED, QUANTIZED = "evicted", "quantized"
PEERS = (EVICTED, QUANTIZED)  # criteria of ways that are tried here
GROUP = 64  # values with a scale in common


class Prefilled:
    """A text's state under full attention.

    Args:
        model: of a kind in `queries.SERVED`.
        ids: int64 `[1, tokens]`, of which the state is.
        near: tokens that are no part of the bulk, which shares are of: sinks and window of a `QAdACache`.

    Raises:
        NotImplementedError: the model is of another kind.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, ids: Tensor, near: int) -> None:
        self.model, self.tokens = model, ids.shape[1]
        self.near = min(near, self.tokens)
        self.queries, self.cache = Queries(model, self.tokens), DynamicCache(config=model.config)
        with observed(model, self.queries):
            model(ids.to(model.device), past_key_values=self.cache, logits_to_keep=1)

    def count(self, part: float) -> int:
        """How many tokens a KV head keeps: as many as sinks and window have, and this share of the bulk's."""
        return self.near + math.ceil(part * (self.tokens - self.near))

    def bytes_read(self, way: Way) -> float:
        """Of the bulk's bytes, those that every step reads."""
        if way.criterion == QUANTIZED:
            return share(int(way.read.split()[0]), self.cache.layers[0].keys.shape[-1])
        return (self.count(split(way.read)[1]) - self.near) / max(self.tokens - self.near, 1)

    def cache_of(self, way: Way) -> DynamicCache:
        """A cache of its own for a way: "SnapKV, 0.05" keeps that share of the bulk, "4 bits" all in so many bits."""
        if way.criterion == QUANTIZED:
            bits = int(way.read.split()[0])
            return self._changed(lambda _, *both: tuple(quantized(part, bits) for part in both))
        method, part = split(way.read)

        def evicted(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
            places = kept(method, layer, self.queries, keys, values, self.count(part)).unsqueeze(-1)
            return tuple(both.gather(2, places.expand(-1, -1, -1, both.shape[-1])) for both in (keys, values))

        return self._changed(evicted)

    def _changed(self, change: Callable[..., tuple[Tensor, ...]]) -> DynamicCache:
        """A copy of the cache, of which `change` is given each layer's index, keys and values."""
        made = copy.copy(self.cache)
        made.layers = [copy.copy(layer) for layer in self.cache.layers]  # which write nothing in place
        for index, layer in enumerate(made.layers):
            layer.keys, layer.values = change(index, layer.keys, layer.values)
        return made

    def follow(self, document: Document, way: Way) -> Tensor:
        """Log-probabilities `[tokens, vocabulary]` of the document's answer, by what a way keeps of its text."""
        return self.feed(self.cache_of(way), document.following)[document.question - 1 :]

    def generate(self, document: Document, way: Way) -> Tensor:
        """An answer int64 `[1, tokens]`, greedily, somewhat longer than the right one."""
        # `generate` of transformers takes the length of a cache for the number of tokens that were read.
        cache, ids, past, said = self.cache_of(way), document.prompt[:, -document.question :], 0, []
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        while len(said) < document.answer.shape[1] + SPARE and not (said and said[-1] in ends):
            said.append(int(self.feed(cache, ids, past)[-1].argmax()))
            past, ids = past + ids.shape[1], torch.tensor([said[-1:]])
        return torch.tensor([said])

    @torch.no_grad()
    def feed(self, cache: DynamicCache, ids: Tensor, past: int = 0) -> Tensor:
        """Log-probabilities `[tokens, vocabulary]` after each of `ids` `[1, tokens]`, which `cache` takes in.

        `past` tokens were given after the text before these.
        """
        start = self.tokens + past
        places = torch.arange(start, start + ids.shape[1], device=self.model.device).unsqueeze(0)
        logits = self.model(ids.to(self.model.device), past_key_values=cache, position_ids=places).logits[0]
        return logits.float().log_softmax(dim=-1)


def group(dim: int) -> int:
    """How many of a head's `dim` channels have a scale in common; all of them if they are no groups of 64."""
    return GROUP if dim % GROUP == 0 else dim


def quantized(values: Tensor, bits: int) -> Tensor:
    """Keys or values `[..., dim]` as that many bits a value give them, in their own dtype.

    As transformers' `QuantizedCache` has them by default: asymmetric, quanto's `axis=0`, a scale and a least value for
    each group of a token's channels. All of the text is coded, its first and last tokens included; what follows stays
    exact, as the 128 tokens after a text do there. The quantizer is ours, so that nothing need be installed for it.
    """
    parts = values.unflatten(-1, (-1, group(values.shape[-1])))
    least = parts.amin(dim=-1, keepdim=True)
    most = 2**bits - 1
    scale = (parts.amax(dim=-1, keepdim=True) - least).clamp_min(1e-9) / most
    return ((parts - least).div(scale).round().clamp(0, most) * scale + least).flatten(-2)


def share(bits: int, dim: int) -> float:
    """Bytes of quantized values, with their groups' scales and least values, over those of `VALUE_BITS` a value."""
    return bits / VALUE_BITS + 2 / group(dim)
