"""Other methods, each of which makes transformers' own cache smaller after a text was read exactly.

Nothing of QAdACache takes part. Methods that evict score every token by their papers' formulas. Each acts once, when
the text has been read, as in kvpress; keys stay turned to where they stood. A method's own constants are those of its
authors' code, and so is what it keeps whatever the scores say. What follows the text attends exactly to what is left of
it, and stands where it would if all had been kept.
"""

import copy
import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from eval.shared.deciding import SPARE, split
from eval.shared.texts import Document
from eval.shared.ways import Way
from qada_cache.key_moments.observing import observe_queries
from qada_cache.tuning.measuring import VALUE_BITS
from qada_cache.versions import pass_cache

WINDOW = 64  # queries at the end that vote in SnapKV, as in its authors' code
SINKS = 4  # first tokens that Expected Attention leaves out of its statistics, and keeps
AHEAD = 512  # positions after a text that Expected Attention averages over
SERVED = ("llama", "qwen2")  # every layer turns queries, all in the same way, and divides scores by sqrt(dim)
POOLED = 5  # neighbours whose votes SnapKV averages
EVICTED, QUANTIZED = "evicted", "quantized"
PEERS = (EVICTED, QUANTIZED)  # criteria of ways that are tried here
GROUP = 64  # values with a scale in common


class Queries:
    """An observer of `observe_queries` for one call that reads a whole text.

    Attributes:
        last: of each layer, the last `WINDOW` queries `[1, heads, queries, dim]`, turned as attention has them.
        mean, covariance: float32 `[1, heads, dim]` and `[1, heads, dim, dim]`, of each layer's queries after the first
            `SINKS`, each turned by the mean of the rotations of the next `AHEAD` positions instead of by its own.

    Raises:
        NotImplementedError: a model of another kind than `SERVED`.
    """

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        if (kind := model.config.model_type) not in SERVED:
            raise NotImplementedError(f"other methods are tried on models of type {', '.join(SERVED)}, not {kind}")
        rotary = model.get_decoder().rotary_emb
        like = torch.zeros(1, device=model.device)  # float32, the dtype that is answered in
        places = torch.arange(tokens + AHEAD, device=model.device).unsqueeze(0)
        self.cos, self.sin = (found.float() for found in rotary(like, places))
        self.tokens = tokens
        self.turn = sys.modules[type(model).__module__].apply_rotary_pos_emb
        self.last: dict[int, Tensor] = {}
        self.mean: dict[int, Tensor] = {}
        self.covariance: dict[int, Tensor] = {}

    def __call__(self, layer: int, query: Tensor) -> None:
        """Take in a layer's queries `[1, heads, tokens, dim]`."""
        self.last[layer] = query[:, :, -WINDOW:]
        expected = self._turn_to_later(query)[:, :, SINKS:]
        self.mean[layer] = expected.mean(dim=2)
        centred = expected - expected.mean(dim=2, keepdim=True)
        self.covariance[layer] = centred.mT @ centred / centred.shape[2]

    def _turn_to_later(self, query: Tensor) -> Tensor:
        """Queries `[1, heads, tokens, dim]`, turned back and then by the mean of later rotations; float32."""
        cos, sin = self.cos[:, : self.tokens], self.sin[:, : self.tokens]
        square = cos.square() + sin.square()  # some kinds of rotary positions scale as well
        back = self._turn(query.float(), cos / square, -sin / square)
        later = (part[:, self.tokens :].mean(dim=1, keepdim=True) for part in (self.cos, self.sin))
        return self._turn(back, *later)

    def _turn(self, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.turn(query, query, cos, sin)[0]


def measure_attention(queries: Tensor, keys: Tensor) -> Tensor:
    """What the queries of a text's last tokens give each of its tokens, as in full attention.

    Args:
        queries: `[1, heads, queries, dim]`.
        keys: `[1, kv_heads, tokens, dim]`, the queries' own tokens included.

    Returns:
        float32 `[1, kv_heads, group, queries, tokens]`.
    """
    grouped_queries = queries.unflatten(1, (keys.shape[1], -1)).float()
    scores = grouped_queries @ keys.unsqueeze(2).float().mT * keys.shape[-1] ** -0.5
    later = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=scores.shape[-1] - scores.shape[-2] + 1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1)


def snapkv(layer: int, queries: Queries, keys: Tensor, values: Tensor) -> Tensor:
    """SnapKV (arXiv 2404.14469): `pool(sum_q softmax(q K / sqrt(d)))` over the last queries `q`, which stay.

    Votes are averaged over 5 neighbours, and over the query heads of a KV head.
    """
    last = queries.last[layer][:, :, -min(WINDOW, keys.shape[2] - 1) :]
    window = last.shape[2]
    votes = measure_attention(last, keys)[..., :-window].mean(dim=3).mean(dim=2)
    pooled = F.avg_pool1d(votes, POOLED, stride=1, padding=POOLED // 2)
    return F.pad(pooled, (0, window), value=torch.inf)


def tova(layer: int, queries: Queries, keys: Tensor, values: Tensor) -> Tensor:
    """TOVA (arXiv 2401.06104): `softmax(q K / sqrt(d))` of the last query `q`, which stays, averaged over all heads.

    The paper evicts a token at every step of decoding.
    """
    weights = measure_attention(queries.last[layer][:, :, -1:], keys)[..., :-1].mean(dim=(1, 2, 3))
    return F.pad(weights, (0, 1), value=torch.inf).unsqueeze(1).expand(-1, keys.shape[1], -1)


def expected_attention(layer: int, queries: Queries, keys: Tensor, values: Tensor) -> Tensor:
    """Expected Attention (arXiv 2510.00636): `a |v|`, where `a` is `exp(m k / sqrt(d) + k C k / 2d)`, made to sum to 1.

    `m` and `C` are mean and covariance of the queries that are to come. `a` is averaged over the query heads of a KV
    head. The first 4 tokens stay. Without the paper's `epsilon`, and with the norm of `v` for that of `W v`: kvpress'
    defaults.
    """
    dim, kv_heads = keys.shape[-1], keys.shape[1]
    mean, covariance = (found[layer].unflatten(1, (kv_heads, -1)) for found in (queries.mean, queries.covariance))
    scored = keys[:, :, SINKS:].float().unsqueeze(2)  # [1, kv_heads, 1, tokens, dim]
    log = (scored @ mean.unsqueeze(-1)).squeeze(-1) * dim**-0.5
    log = log + ((scored @ covariance) * scored).sum(dim=-1) / (2 * dim)
    scores = log.softmax(dim=-1).mean(dim=2) * values[:, :, SINKS:].float().norm(dim=-1)
    return F.pad(scores, (SINKS, 0), value=torch.inf)


def keydiff(layer: int, queries: Queries, keys: Tensor, values: Tensor) -> Tensor:
    """KeyDiff (arXiv 2504.15364): `-cos(k, mean_i(k_i / |k_i|))`; nothing stays for another reason.

    The paper evicts from block to block while it reads.
    """
    keys = keys.float()
    anchor = F.normalize(keys, dim=-1).mean(dim=2, keepdim=True)
    return -F.cosine_similarity(keys, anchor, dim=-1)


METHODS = {"SnapKV": snapkv, "ExpectedAttention": expected_attention, "TOVA": tova, "KeyDiff": keydiff}


def choose_kept(method: str, layer: int, queries: Queries, keys: Tensor, values: Tensor, count: int) -> Tensor:
    """The `count` tokens of each KV head of a layer that a method keeps, in their order; int64 `[1, kv_heads, count]`.

    Args:
        method: one of `METHODS`.
        layer: its index.
        queries: that have seen the text.
        keys, values: `[1, kv_heads, tokens, dim]`.
        count: in tokens.
    """
    return METHODS[method](layer, queries, keys, values).topk(count, dim=-1).indices.sort(dim=-1).values


class Prefilled:
    """A text's state under full attention.

    Args:
        model: of a kind in `SERVED`.
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
        with observe_queries(model, self.queries):
            model(ids.to(model.device), **pass_cache(self.cache), logits_to_keep=1)

    def count(self, part: float) -> int:
        """How many tokens a KV head keeps: as many as sinks and window have, and this share of the bulk's."""
        return self.near + math.ceil(part * (self.tokens - self.near))

    def count_bytes_read(self, way: Way) -> float:
        """Of the bulk's bytes, those that every step reads."""
        if way.criterion == QUANTIZED:
            return find_share(int(way.read.split()[0]), self.cache.layers[0].keys.shape[-1])
        return (self.count(split(way.read)[1]) - self.near) / max(self.tokens - self.near, 1)

    def make_cache(self, way: Way) -> DynamicCache:
        """A cache of its own for a way: "SnapKV, 0.05" keeps that share of the bulk, "4 bits" all in so many bits."""
        if way.criterion == QUANTIZED:
            bits = int(way.read.split()[0])
            return self._change(lambda _, *both: tuple(quantize(part, bits) for part in both))
        method, part = split(way.read)

        def evict(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
            places = choose_kept(method, layer, self.queries, keys, values, self.count(part)).unsqueeze(-1)
            return tuple(both.gather(2, places.expand(-1, -1, -1, both.shape[-1])) for both in (keys, values))

        return self._change(evict)

    def _change(self, change: Callable[..., tuple[Tensor, ...]]) -> DynamicCache:
        """A copy of the cache, of which `change` is given each layer's index, keys and values."""
        made = copy.copy(self.cache)
        made.layers = [copy.copy(layer) for layer in self.cache.layers]  # which write nothing in place
        for index, layer in enumerate(made.layers):
            layer.keys, layer.values = change(index, layer.keys, layer.values)
        return made

    def follow(self, document: Document, way: Way) -> Tensor:
        """Log-probabilities `[tokens, vocabulary]` of the document's answer, by what a way keeps of its text."""
        return self.feed(self.make_cache(way), document.following)[document.question - 1 :]

    def generate(self, document: Document, way: Way) -> Tensor:
        """An answer int64 `[1, tokens]`, greedily, somewhat longer than the right one."""
        # `generate` of transformers takes the length of a cache for the number of tokens that were read.
        cache, ids, past, said = self.make_cache(way), document.prompt[:, -document.question :], 0, []
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
        logits = self.model(ids.to(self.model.device), **pass_cache(cache), position_ids=places).logits[0]
        return logits.float().log_softmax(dim=-1)


def choose_group(dim: int) -> int:
    """How many of a head's `dim` channels have a scale in common; all of them if they are no groups of 64."""
    return GROUP if dim % GROUP == 0 else dim


def quantize(values: Tensor, bits: int) -> Tensor:
    """Keys or values `[..., dim]` as that many bits a value give them, in their own dtype.

    As transformers' `QuantizedCache` has them by default: asymmetric, quanto's `axis=0`, a scale and a least value for
    each group of a token's channels. All of the text is coded, its first and last tokens included; what follows stays
    exact, as the 128 tokens after a text do there. The quantizer is ours, so that nothing need be installed for it.
    """
    parts = values.unflatten(-1, (-1, choose_group(values.shape[-1])))
    least = parts.amin(dim=-1, keepdim=True)
    most = 2**bits - 1
    scale = (parts.amax(dim=-1, keepdim=True) - least).clamp_min(1e-9) / most
    return ((parts - least).div(scale).round().clamp(0, most) * scale + least).flatten(-2)


def find_share(bits: int, dim: int) -> float:
    """Bytes of quantized values, with their groups' scales and least values, over those of `VALUE_BITS` a value."""
    return bits / VALUE_BITS + 2 / choose_group(dim)
