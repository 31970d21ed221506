"""Exact attention where launches take longer than what they compute: all heads at once, over few long parts."""

import torch
from torch import Tensor

from ..kernels import merge_partials
from ..kernels.lower_right import attend_to_all
from ..kernels.operands import Query
from ..state.layer import QAdALayer
from ..storage import TokenStore
from ..storage.reading import read_together, view_beside
from .latent import LatentLayer

DEVICES = ("cuda",)  # where launches do
# Keys and values of a layer, up to which a copy of all takes less than a call of attention and a merge more.
JOINED_BYTES = 1 << 26


def can_join(layer: QAdALayer, store: TokenStore, query: Query, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_to_joined` computes this call of `attend_exactly`: rows alike, and no mask but the causal one."""
    if key.device.type not in DEVICES or isinstance(layer, LatentLayer):
        return False
    plain = query.softcap is None and query.sink_logits is None and query.visible is None and query.valid is None
    dtypes = {query.states.dtype, key.dtype, value.dtype, *store.dtypes}
    return plain and len(dtypes) == 1 and len(set(zip(store.lengths, store.flushed, strict=True))) == 1


def attend_to_joined(layer: QAdALayer, store: TokenStore, query: Query, key: Tensor, value: Tensor) -> Tensor:
    """As `exact.attend_exactly`, for the calls that this serves. `out` of torch's operator is rounded to the query's
    dtype, and merged in float32."""
    bulk, states, far = store.bulk, query.states, None
    rows = slice(0, len(states))
    parts = [*store.view_near(rows), *view_beside(bulk), (key, value)]
    beside_bytes = len(states) * bulk.tensors[0].shape[1] * (bulk.lengths[0] - bulk.stored[0]) * bulk.token_bytes
    layer.counters.streamed_bytes += beside_bytes
    joins = len(states) * key.shape[1] * bulk.stored[0] * bulk.token_bytes <= JOINED_BYTES
    for part in read_together(bulk):
        layer.counters.streamed_bytes += part.bulk_read_bytes
        held = part.keys, part.values
        if joins:  # now, as these are lent until the next part
            parts = [_join([held, *parts])]
            continue
        found = attend_to_all(states, *held, scaling=query.scaling, causal=False)
        far = found if far is None else _merge(far, found)
    last = attend_to_all(states, *_join(parts), scaling=query.scaling, causal=True)
    return (last if far is None else _merge(far, last))[0].to(states.dtype)


def _join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, kv_heads, tokens, *]` one behind the other."""
    if len(parts) == 1:
        return parts[0]
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return merge_partials(one[0].float(), one[1], other[0].float(), other[1])
