"""Which tokens of a text methods that evict keep: scores of every token, from the papers' formulas.

Each acts once, when the text has been read, as in kvpress; keys stay turned to where they stood. A method's own
constants are those of its authors' code, and so is what it keeps whatever the scores say.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from eval.peers.queries import SINKS, WINDOW, Queries

POOLED = 5  # neighbours whose votes SnapKV averages


def attention(queries: Tensor, keys: Tensor) -> Tensor:
    """What the queries of a text's last tokens give each of its tokens, as in full attention.

    Args:
        queries: `[1, heads, queries, dim]`.
        keys: `[1, kv_heads, tokens, dim]`, the queries' own tokens included.

    Returns:
        float32 `[1, kv_heads, group, queries, tokens]`.
    """
    packed = queries.unflatten(1, (keys.shape[1], -1)).float()
    scores = packed @ keys.unsqueeze(2).float().mT * keys.shape[-1] ** -0.5
    later = torch.ones_like(scores, dtype=torch.bool).triu(diagonal=scores.shape[-1] - scores.shape[-2] + 1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1)


def snapkv(layer: int, queries: Queries, keys: Tensor, values: Tensor) -> Tensor:
    """SnapKV (arXiv 2404.14469): `pool(sum_q softmax(q K / sqrt(d)))` over the last queries `q`, which stay.

    Votes are averaged over 5 neighbours, and over the query heads of a KV head.
    """
    last = queries.last[layer][:, :, -min(WINDOW, keys.shape[2] - 1) :]
    window = last.shape[2]
    votes = attention(last, keys)[..., :-window].mean(dim=3).mean(dim=2)
    pooled = F.avg_pool1d(votes, POOLED, stride=1, padding=POOLED // 2)
    return F.pad(pooled, (0, window), value=torch.inf)


def tova(layer: int, queries: Queries, keys: Tensor, values: Tensor) -> Tensor:
    """TOVA (arXiv 2401.06104): `softmax(q K / sqrt(d))` of the last query `q`, which stays, averaged over all heads.

    The paper evicts a token at every step of decoding.
    """
    weights = attention(queries.last[layer][:, :, -1:], keys)[..., :-1].mean(dim=(1, 2, 3))
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


def kept(method: str, layer: int, queries: Queries, keys: Tensor, values: Tensor, count: int) -> Tensor:
    """The `count` tokens of each KV head of a layer that a method keeps, in their order; int64 `[1, kv_heads, count]`.

    Args:
        method: one of `METHODS`.
        layer: its index.
        queries: that have seen the text.
        keys, values: `[1, kv_heads, tokens, dim]`.
        count: in tokens.
    """
    return METHODS[method](layer, queries, keys, values).topk(count, dim=-1).indices.sort(dim=-1).values
