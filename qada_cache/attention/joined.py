"""Exact attention of many queries over few long parts, all heads at once: on a GPU launches, and on a CPU merges of
parts, take longer than what they compute."""

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

DEVICES = ("cuda",)  # where launches do
# Keys and values of a layer, up to which a copy of all takes less than a call of attention and a merge more.
JOINED_BYTES = 1 << 26


def can_join(layer: Asker, store: TokenStore, query: Query, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_to_joined` computes this call of `attend_exactly`: rows alike, and no mask but the causal one."""
    if isinstance(layer, LatentLayer):
        return False
    if key.device.type not in DEVICES and not _is_by_cpu(layer, query.states, value, max(store.lengths)):
        return False
    plain = query.softcap is None and query.sink_logits is None and query.visible is None and query.valid is None
    dtypes = {query.states.dtype, key.dtype, value.dtype, *store.dtypes}
    return plain and len(dtypes) == 1 and len(set(zip(store.lengths, store.flushed, strict=True))) == 1


def _is_by_cpu(layer: Asker, states: Tensor, value: Tensor, past: int) -> bool:
    """Whether the CPU's kernel for prompts is to take queries `[batch, heads, queries, dim]` behind so many tokens."""
    queries, sizes = states.shape[2], (states.shape[3], value.shape[3], states.dtype)
    long = queries >= prompt.MIN_QUERIES and past + queries >= prompt.MIN_TOKENS
    there = states.is_cpu and long and layer.options.kernels != "torch" and prompt.serves_sizes(*sizes)
    return there and prompt.build(*sizes) is not None


def attend_to_joined(layer: Asker, store: TokenStore, query: Query, key: Tensor, value: Tensor) -> Tensor:
    """As `exact.attend_exactly`, for the calls that this serves. `out` of torch's operator is rounded to the query's
    dtype, and merged in float32."""
    bulk, states, found, kernels = store.bulk, query.states, None, layer.options.kernels
    own = [*store.view_joined(), *view_beside(bulk), (key, value)]  # what is still to be read, the new tokens last
    beside_bytes = len(states) * bulk.tensors[0].shape[1] * (bulk.lengths[0] - bulk.stored[0]) * bulk.token_bytes
    layer.counters.streamed_bytes += beside_bytes
    joins = len(states) * key.shape[1] * bulk.stored[0] * bulk.token_bytes <= JOINED_BYTES
    for part in read_together(bulk):
        layer.counters.streamed_bytes += part.bulk_read_bytes
        held, causal, room = (part.keys, part.values), False, part.room if states.device.type in DEVICES else 0
        if own and (room >= sum(each.shape[2] for each, _ in own) or joins):
            held, own, causal = _join([held, *own], room, kernels), [], True
        now = attend_to_all(states, *held, scaling=query.scaling, causal=causal)
        found = now if found is None else _merge(found, now)
    if own:
        last = attend_to_all(states, *_join(own, 0, kernels), scaling=query.scaling, causal=True)
        found = last if found is None else _merge(found, last)
    assert found is not None
    return found[0].to(states.dtype)


def _join(parts: list[tuple[Tensor, Tensor]], room: int, kernels: str) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, kv_heads, tokens, *]` one behind the other: behind the first ones, where there is `room`
    for so many more tokens."""
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
