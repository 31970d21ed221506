"""Exact attention of many new tokens: of a prompt over itself, where keys may be selected instead, and of a chunk or a
long turn over everything cached."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import merge_partials, partial_attention
from ..kernels.cpu import prompt, selected_prompt
from ..kernels.lower_right import attend_to_all
from ..kernels.operands import Query
from ..kernels.prompt_choice import find_selected_attention
from ..state.asker import Asker
from ..state.layer import QAdALayer
from ..storage import TokenStore
from ..storage.padding import find_real_tokens
from ..storage.reading import stream
from . import joined
from .latent import LatentLayer
from .latent_attention import LatentAttention


def attend_to_prompt(layer: Asker, query: Query, key: Tensor, value: Tensor) -> Tensor | None:
    """Causal attention of a prompt over itself by our kernels, exact but for `prefill_threshold`: `[batch, tokens,
    heads, value_dim]` in the query's dtype, zeros for padding; None where the model's own attention is to serve. A row
    that ends in padding has its last token's output, too: `generate` goes on from there. Shapes as for
    `attend_exactly`."""
    states = query.states
    if layer.options.kernels == "torch" or query.softcap is not None or query.sink_logits is not None:
        return None
    (batch, heads, tokens), options = states.shape[:3], layer.options
    if query.visible is not None or tokens < key.shape[2]:
        return None
    select: Callable[..., Any] | None = None
    if options.prefill_threshold > 0:
        real_tokens = [tokens] if query.valid is None else query.valid.sum(dim=1).tolist()
        unread = max(0, layer.shared.forward_pass.prompt_tokens - tokens)
        select = find_selected_attention(states, key, value, options.kernels, [unread + n for n in real_tokens])
    whole = query.valid is None
    if select is None:
        if not prompt.serves(states, key, value, causal=True):
            return None
        if options.prefill_threshold > 0 and selected_prompt.serves(states, value):
            select, whole = _select_by_cpu(layer, key), False  # it takes single rows
    make = states.new_empty if query.valid is None else states.new_zeros  # padding keeps its zeros
    out = make(batch, tokens, heads, value.shape[3])
    for rows in [slice(0, batch)] if whole else [slice(row, row + 1) for row in range(batch)]:
        real = slice(None) if query.valid is None else find_real_tokens(query.valid, rows.start, states.device)
        found = out[rows, real]  # a view, if they are neighbours
        own, to = [part[rows][:, :, real] for part in (states, key, value)], found.transpose(1, 2)
        if not found.numel():  # this row is padding from end to end
            continue
        if select is not None:
            _select(select, layer, query.scaling, own, to, padding=tokens - own[0].shape[2])
        else:
            prompt.prompt_attention(*own, scaling=query.scaling, causal=True, out=to)
        if not isinstance(real, slice):
            out[rows, real] = found
        if query.valid is not None and not query.valid[rows.start, -1]:
            last, _ = attend_to_all(states[rows, :, -1:], *own[1:], scaling=query.scaling, causal=False)
            out[rows, -1:] = last.transpose(1, 2).to(out.dtype)
    return out


def attend_to_chunk(layer: Asker, store: TokenStore, query: Query, key: Tensor, value: Tensor) -> Tensor | None:
    """As `attend_exactly` of a chunk of `generate`'s prompt, but by selection, if a `prefill_threshold` asks for it and
    our kernel serves; else None. Keys and values of a row are joined for it."""
    states = query.states
    plain = query.softcap is None and query.sink_logits is None and query.visible is None and query.valid is None
    kernels, in_chunks = layer.options.kernels, layer.shared.forward_pass.prompt_tokens > 0
    if not plain or layer.options.prefill_threshold <= 0 or kernels == "torch" or not in_chunks:
        return None
    if not isinstance(layer, QAdALayer) or isinstance(layer, LatentLayer) or layer.padding.known.numel():
        return None
    if {*store.dtypes} != {states.dtype}:
        return None
    select: Callable[..., Any] | None = None
    if kernels == "auto" and states.is_cpu:
        if joined.is_by_cpu(layer, states, value, min(store.lengths)) and selected_prompt.serves(states, value):
            select = _select_by_cpu(layer, key)
    else:  # asked before anything is joined
        past = min(store.lengths)
        length = max(past + key.shape[2], layer.shared.forward_pass.prompt_tokens)
        select = find_selected_attention(states, key, value, kernels, [length], past=past)
    if select is None:
        return None
    out = states.new_empty(*states.shape[:3], value.shape[3])
    for row in range(len(states)):
        rows = slice(row, row + 1)
        held = store.copy_tokens(rows, 0, store.lengths[row])
        keys, values = (torch.cat([past, new[rows]], dim=2) for past, new in zip(held, (key, value), strict=True))
        own = states[rows], keys, values
        _select(select, layer, query.scaling, own, out[rows])
    return out


def _select_by_cpu(layer: Asker, key: Tensor) -> Callable[..., int]:
    """The CPU's `selected_attention` for keys `[batch, kv_heads, tokens, dim]`. It gets the layer's query energies, if
    these are of as many heads and channels: those of latents are not."""
    energies = layer.find_query_energies(key.shape[1], key.shape[3])
    if energies is not None and energies.shape != (key.shape[1], key.shape[3]):
        energies = None
    return partial(selected_prompt.selected_attention, energies=energies)


def _select(
    select: Callable[..., int | Tensor],
    layer: Asker,
    scaling: float,
    call: Sequence[Tensor],
    out: Tensor,
    *,
    padding: int = 0,
) -> None:
    """Call `select`, a `selected_attention`, for a prompt or a chunk under the layer's options, and count its pairs.
    `padding` is the number of the whole prompt's tokens that are padding in this row."""
    (query, key, value), options, counters = call, layer.options, layer.counters
    arguments: dict[str, Any] = {"sinks": options.sink_tokens, "window": options.window}
    arguments |= {"threshold": options.prefill_threshold, "end": layer.shared.forward_pass.prompt_tokens - padding}
    pairs = select(query, key, value, scaling=scaling, out=out, **arguments)
    if isinstance(pairs, Tensor):  # on a device, which is not waited for
        counters.find_on(pairs.device, "prompt_read_pairs").add_(pairs)
    else:
        counters.prompt_read_pairs += pairs
    counters.prompt_pairs += prompt.count_pairs(query, key)


def attend_exactly(layer: Asker, store: TokenStore, query: Query, key: Tensor, value: Tensor) -> Tensor:
    """Exact attention of new tokens over everything cached and, causally or by a mask, over themselves; by selection
    of chunks of a prompt, where `attend_to_chunk` serves.

    The bulk is streamed block by block, so device memory does not grow with it. The new tokens are not yet in `store`:
    `key` and `value` are `[batch, kv_heads, tokens, dim]` and `value_dim`, expanded ones of a `LatentLayer`. Queries
    are those of the last tokens, as a rule of all. The query's `valid` and `visible` cover all tokens. The result is
    `[batch, heads, queries, value_dim]` in the query's dtype, zeros for padding, but for a row's last position.
    """
    if (selected := attend_to_chunk(layer, store, query, key, value)) is not None:
        return selected
    if joined.can_join(layer, store, query, key, value):
        return joined.attend_to_joined(layer, store, query, key, value)
    states, valid, visible, sink_logits = query.states, query.valid, query.visible, query.sink_logits
    result = states.new_zeros(*states.shape[:-1], value.shape[-1])
    alike = valid is None and len(set(zip(store.lengths, store.flushed, strict=True))) == 1
    (batch, heads, queries), asked = states.shape[:3], valid
    if fewer := queries < key.shape[2]:
        asked = None if valid is None else valid[:, -queries:]
    latents = LatentAttention(layer, store, query, value.shape[-1]) if isinstance(layer, LatentLayer) else None
    kwargs: dict[str, Any] = {"scaling": query.scaling, "softcap": query.softcap, "kernels": layer.options.kernels}
    for rows in [slice(0, batch)] if alike else [slice(row, row + 1) for row in range(batch)]:
        real, shown = (
            slice(None) if known is None else find_real_tokens(known, rows.start, states.device)
            for known in (valid, asked)
        )
        new_query, new_key, new_value = states[rows][:, :, shown], *(part[rows][:, :, real] for part in (key, value))
        kv_heads, tokens = new_key.shape[1], new_query.shape[2]
        # `generate` goes on from a row's last position, also if it is padding, which then sees all real tokens.
        ends = valid is not None and not valid[rows.start, -1]
        ends &= store.lengths[rows.start] + new_key.shape[2] > 0
        group = heads // kv_heads
        if not tokens + ends:  # this row is padding from end to end of the queries
            continue
        own = [part.repeat_interleave(group, dim=1) for part in (new_key, new_value)]
        mask = last_mask = None
        if visible is not None:
            shows = visible.expand(batch, -1, -1)[rows, None, -queries:][..., real]
            mask, last_mask = shows[:, :, shown], shows[:, :, -1:]
        elif fewer:
            behind = new_key.shape[2] - tokens
            mask = states.new_ones(1, 1, tokens, new_key.shape[2], dtype=torch.bool).tril(behind)
        out, lse = partial_attention(new_query, *own, mask=mask, causal=mask is None, **kwargs)
        if ends:
            new_query = torch.cat([new_query, last := states[rows, :, -1:]], dim=2)
            parts = zip((out, lse), partial_attention(last, *own, mask=last_mask, **kwargs), strict=True)
            out, lse = (torch.cat(pair, dim=2) for pair in parts)
        del own
        if sink_logits is not None:
            out, lse = merge_partials(out, lse, torch.zeros_like(out), sink_logits.float()[:, None].expand_as(lse))
        if latents is not None:
            out, lse = merge_partials(out, lse, *latents.attend(rows, new_query))
        else:
            grouped_queries = new_query.reshape(-1, kv_heads, group * (tokens + ends), new_query.shape[-1])
            out, lse = out.reshape(*grouped_queries.shape[:3], -1), lse.reshape(grouped_queries.shape[:3])
            for keys, values in store.view_near(rows):
                out, lse = merge_partials(out, lse, *partial_attention(grouped_queries, keys, values, **kwargs))
            for part in stream(store.bulk, rows):
                at = slice(part.rows.start - rows.start, part.rows.stop - rows.start), part.heads
                far = partial_attention(grouped_queries[at], part.keys, part.values, **kwargs)
                out[at], lse[at] = merge_partials(out[at], lse[at], *far)
                layer.counters.streamed_bytes += part.bulk_read_bytes
        out = out.reshape(*new_query.shape[:3], -1).to(states.dtype)
        result[rows, :, shown] = out[:, :, :tokens]
        if ends:
            result[rows, :, -1:] = out[:, :, tokens:]
    return result
