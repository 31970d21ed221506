"""Attention of one call over the latents that a layer caches, for queries of the heads that its module expands.

Cached tokens are not expanded for a few queries: with `q' = [q_nope W_k | q_rotary]` a score is `q' [latent | rotary]`,
one key for all heads, and the output `W_v` times the softmax average of the latents, which are channels of the keys.
So a layer has one KV head, and where heads decide, they decide and select as those of any other layer do.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import merge_partials, partial_attention
from ..kernels.operands import Query
from ..models.latent import Projections, absorb, add_bias, ask_projections, expand, is_plain, read_projections
from ..storage import TokenStore
from ..storage.reading import stream
from .absorbed import attend_to_parts
from .decode import attend_adaptively
from .latent import LatentLayer

EXPANDED = 1 << 24  # numbers of keys and values of a block, 64 MiB in float32
MIN_BLOCK = 256  # tokens


class LatentAttention:
    """Attention of one call over the cached tokens of a layer."""

    def __init__(self, layer: LatentLayer, store: TokenStore, query: Query, value_dim: int) -> None:
        """`value_dim` is that of the output, more than the module's values have if attention is given padded ones."""
        assert layer.bound_module is not None
        self.layer, self.store, self.query = layer, store, query
        self.module, self.value_dim = layer.bound_module(), value_dim
        self.nope = query.states.shape[3] - layer.sizes.rope
        self.arguments: dict[str, Any] = {
            "scaling": query.scaling,
            "softcap": query.softcap,
            "kernels": layer.options.kernels,
        }

    def attend(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        """Exact attention: `out` `[rows, heads, queries, value_dim]` float32 and `lse` of queries `[rows, heads,
        queries, nope + rope]` of rows alike, as `partial_attention` returns them."""
        past = self.store.lengths[rows.start]
        absorbed = self.query.softcap is None and self._is_cheaper_absorbed(past, states.shape[2])
        return self._attend_absorbed(rows, states) if absorbed else self._attend_expanded(rows, states)

    def attend_adaptively(self) -> Tensor:
        """`decode.attend_adaptively` of the query, `[batch, heads, queries, value_dim]` in its dtype. The keys' bias is
        left out: it adds the same number to all scores of a query, which softmax cancels."""
        states = self.query.states
        absorbed = self._absorb(states).view(*states.shape[:3], -1)
        out = attend_adaptively(self.layer, self.store, replace(self.query, states=absorbed))
        return self._project(out).to(states.dtype)

    @cached_property
    def by_weight(self) -> bool:
        """Whether the projections can be read from the module's weight."""
        return self.layer.reads_weight and is_plain(self.module)

    @cached_property
    def projections(self) -> Projections:
        """The module's projections, read from its weight, or found by its outputs (`ask_projections`)."""
        sizes, heads = self.layer.sizes, self.query.states.shape[1]
        if self.by_weight:
            return read_projections(self.module, sizes, heads, self.nope)
        return ask_projections(self.module, sizes, self.nope, self.store.near_keys)

    def _is_cheaper_absorbed(self, past: int, queries: int) -> bool:
        """Compare both ways by a head's multiplications, for `queries` queries that read `past` tokens."""
        rank, rope = self.layer.sizes
        expansion = rank * (self.nope + self.value_dim)  # multiplications to expand one token, or absorb one query
        asked = 0 if self.by_weight or "projections" in vars(self) else rank * expansion
        absorbed = queries * (past * (2 * rank + rope) + expansion) + asked
        return absorbed <= past * (expansion + queries * (self.nope + rope + self.value_dim))

    def _attend_absorbed(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        grouped, rank = self._absorb(states), self.layer.sizes.rank
        out = grouped.new_zeros(*grouped.shape[:3], rank, dtype=torch.float32)
        lse = out.new_full(out.shape[:-1], -torch.inf)
        scaling, kernels = self.query.scaling, self.layer.options.kernels
        parts = attend_to_parts(self.store, rows, grouped, rank, scaling=scaling, kernels=kernels)
        for at, *far, nbytes in parts:
            out[at], lse[at] = merge_partials(out[at], lse[at], *far)
            self.layer.counters.streamed_bytes += nbytes
        return self._merge_heads(out, lse, states)

    def _absorb(self, states: Tensor) -> Tensor:
        """Absorbed queries `[rows, 1, heads * queries, rank + rope]`, in the dtype of the latents."""
        absorbed = absorb(states, self.projections, self.layer.sizes)
        return absorbed.reshape(len(states), 1, -1, absorbed.shape[3]).to(self.store.near_keys.dtype)

    def _merge_heads(self, out: Tensor, lse: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of `attend` for queries `states`, from averages of latents `out` `[rows, 1, heads * queries, rank
        + rope]` and their `lse`, as absorbed queries weigh them."""
        by, shape = self.projections, states.shape[:3]
        found, lse = self._project(out.view(*shape, -1)), lse.view(shape)
        if by.key_bias is not None:
            own = states[..., : self.nope].to(by.keys.dtype)
            lse = lse + self.query.scaling * (own.float() @ by.key_bias.float().unsqueeze(-1)).squeeze(-1)
        return found, lse

    def _project(self, averages: Tensor) -> Tensor:
        """Outputs `[rows, heads, queries, value_dim]` float32, from averages of latents `[rows, heads, queries, *]`,
        which may have rotary channels behind them."""
        by = self.projections
        own = averages[..., : self.layer.sizes.rank].to(by.values.dtype)
        found = (by.values @ own.mT).mT  # in the other order torch would copy weights of 16 bits first
        return self._pad(add_bias(found, by.value_bias).float())

    def _attend_expanded(self, rows: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        out = states.new_zeros(*states.shape[:3], self.value_dim, dtype=torch.float32)
        lse = out.new_full(out.shape[:-1], -torch.inf)
        block = max(MIN_BLOCK, EXPANDED // (states.shape[1] * (states.shape[3] + self.value_dim)))

        def take(at: slice, latents: Tensor) -> None:
            for latent in latents.split(block, dim=2):
                keys, values = expand(self.module, *latent.split(self.layer.sizes, dim=-1))
                keys, values = keys.to(states), self._pad(values.to(states))
                far = partial_attention(states[at], keys, values, **self.arguments)
                out[at], lse[at] = merge_partials(out[at], lse[at], *far)

        for keys, _ in self.store.view_near(rows):
            if keys.shape[2]:
                take(slice(None), keys)
        for part in stream(self.store.bulk, rows):
            take(slice(part.rows.start - rows.start, part.rows.stop - rows.start), part.keys)
            self.layer.counters.streamed_bytes += part.bulk_read_bytes
        return out, lse

    def _pad(self, values: Tensor) -> Tensor:
        """`values` with zeros behind them, up to the channels of the output."""
        return nn.functional.pad(values, (0, self.value_dim - values.shape[-1]))
