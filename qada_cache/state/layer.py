"""One layer of the cache: every verb transformers asks of it, on top of a `TokenStore`."""

import inspect
import operator
import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from ..models import picks_blocks
from ..no_tensors import refuse_moves
from ..selected_rows import SelectedRows, find_selected_rows
from ..storage import TokenStore
from ..storage.padding import NONE
from ..versions import CACHE
from . import Shared
from .asker import Asker, refuse_gradients
from .counters import Counters
from .forward_pass import MaskSize, Seen

# On a GPU each token of a call reads for itself, exact attention reads once for all. On an H100 behind 32,768 tokens of
# Llama-3-8B to read all takes as long as 13 tokens' selections over the bus, and as one token's on the device.
DRAFT_TOKENS = 8


def _make_no_tensor(name: str) -> Any:
    """The property `keys` or `values`, for code that takes a layer for transformers' own: None as long as it is empty.
    Later a single tensor would be a copy of the whole bulk on the device, without its padding."""

    def refuse(layer: "QAdALayer", *given: Tensor | None) -> None:
        if any(part is not None for part in given) if given else layer.is_initialized:
            raise AttributeError(  # which `hasattr` and `getattr` with a default understand
                f"something reads or sets the {name} of a QAdACache layer, which are no single tensor. If it is the "
                f"model, use transformers.DynamicCache for {layer.shared.model.model_type}; save() keeps a cache"
            )

    return property(refuse, refuse)


class QAdALayer(Asker, DynamicLayer):
    """One full-attention layer: its tokens, padding and counters, and those of layers that read its keys. `update` only
    tags new tokens. `attention/call.py` stores them: it has the queries, and the mask that tells padding."""

    keys, values = _make_no_tensor("keys"), _make_no_tensor("values")
    stores_padding = False  # whether padding takes the place of tokens in its store

    def __init__(self, shared: Shared, index: int) -> None:
        DynamicLayer.__init__(self)
        owners = shared.model.readers.items()
        self.readers = {each: Asker(shared, each, index) for each, owner in owners if owner == index}
        Asker.__init__(self, shared, index, keys_of=index)
        self.reset()

    @property
    def askers(self) -> list[Asker]:
        """All layers whose queries ask its keys, itself first."""
        return [self, *self.readers.values()]

    def reset(self) -> None:
        """Drop all tokens and counters."""
        for asker in self.askers:
            asker.forget()
        self.is_initialized = False
        self.incoming: Tensor | None = None  # keys handed out by `update` and not yet seen by the attention function
        self.lent: Any = None  # a `Call` of attention/call.py: tokens that are stored once all readers have asked them
        self.store: TokenStore | None = None  # the real tokens
        self.is_first = False  # whether the last `update` made the store
        self.seen = 0  # logical tokens, padding included (what transformers calls the sequence length)
        self.padding = NONE  # of these tokens; shared by the layers of a cache

    def drop_plans(self) -> None:
        """As `Asker`, of all askers."""
        for asker in self.askers:
            Asker.drop_plans(asker)

    def drop_old_plans(self, version: tuple[int, ...]) -> None:
        """As `Asker`, of all askers."""
        for asker in self.askers:
            Asker.drop_old_plans(asker, version)

    @property
    def adaptive_tokens(self) -> int:
        """The most new tokens of a call that heads decide for, behind others: more are exact."""
        store, most = self.store, self.options.window
        if store is None or not store.selects or self.options.criterion == "local":
            return most
        return min(most, DRAFT_TOKENS) if store.bulk.offloading or store.near_keys.is_cuda else most

    def apply_options(self) -> None:
        """Decide and count by the cache's new options; ValueError as of `TokenStore.keep_moments`."""
        self.drop_plans()
        for asker in self.askers:
            asker.counters = Counters()
        if self.store is not None:
            self._keep_by_options(self.store)
            self.store.alike = list(self.store.exact)  # others were decided by the options of before

    def _keep_by_options(self, store: TokenStore) -> None:
        options, near = self.options, store.near_keys
        store.keep_moments(track=options.tracks_moments, update=options.update_moments, kernels=options.kernels)
        energies = self.find_query_energies(near.shape[1], near.shape[3])
        store.keep_sketch(options.sketch_bits, energies, select=options.selects_tokens, kernels=options.kernels)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """An empty store for tensors like these `[batch, kv_heads, tokens, dim]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        store = TokenStore(
            key_states,
            value_states,
            sinks=self.options.sink_tokens,
            window=self.options.window,
            offloading=self.options.offloading,
            placement=self.shared.placement,
            layer=self.index,
            bulk_bits=self.options.bulk_bits,
        )
        self._keep_by_options(store)
        self.store, self.is_initialized = store, True  # last: an allocation above may fail

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tag new tokens `[batch, kv_heads, tokens, dim]`; the result is for our attention function alone. RuntimeError
        if gradients are recorded, the batch size or dtype changed, or the last tokens never reached us."""
        self.check_attended()
        refuse_gradients(key_states, value_states)
        self.check_rows(key_states.shape[0])
        self.is_first = self.store is None
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        elif (key_states.dtype, value_states.dtype) != self.store.dtypes:
            dtypes = self.store.dtypes, (key_states.dtype, value_states.dtype)
            held, given = (" and ".join(map(str, dict.fromkeys(pair))) for pair in dtypes)
            raise RuntimeError(
                f"this QAdACache holds keys and values in {held} and was given {given}: use it with a model of the "
                "dtype, and under the autocast, that it was filled with, or reset() it"
            )
        elif key_states.device != self.device:
            self.drop_plans()
            self.store.move(key_states.device)
            self.device = key_states.device
        tagged = key_states.view_as(key_states)  # a new Python object, so that the caller's is not written to
        tagged._qada_layer = self  # type: ignore[attr-defined]  # the tag attention/forward.py looks for
        self.incoming = tagged  # before `seen`, so that an interruption in between is noticed
        self.seen += key_states.shape[-2]
        return tagged, value_states

    def find_new(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """The keys and values to store for those of a call of attention; None, unless `update` returned them last."""
        return (key, value) if self.incoming is key else None

    @property
    def beside(self) -> dict[str, Tensor]:
        """Tensors `[batch, tokens, dim]` that a file has of the layer and that are not in its store, by name."""
        return {}

    def restore_beside(self, kept: dict[str, Tensor]) -> None:
        """Restore `beside` from a file; ValueError, if this layer has no such tensors, or they do not fit."""
        if kept:
            raise ValueError(f"layer {self.index} keeps no {', '.join(kept)}")

    def check_rows(self, rows: int) -> None:
        """Raise RuntimeError if a call has no rows, or another number of rows than the store."""
        held = rows if self.store is None else self.store.batch
        if not rows or rows != held:
            raise RuntimeError(
                f"this QAdACache holds {held} rows and was given {rows}: use batch_repeat_interleave or "
                "batch_select_indices first, or reset()"
            )

    def check_attended(self) -> None:
        """Raise if tokens were taken in that never came back through our attention function."""
        if self.incoming is not None:
            instead = f"read tokens by model(input_ids, {CACHE}=cache), QAdACache.load a cache, or use DynamicCache"
            if _is_put_in():
                raise RuntimeError(
                    f"layer {self.index}: keys that QAdACache returned did not come back. It is not filled by update() "
                    "from outside, as its model alone has the queries that attend to the keys: reset() it, then "
                    f"{instead}"
                )
            raise RuntimeError(
                f"layer {self.index}: the keys that QAdACache returned did not come back to its attention function. "
                f"Either this {self.shared.model.model_type} model computes attention in a way QAdACache does not "
                "support, or the cache was built with a config that is not this model's own (use QAdACache(model)), or "
                "the model's attention implementation was changed since, or a forward pass was interrupted, or threads "
                "share the cache (give each a copy), or keys and values were put in by update() from outside "
                f"({instead}). Nothing was computed from the cache; use DynamicCache, or fix the cause and call reset()"
            )

    def abandon(self, tokens: int) -> None:
        """Undo `update`: its tokens were refused before anything was stored."""
        self.incoming = None
        self.seen -= tokens
        if self.is_first:  # its store has a number of rows and a dtype, which the next call need not have
            self.store, self.is_initialized = None, False
        self.shared.progress.reached = self.index - 1

    def offload(self) -> None:
        """Refused: the bulk lies in host memory."""
        refuse_moves("offload()")

    def prefetch(self) -> None:
        """Refused: a call copies the tokens that it reads by itself."""
        refuse_moves("prefetch()")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of tokens that the mask of a call of `query_length` covers, and the first of them."""
        if torch.compiler.is_compiling():  # graphs know no such classes
            return self.seen + query_length, 0
        # Models of shared keys cut masks by queries, and so do layers that pick blocks.
        cuts = self.shared.model.readers or picks_blocks(self.shared.model.config)
        return (MaskSize if cuts else Seen)(self.seen + query_length), 0

    def get_seq_length(self) -> int:
        """The number of logical tokens, padding included."""
        return self.seen

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` logical tokens of every row, as if they had never been seen."""
        tokens = check_crop(tokens_to_remove)
        self.check_attended()
        if not tokens or not self.seen or self.store is None:
            return
        seen = max(self.seen + tokens, 0)
        padding = self.padding.crop(seen)
        lengths = [seen - padded for padded in padding.count_by_row(self.store.batch)]
        self.store.crop(lengths)
        self.drop_old_plans(self.store.version)
        self.seen, self.padding = seen, padding

    def select_rows(self, index: SelectedRows) -> None:
        """Keep, repeat or reorder rows: row `i` becomes the old row `index[i]`."""
        self.check_attended()
        if self.store is None or index == list(range(self.store.batch)):
            return
        if len(index) != self.store.batch:
            self.drop_plans()  # they would keep the old buffers beside the new ones
        if not index:  # as `DynamicCache` counts the tokens of no rows
            self.lazy_initialization(self.store.near_keys[:0], self.store.near_values[:0])
            self.seen, self.padding = 0, NONE
            return
        self.store.select_rows(index)
        self.drop_old_plans(self.store.version)
        self.padding = self.padding.select_rows(index)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes the old row `beam_idx[i]` (beam search)."""
        self._select_by("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, next to each other."""
        self._select_by("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (ints, or a bool mask)."""
        self._select_by("batch_select_indices", indices)

    def _select_by(self, verb: str, argument: Any) -> None:
        if self.store is not None and self.store.batch:
            self.select_rows(find_selected_rows(verb, argument, self.store.batch))


def _is_put_in() -> bool:
    """Whether somebody calls `update`, and no module of torch, a model or a part of one, is at work in this thread."""
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    in_module = any(isinstance(frame.f_locals.get("self"), nn.Module) for frame in frames)
    return not in_module and any(frame.f_code.co_name == "update" for frame in frames)


def find_adaptive_tokens(layers: Iterable[Any], window: int) -> int:
    """The least of a cache's window and of `adaptive_tokens` of those of its layers that decide, if any do."""
    ours = [layer.adaptive_tokens for layer in layers if isinstance(layer, QAdALayer)]
    return min([window, *filter(None, ours)])


def check_crop(tokens_to_remove: Any) -> int:
    """The argument of `crop` as an int, 0 or negative: ValueError or TypeError otherwise."""
    takes = f"crop takes a negative count of tokens to remove, got {tokens_to_remove!r}"
    try:
        tokens = operator.index(tokens_to_remove)  # assisted decoding of transformers 5.17 counts by a tensor
    except TypeError as error:
        raise TypeError(takes) from error
    if tokens > 0:
        raise ValueError(takes)
    return tokens
