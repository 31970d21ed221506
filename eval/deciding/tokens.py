"""Ways of reading only some of a long-context head's tokens, to compare with `QAdACache(token_threshold=...)`.

A fixed share of the tokens is chosen for a KV head by an estimate of their scores, for all query heads of the group
together; what is chosen is read exactly, and the rest is left out. The estimate is made from bounds of pages; "true"
knows.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from qada_cache.attention import decode
from qada_cache.kernels import query_adaptive, softmax_average
from qada_cache.kernels.query_adaptive import Step
from qada_cache.state.layer import QAdALayer
from qada_cache.storage.store import TokenStore

OWN = "sketch"  # ways of reading that start so are the product's


def by_pages(packed: Tensor, keys: Tensor, size: int) -> Tensor:
    """The most that a token of each page can score, as Quest has it; arguments as for `estimated`."""
    tokens, pages = keys.shape[2], -(-keys.shape[2] // size)
    low, high = (
        torch.nn.functional.pad(keys, (0, 0, 0, pages * size - tokens), value=value).unflatten(2, (pages, size))
        for value in (math.inf, -math.inf)
    )
    bound = packed.clamp_min(0) @ high.amax(dim=3).mT + packed.clamp_max(0) @ low.amin(dim=3).mT
    return bound.repeat_interleave(size, dim=-1)[..., :tokens]


def estimated(kind: str, packed: Tensor, keys: Tensor) -> Tensor:
    """Scores `[batch, kv_heads, queries, tokens]` of `packed` `[batch, kv_heads, queries, dim]`, before scaling."""
    return packed @ keys.mT if kind == "true" else by_pages(packed, keys, int(kind.split()[-1]))


def sketch_share(kind: str) -> float:
    """Bytes of what estimates are made from, over those of the keys and values."""
    return 0.0 if kind == "true" else 1 / int(kind.split()[-1])  # a least and a greatest key a page


def choose(scores: Tensor, group: int, share: float) -> Tensor:
    """Bool, the shape of `scores` `[batch, kv_heads, group * queries, tokens]`: this share of the tokens of each group.

    Those that get most of its heads' attention, all together.
    """
    together = scores.unflatten(2, (group, -1)).softmax(dim=-1).sum(dim=2)
    best = together.topk(math.ceil(share * scores.shape[-1]), dim=-1).indices
    chosen = torch.zeros_like(together, dtype=torch.bool).scatter_(-1, best, True)
    return chosen.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)


def split(tokens: str) -> tuple[str, float]:
    """Of "pages of 16, 0.05": how scores are estimated, and the share of the bulk that is read; whole if empty.

    Of one of the product's ways, as "sketch of 1.5 bits, 1.0", it is the token threshold.
    """
    kind, _, share = tokens.partition(", ")
    return kind, float(share or 1)


def token_options(tokens: str) -> dict[str, Any]:
    """Of `QAdACache`, for one of the product's ways of reading."""
    kind, theta = split(tokens)
    return {"token_threshold": theta, "sketch_bits": float(kind.split()[2])} if kind.startswith(OWN) else {}


@contextmanager
def reading(tokens: str) -> Iterator[None]:
    """Caches that are used inside read so much of a long-context head: see `split`. One row, on the model's device."""
    compute, whole = decode.by_torch, query_adaptive.over_whole_bulk
    stores: list[TokenStore] = []

    def remembering(layer: QAdALayer, store: TokenStore, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        stores[:] = [store]
        return compute(layer, store, *rest, **options)

    def some(step: Step, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        whole(step, *rest, **options)  # which counts
        (kind, share), bulk = split(tokens), stores[0].bulk
        length, packed, scaling = bulk.lengths[0], step.packed.float(), step.rule.scaling
        keys, values = bulk.keys[:, :, :length].float(), bulk.values[:, :, :length]
        chosen = choose(estimated(kind, packed, keys) * scaling, step.scores.shape[2], share)
        return softmax_average((packed @ keys.mT * scaling).masked_fill(~chosen, -torch.inf), values)

    if not tokens or tokens.startswith(OWN):
        yield
        return
    with (
        mock.patch.object(decode, "by_torch", remembering),
        mock.patch.object(query_adaptive, "over_whole_bulk", some),
    ):
        yield
