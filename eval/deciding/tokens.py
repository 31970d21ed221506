"""Ways of reading only some of a long-context head's tokens, to try: QAdACache itself reads a head whole.

A token is chosen for a KV head by an estimate of its score, for all query heads of the group together; what is chosen
is read exactly. The estimate is made from a copy of the keys in few bits, or from bounds of pages; "true" knows.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from qada_cache.attention import decode
from qada_cache.kernels import softmax_average
from qada_cache.state.layer import QAdALayer
from qada_cache.storage.store import TokenStore

VALUE_BITS = 16  # of a key or value as a cache usually holds it, which shares of bytes are of
STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352}  # of the uniform quantizer that is best for a Gaussian of deviation 1


def rotation(dim: int) -> Tensor:
    """A signed Hadamard matrix `[dim, dim]`, of blocks where `dim` is not a power of two: no channel stands out."""
    block = dim & -dim
    hadamard = torch.ones(1, 1)
    while len(hadamard) < block:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return torch.kron(torch.eye(dim // block), hadamard / math.sqrt(block)) * signs


def quantized(keys: Tensor, bits: int) -> Tensor:
    """Keys `[..., tokens, dim]` as a copy of `bits` a value gives them: centred, rotated, in odd steps."""
    mean, turn = keys.mean(dim=-2, keepdim=True), rotation(keys.shape[-1]).to(keys)
    values = (keys - mean) @ turn.mT
    if bits == 1:
        odd = torch.where(values >= 0, 1.0, -1.0)
    else:
        step = STEPS[bits] * values.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-9)
        odd = 2 * torch.floor(values / step).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 1
    scale = (values * odd).sum(dim=-1, keepdim=True) / odd.square().sum(dim=-1, keepdim=True)
    return (scale * odd) @ turn + mean


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
    if kind == "true":
        return packed @ keys.mT
    if kind.startswith("pages"):
        return by_pages(packed, keys, int(kind.split()[-1]))
    return packed @ quantized(keys, int(kind.split()[0])).mT


def sketch_share(kind: str, dim: int) -> float:
    """Bytes of what estimates are made from, over those of the keys and values."""
    if kind == "true":
        return 0.0
    if kind.startswith("pages"):
        return 1 / int(kind.split()[-1])  # a least and a greatest key a page
    return (int(kind.split()[0]) * dim + VALUE_BITS) / (2 * dim * VALUE_BITS)  # and a scale a token


def choose(scores: Tensor, group: int, share: float) -> Tensor:
    """Bool, the shape of `scores` `[batch, kv_heads, group * queries, tokens]`: this share of the tokens of each group.

    Those that get most of its heads' attention, all together.
    """
    together = scores.unflatten(2, (group, -1)).softmax(dim=-1).sum(dim=2)
    best = together.topk(math.ceil(share * scores.shape[-1]), dim=-1).indices
    chosen = torch.zeros_like(together, dtype=torch.bool).scatter_(-1, best, True)
    return chosen.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)


def split(tokens: str) -> tuple[str, float]:
    """Of "2 bits, 0.05": how scores are estimated, and the share of the bulk's tokens that is read; whole if empty."""
    kind, _, share = tokens.partition(", ")
    return kind, float(share or 1)


@contextmanager
def reading(tokens: str) -> Iterator[None]:
    """Caches that are used inside read so much of a long-context head: see `split`. One row, on the model's device."""
    kind, share = split(tokens)
    original: Callable = decode._bulk_partial

    def some(
        layer: QAdALayer, store: TokenStore, packed: Tensor, wanted: Tensor | None, *, scaling: float, **rest: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = original(layer, store, packed, wanted, scaling=scaling, **rest)  # which counts
        length, group = store.bulk.lengths[0], layer.shared.model.config.num_attention_heads // packed.shape[1]
        keys, values = store.bulk.keys[:, :, :length].float(), store.bulk.values[:, :, :length]
        chosen = choose(estimated(kind, packed.float(), keys) * scaling, group, share)
        scores = (packed.float() @ keys.mT * scaling).masked_fill(~chosen, -torch.inf)
        some_out, some_lse = softmax_average(scores, values)
        read = lse > -torch.inf
        return torch.where(read.unsqueeze(-1), some_out, out), torch.where(read, some_lse, lse)

    if not tokens:
        yield
        return
    with mock.patch.object(decode, "_bulk_partial", some):
        yield
