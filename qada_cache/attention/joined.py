"""Exact attention of many queries over few long parts, all heads at once. With many short parts, launches on a GPU and
merges on a CPU would take longer than the attention."""

from torch import Tensor

from ..kernels import merge_partials
from ..kernels.copying import find_copier
from ..kernels.cpu import prompt
from ..kernels.lower_right import attend_to_all
from ..kernels.operands import Query
from ..state.asker import Asker
from ..storage import TokenStore
from ..storage.reading import read_together, view_beside
from .latent import LatentLayer

DEVICES = ("cuda",)  # types of devices on which launches take longer than short attention
# Bytes of a layer's keys and values. Up to this size, copying all costs less than another attention call and a merge.
JOINED_BYTES = 1 << 26


def can_join(layer: Asker, store: TokenStore, query: Query, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_to_joined` computes this call of `attend_exactly`: rows of equal length, and a causal mask."""
    if isinstance(layer, LatentLayer):
        return False
    if key.device.type not in DEVICES and not is_by_cpu(layer, query.states, value, max(store.lengths)):
        return False
    plain = query.softcap is None and query.sink_logits is None and query.visible is None and query.valid is None
    dtypes = {query.states.dtype, key.dtype, value.dtype, *store.dtypes}
    return plain and len(dtypes) == 1 and len(set(zip(store.lengths, store.flushed, strict=True))) == 1


def is_by_cpu(layer: Asker, states: Tensor, value: Tensor, past: int) -> bool:
    """Whether the CPU's prompt kernel computes queries `[batch, heads, queries, dim]` behind `past` tokens."""
    queries, sizes = states.shape[2], (states.shape[3], value.shape[3], states.dtype)
    long = queries >= prompt.MIN_QUERIES and past + queries >= prompt.MIN_TOKENS
    long &= states.stride(3) == 1
    served = states.is_cpu and long and layer.options.kernels != "torch" and prompt.serves_sizes(*sizes)
    return served and prompt.build(*sizes) is not None


def attend_to_joined(layer: Asker, store: TokenStore, query: Query, key: Tensor, value: Tensor) -> Tensor:
    """Attention's output `[batch, heads, queries, value_dim]`, as of `exact.attend_exactly`. `out` of each part is
    rounded to the query's dtype by torch's operator, and merged in float32."""
    bulk, states, merged, kernels = store.bulk, query.states, None, layer.options.kernels
    unread = [*store.view_joined(), *view_beside(bulk), (key, value)]  # outside `bulk.tensors`, the new tokens last
    beside_bytes = len(states) * bulk.tensors[0].shape[1] * (bulk.lengths[0] - bulk.stored[0]) * bulk.token_bytes
    layer.counters.streamed_bytes += beside_bytes
    joins = len(states) * key.shape[1] * bulk.stored[0] * bulk.token_bytes <= JOINED_BYTES
    for part in read_together(bulk):
        layer.counters.streamed_bytes += part.bulk_read_bytes
        tokens, causal, room = (part.keys, part.values), False, part.room if states.device.type in DEVICES else 0
        if unread and (room >= sum(each.shape[2] for each, _ in unread) or joins):
            tokens, unread, causal = _join([tokens, *unread], room, kernels), [], True
        partial = attend_to_all(states, *tokens, scaling=query.scaling, causal=causal)
        merged = partial if merged is None else _merge(merged, partial)
    if unread:
        partial = attend_to_all(states, *_join(unread, 0, kernels), scaling=query.scaling, causal=True)
        merged = partial if merged is None else _merge(merged, partial)
    assert merged is not None
    return merged[0].to(states.dtype)


def _join(parts: list[tuple[Tensor, Tensor]], room: int, kernels: str) -> tuple[Tensor, Tensor]:
    """Concatenated keys, and values, `[batch, kv_heads, tokens, *]`: in place behind the first part, if memory behind
    it has `room` (tokens) for the others, else in new tensors."""
    if len(parts) == 1:
        return parts[0]
    sizes = [keys.shape[2] for keys, _ in parts]
    tokens, first = sum(sizes), parts[0]
    fits = tokens - sizes[0] <= room
    if fits:
        joined = [part.as_strided((*part.shape[:2], tokens, part.shape[3]), part.stride()) for part in first]
        parts, sizes, start = parts[1:], sizes[1:], sizes[0]
    else:
        joined, start = [part.new_empty(*part.shape[:2], tokens, part.shape[3]) for part in first], 0
    pairs = []
    for part, size in zip(parts, sizes, strict=True):
        pairs += [(whole.narrow(2, start, size), each) for whole, each in zip(joined, part, strict=True)]
        start += size
    if (copier := find_copier(pairs, first[0].device, kernels)) is not None:
        copier(pairs, first[0].device)
    else:
        for target, source in pairs:
            target.copy_(source)
    return joined[0], joined[1]


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return merge_partials(one[0].float(), one[1], other[0].float(), other[1])
