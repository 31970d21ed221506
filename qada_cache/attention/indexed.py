"""Trained selection: latents of which the model's own indexer picks those that a query reads (DeepSeek-V3.2, GLM-5).

An attention module of such a model expands what `update` returned. Its mask is as wide as the keys that it then has,
and shows what its indexer picked. So the module gets keys without contents, one for each token (`expand`). Attention
reads only the latents that the mask shows, from wherever they are stored.

Indexers count all tokens, padding included, and so does the store: its rows are alike.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicIndexedLayer

from ..kernels import merge_partials, partial_attention
from ..kernels.masked import masked_attention
from ..kernels.operands import Query
from ..kernels.reference import suspend_autocast
from ..models.latent import LatentSizes, expand, pools_keys
from ..process_memory import trim_growth
from ..selected_rows import SelectedRows
from ..state.forward_pass import Seen
from ..state.layer import QAdALayer
from ..state.stock import require_fit
from ..storage.padding import read_mask, refuse_bias
from ..storage.reading import gather_parts
from . import generation
from .latent import PROBED, LatentLayer
from .latent_attention import EXPANDED, MIN_BLOCK, LatentAttention

PICKED = 4096  # tokens of a block that is gathered


class IndexedLayer(LatentLayer, DynamicIndexedLayer):
    """One layer of latents with an indexer, whose own keys `[batch, tokens, dim]` transformers' class keeps on the
    model's device. Layers that use an earlier layer's indexer have no such keys."""

    stores_padding = True

    def reset(self) -> None:
        """Drop all tokens and counters."""
        super().reset()
        self.indexer_keys, self.is_indexer_initialized = None, False
        self.widths: tuple[int, int, int] | None = None  # heads, and channels of their keys and values

    def _get_keys(self) -> Tensor:
        """In a pass, keys without contents, as some indexers read the number of tokens from them. Outside of a pass as
        `QAdALayer`."""
        if self.incoming is None:
            return QAdALayer.keys.fget(self)
        return _stand_in(self.incoming, len(self.incoming), 1, self.seen, self.sizes.dim)

    keys = property(_get_keys, QAdALayer.keys.fset)

    @property
    def sizes(self) -> LatentSizes:
        """As `LatentLayer`; some layers of a model have no rotary channels."""
        sizes = super().sizes  # of the config
        return sizes if self.store is None else LatentSizes(sizes.rank, self.store.near_keys.shape[3] - sizes.rank)

    def _expect(self, rotary: Tensor) -> LatentSizes:
        has_some = self.store is not None or rotary.shape[-1]
        return self.sizes if has_some else LatentSizes(self.sizes.rank, 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `LatentLayer`. The latents are tagged for the module's `expand_kv`."""
        self._take_in(key_states, value_states)
        tagged = key_states.view_as(key_states)
        tagged._qada_layer = self  # type: ignore[attr-defined]  # `models/latent.py` looks for it
        return tagged, value_states

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take in new keys of the indexer, and return all. RuntimeError, if these are not of the tokens held."""
        if self.indexer_keys is not None:  # those of a file may lie on another device
            self.indexer_keys = self.indexer_keys.to(indexer_key_states.device)
        keys = super().update_indexer(indexer_key_states)
        if keys.shape[1] != self.seen:
            raise RuntimeError(
                f"layer {self.index}: the indexer has keys of {keys.shape[1]} tokens, and {self.seen} are cached: call "
                "reset() and read the prompt again"
            )
        if pools_keys(self.shared.model.config):  # such models ask for no mask, and their keys say which are real
            self.shared.forward_pass.shown = self.seen if keys[..., -1].all() else 0
        return keys

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As `QAdALayer`."""
        tokens, first = super().get_mask_sizes(query_length)
        if isinstance(tokens, Seen):
            tokens.forward_pass = self.shared.forward_pass
        return tokens, first

    def note_hidden(self, queries: int) -> None:
        """Count the stored tokens of a call neither as `exact` nor as `alike`, unless its mask is known to hide none:
        other texts must not begin with them."""
        if not self._hides_none() and (store := self.store) is not None:
            before = self.seen - queries
            for counts in (store.exact, store.alike):
                counts[:] = [min(count, before) for count in counts]

    def _hides_none(self) -> bool:
        """Whether all queries of the pass under way are known to see all tokens up to their own."""
        forward_pass = self.shared.forward_pass
        if forward_pass.shown != self.seen:
            return False
        # A mask made for an interrupted pass says nothing of this one's, which may be the caller's own.
        return pools_keys(self.shared.model.config) or generation.is_at_work(forward_pass.mask)

    @torch.compiler.disable
    def expand(self, own: Callable, module: nn.Module, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[batch, heads, tokens, dim]` of all tokens held: those that `own` makes, if all are new;
        else without contents."""
        if self.widths is None or self.seen == latent.shape[2]:
            made = own(module, latent, rotary)
            self.widths = made[0].shape[1], made[0].shape[3], made[1].shape[3]
        if self.seen != latent.shape[2]:
            heads, *dims = self.widths
            made = tuple(_stand_in(latent, len(latent), heads, self.seen, dim) for dim in dims)
        made[0]._qada_layer = self  # the tag attention/forward.py looks for
        return made

    def check_module(self, module: nn.Module, key: Tensor, value: Tensor) -> None:
        """As `LatentLayer`, with the newest tokens, expanded here: the module's own keys may be without contents."""
        assert self.incoming is not None
        if self.checked is None or self.checked() is not module:
            latent = self.incoming[:, :, -PROBED:]
            super().check_module(module, *expand(module, *latent.split(self.sizes, dim=-1)))

    def read_picked(self, mask: Tensor | None, *, batch: int, queries: int) -> Tensor:
        """Which tokens each query of a call reads, bool `[batch, queries, tokens]`. ValueError as of `read_mask`, or if
        the mask adds anything else to scores."""
        if mask is None or mask.dim() != 4:  # others do not say what was picked
            raise ValueError("layers with an indexer need a mask of what it picked, [batch, 1, queries, tokens]")
        visible, biased = read_mask(mask, batch=batch, seen=self.seen, queries=queries)
        refuse_bias(biased)
        return visible.expand(batch, queries, self.seen)

    def abandon(self, tokens: int) -> None:
        """As `QAdALayer`."""
        super().abandon(tokens)
        if self.store is None:  # the indexer's keys have rows and a dtype, too
            self.indexer_keys, self.is_indexer_initialized = None, False
        self._crop_indexer()

    def crop(self, tokens_to_remove: int) -> None:
        """As `QAdALayer`."""
        super().crop(tokens_to_remove)
        self._crop_indexer()

    def select_rows(self, index: SelectedRows) -> None:
        """As `QAdALayer`."""
        super().select_rows(index)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[index, : self.seen]

    @property
    def beside(self) -> dict[str, Tensor]:
        """As `QAdALayer`."""
        return {} if self.indexer_keys is None else {"indexer_keys": self.indexer_keys}

    def restore_beside(self, kept: dict[str, Tensor]) -> None:
        """As `QAdALayer`."""
        super().restore_beside({name: part for name, part in kept.items() if name != "indexer_keys"})
        if (keys := kept.get("indexer_keys")) is not None:
            assert self.store is not None
            fits = keys.is_floating_point() and keys.dim() == 3 and keys.shape[:2] == (self.store.batch, self.seen)
            found, wanted = f"{keys.dtype} {list(keys.shape)}", f"floating [{self.store.batch}, {self.seen}, dim]"
            require_fit(f"layer {self.index}", fits, f"keys of its indexer {found}", wanted)
            self.lazy_initialization_indexer(keys)
            self.indexer_keys = keys

    def _crop_indexer(self) -> None:
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self.seen]


def _stand_in(like: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape without contents, which takes the memory of one number. It is nan, so that nobody reads it
    unnoticed."""
    return like.new_full((), torch.nan).expand(shape)


def attend_to_picked(layer: IndexedLayer, query: Query, base: Callable[[], Tensor]) -> Tensor:
    """Attention `[batch, queries, heads, value_dim]` of a call whose queries see the tokens that `query.visible` shows.
    The call's tokens are stored afterwards. For a first prompt `base()`, the model's own attention, computes it."""
    store, incoming, queries = layer.store, layer.incoming, query.states.shape[2]
    assert store is not None
    assert incoming is not None
    empty, long = layer.seen == queries, queries > layer.options.window
    if empty:
        out = base()
    else:
        if not long:
            store.bulk.settle()
        with suspend_autocast(query.states.device):
            work = PickedAttention(layer, store, query).attend_all
            out = layer.shared.placement.retry(work, query.states.device).transpose(1, 2).contiguous()
    if empty or long:
        reading = generation.find_prompt()
        store.bulk.expected = reading.tokens if reading.in_chunks else 0
        store.absorb(incoming, incoming[..., :0], None)
        if query.states.device.type == "cpu":
            trim_growth()
    else:
        store.append(incoming, incoming[..., :0], None)
    layer.note_hidden(queries)
    layer.incoming = None
    return out


class PickedAttention(LatentAttention):
    """Attention of one call over picked tokens: cached ones, and new ones, which are not stored yet."""

    def __init__(self, layer: IndexedLayer, store: Any, query: Query) -> None:
        assert layer.widths is not None
        super().__init__(layer, store, query, layer.widths[2])
        assert layer.incoming is not None
        self.new = layer.incoming

    def attend_all(self) -> Tensor:
        """Attention's output `[batch, heads, queries, value_dim]` in the query's dtype."""
        states, visible, sink_logits = self.query.states, self.query.visible, self.query.sink_logits
        assert visible is not None
        result = states.new_zeros(*states.shape[:3], self.value_dim)
        for row in range(len(states)):  # each row has picked tokens of its own
            out, lse = self._attend_row(row, states[row : row + 1], visible[row])
            if sink_logits is not None:
                none = sink_logits.float()[None, :, None].expand_as(lse)
                out, lse = merge_partials(out, lse, torch.zeros_like(out), none)
            result[row] = out[0].to(result.dtype)
        return result

    def _attend_row(self, row: int, states: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """As `attend`, of the queries `[1, heads, queries, dim]` of a row; `visible` is bool `[queries, tokens]`."""
        (heads, queries), picked = states.shape[1:3], visible.any(dim=0).nonzero().squeeze(-1)
        absorbed = self.query.softcap is None and self._is_cheaper_absorbed(len(picked), queries)
        grouped = self._absorb(states) if absorbed else states
        dim = self.new.shape[3] if absorbed else self.value_dim
        out = states.new_zeros(*grouped.shape[:3], dim, dtype=torch.float32)
        lse = out.new_full(out.shape[:-1], -torch.inf)
        # The numbers that a block holds for each token: the mask's, or those of keys and values.
        numbers = queries * heads if absorbed else max(queries, heads * (states.shape[3] + self.value_dim))
        block = max(MIN_BLOCK, EXPANDED // numbers)
        for index, latents in self._gather(row, picked):
            spans = zip(index.split(block), latents.split(block, dim=2), strict=True) if len(index) else ()
            for at, keys in spans:
                values = keys
                if not absorbed:
                    keys, values = expand(self.module, *keys.split(self.layer.sizes, dim=-1))
                    keys, values = keys.to(states), values.to(states)
                if queries == 1:  # a single query sees all picked tokens
                    part = partial_attention(grouped, keys, values, **self.arguments)
                else:
                    shown = visible[:, at].repeat(heads if absorbed else 1, 1)
                    part = masked_attention(grouped, keys, values, shown, **self.arguments)
                out, lse = merge_partials(out, lse, *part)
        return self._merge_heads(out, lse, states) if absorbed else (out, lse)

    def _gather(self, row: int, picked: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Split a row's tokens `picked`, int64 and ascending, by the place that stores them: for each place these
        tokens and their latents `[1, 1, tokens, dim]`."""
        store, bulk = self.store, self.store.bulk
        length, gone = store.lengths[row], store.flushed[row]
        bounds = torch.tensor([min(gone, store.sinks), gone, length], dtype=torch.int64, device=picked.device)
        first, second, third = torch.searchsorted(picked, bounds).tolist()
        older, far, recent, new = picked.tensor_split((first, second, third))
        columns = torch.cat([older, recent + (store.sinks + store.end - length)])
        near = store.near_keys[row, 0, columns], self.new[row, 0, new - length]
        yield torch.cat([older, recent, new]), torch.cat(near)[None, None]
        self.layer.counters.dense_bulk_bytes += bulk.lengths[row] * bulk.token_bytes
        blocks = far.split(PICKED) if len(far) else ()
        parts = gather_parts(bulk, [((row, 0), block - store.sinks) for block in blocks], coded=False)
        for block, part in zip(blocks, parts, strict=True):
            self.layer.counters.bulk_read_bytes += part.bulk_read_bytes
            yield block, part.keys
