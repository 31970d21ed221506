"""A DynamicCache that notices an interrupted forward pass or change: its layers then hold different tokens."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .attention import generation
from .attention.pieces import compute_in_pieces, count_new
from .models import decoder_forward, forgets_states
from .no_tensors import NoTensors
from .selected_rows import find_selected_rows
from .state import Progress, Shared, Visit
from .state.layer import QAdALayer, check_crop
from .state.linear_states import count_writes, find_expected, find_kind, find_written, list_states
from .state.other_layers import copy_layer, crop_layer, drop_tensors, is_whole, move_layer
from .state.snapshots import EVERY, Snapshot, Snapshots
from .storage.bulk import Bulk


class WatchedCache(NoTensors, DynamicCache):
    """Knows how far a pass has come (`Progress`), and refuses to go on after an interruption.

    A pass comes to the layers in order: between passes `reached` is the last layer. A layer of keys makes one call in
    it. A linear layer makes several, and writes to its states in them, or in place between them. Its last write is no
    call, so the last layer's writes are compared with those of earlier layers of its kind (`_finish_pass`).
    """

    _shared: Shared
    _decode_graph: Any
    _given = False

    @property
    def _is_user_defined(self) -> bool:
        """`generate` sets it of a cache that it was given. A function of `custom_generate` may ask for no length."""
        return self._given

    @_is_user_defined.setter
    def _is_user_defined(self, given: bool) -> None:
        self._given = given
        if self._counts_tokens:
            self.get_seq_length()

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As `DynamicCache`, and watched."""
        self._begin(layer_idx, ("update conv", state_idx))
        states = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        self._note(layer_idx, ("conv", state_idx))
        return states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """As `DynamicCache`, and watched."""
        self._begin(layer_idx, ("update recurrent", state_idx))
        states = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        self._note(layer_idx, ("recurrent", state_idx))
        return states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """As `DynamicCache`, and watched."""
        self._begin(layer_idx, ("get conv", state_idx))
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """As `DynamicCache`, and watched."""
        self._begin(layer_idx, ("get recurrent", state_idx))
        return super().get_recurrent_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As `DynamicCache`, and watched."""
        if layer_idx is not None and layer_idx < len(self.layers) and state_idx is None:
            self._begin(layer_idx, "has previous")
        return super().has_previous_state(layer_idx, state_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The count of logical tokens, padding included. A call by `generate` is noted: it has to use the cache."""
        length = super().get_seq_length(layer_idx)
        if not layer_idx and not torch.compiler.is_compiling():
            generation.note_asked(self, length)
        return length

    def keep_snapshots(self, every: int = EVERY) -> None:
        """Keep states of sliding and linear layers where long passes end, and about every so many tokens of one, for
        `crop` to go back there. Nothing is kept if all layers can be cropped, if none is ours, or if states are
        forgotten anyway."""
        ours = [layer for layer in self.layers if isinstance(layer, QAdALayer)]
        needless = self._shared.snapshots is not None or forgets_states(self._shared.model.config)
        if not ours or len(ours) == len(self.layers) or needless:
            return
        self._shared.snapshots = Snapshots(max(every, self._shared.options.window + 1))
        if (model := self._shared.model.get()) is not None and not decoder_forward.is_taken(model):
            decoder_forward.put_before(model)

    def find_last_beginning(self, tokens: int) -> int:
        """The most tokens, at most `tokens`, to which `crop` can go back."""
        if tokens == self._count_tokens() or all(isinstance(each, QAdALayer) or is_whole(each) for each in self.layers):
            return tokens
        snapshots = [] if self._shared.snapshots is None else self._shared.snapshots.kept
        return max((snapshot.tokens for snapshot in snapshots if snapshot.tokens <= tokens), default=0)

    def take_snapshots(self) -> list[Snapshot]:
        """The kept snapshots, and one of now; empty if the cache is, or if all layers can be cropped."""
        self._check_whole()
        tokens, snapshots = self._count_tokens(), self._shared.snapshots
        if not tokens or all(isinstance(layer, QAdALayer) for layer in self.layers):
            return []
        earlier = [] if snapshots is None else [each for each in snapshots.kept if each.tokens < tokens]
        return [*earlier, Snapshot.take(self.layers, tokens, earlier)]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens of every row, as if they had never been seen. Other layers than
        ours go back to a snapshot, if one was kept there; empty ones refuse any crop, and are left as they are."""
        tokens, snapshots = check_crop(tokens_to_remove), self._shared.snapshots
        snapshot = None if snapshots is None or not tokens else snapshots.find(self._count_tokens() + tokens)
        others = (lambda layer, _: crop_layer(layer, tokens)) if snapshot is None else snapshot.restore
        self._change("crop", lambda layer: layer.crop(tokens), others)
        self._shared.rope_deltas.crop(self._count_tokens())
        if snapshots is not None:
            snapshots.forget_behind(self._count_tokens())

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row `i` becomes the old row `beam_idx[i]` (beam search)."""
        self._change_rows("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, next to each other."""
        self._change_rows("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (ints, or a bool mask)."""
        self._change_rows("batch_select_indices", indices)

    def reset(self) -> None:
        """Drop all tokens and counters."""
        self._shared.progress.changing = "reset"
        for layer in self.layers:
            if not isinstance(layer, QAdALayer):
                drop_tensors(layer)
        super().reset()
        if self._decode_graph is not None:  # it holds what layers have dropped
            self._decode_graph.forget()
        self._shared.progress = Progress(first=self._shared.progress.first)
        self._shared.rope_deltas.crop(0)
        if (snapshots := self._shared.snapshots) is not None:
            self._shared.snapshots = Snapshots(snapshots.every)

    def _read_in_pieces(self, compute: Callable[..., Any], decoder: nn.Module, kwargs: dict[str, Any]) -> Any:
        """The decoder's output, `compute(**kwargs)`, in passes between which snapshots are taken. None, if one pass is
        due: few new tokens, or a `prefill_threshold`, by which a later pass would read other tokens. In few bits there
        are at most two passes: the second reads what the first has coded, as a later turn does."""
        snapshots, options = self._shared.snapshots, self._shared.options
        if snapshots is None:
            return None
        self._begin_pass()  # in older transformers linear layers may write before they first call, and spoil a snapshot
        if options.prefill_threshold or (new := count_new(kwargs)) <= snapshots.every:
            return None
        sizes = snapshots.plan(new, options.window + 1)
        if options.codes_tokens:
            sizes = [size for size in (sum(sizes[:-1]), sizes[-1]) if size]
        return compute_in_pieces(compute, decoder, kwargs, sizes, held=self._count_tokens()) if len(sizes) > 1 else None

    def _count_tokens(self) -> int:
        """Logical tokens of our layers, or of the first one that counts any; 0, if none does."""
        ours = [layer.seen for layer in self.layers if isinstance(layer, QAdALayer)]
        return ours[0] if ours else super().get_seq_length() if self._counts_tokens else 0

    def _begin(self, layer_idx: int, call: Hashable) -> None:
        self._enter(layer_idx, call)
        self._note(layer_idx, call)

    def _enter(self, layer_idx: int, call: Hashable) -> None:
        """Raise if layers left something undone before this call of one, in this pass or in the last."""
        progress = self._shared.progress
        if 0 <= progress.reached < layer_idx and not progress.changing:
            self._check_handed_back()
        elif progress.changing or progress.reached < 0 or progress.is_repeated(layer_idx, call):
            self._begin_pass()
            if progress.reached < 0 <= progress.first < layer_idx:
                raise RuntimeError("reset() interrupted a forward pass, which cannot go on: read the prompt again")
            progress.first = layer_idx

    def _begin_pass(self) -> None:
        """Raise if the last pass was interrupted; keep a snapshot, if one is due."""
        self._check_whole()
        if (snapshots := self._shared.snapshots) is not None:
            snapshots.begin_pass(self.layers, self._count_tokens())

    def _note(self, layer_idx: int, call: Hashable) -> None:
        """Note that the pass has come to this call."""
        progress = self._shared.progress
        if layer_idx in self._linear_layers:
            if layer_idx not in progress.visits:
                visit = progress.visits[layer_idx] = Visit(count_writes(self.layers[layer_idx]))
                if layer_idx == self._last_layer:
                    visit.expected = find_expected(self.layers, self._shared.model.config, progress.visits, layer_idx)
            progress.visits[layer_idx].calls.add(call)
            self._shared.bar.reach(layer_idx)
        progress.reached, progress.changing = layer_idx, ""  # last, as a last layer without a visit counts as whole

    def _check_handed_back(self) -> None:
        """Raise if keys handed out by the layer reached last did not come to our attention function."""
        reached = self._shared.progress.reached
        if 0 <= reached < len(self.layers) and isinstance(layer := self.layers[reached], QAdALayer):
            layer.check_attended()

    def _check_whole(self) -> None:
        """Raise unless the last forward pass, or change, came through all layers: else they hold different tokens."""
        self._check_handed_back()
        self._finish_pass()
        self._check_files()
        progress = self._shared.progress
        if progress.changing or 0 <= progress.reached < self._last_layer:
            passed = f"a forward pass was interrupted after layer {progress.reached}"
            cause = f"{progress.changing} was interrupted" if progress.changing else passed
            raise RuntimeError(f"{cause}, so layers hold different tokens: call reset() and read the prompt again")

    def _check_files(self) -> None:
        """Raise if others have written to a file that the bulk is read from."""
        for file in {bulk.source.file for bulk in self._list_bulks() if bulk.source is not None}:
            file.check_unchanged()

    def _finish_pass(self) -> None:
        """Note whether the last layer wrote as many of its states as earlier ones of its kind, which were whole. It is
        done while they are still as it left them."""
        progress, last = self._shared.progress, self._last_layer
        if progress.reached != last:
            return
        if (visit := progress.visits.get(last)) and not visit.expected <= find_written(self.layers[last], visit):
            progress.reached = last - 1
        progress.visits.clear()

    def _change_rows(self, verb: str, argument: Any) -> None:
        """Have row `i` of every layer become the old row that the argument of this verb says; without rows nothing."""
        self._check_whole()
        if rows := self._count_rows():
            index = find_selected_rows(verb, argument, rows)
            # The one verb of rows that every kind of transformers' layers has.
            order = torch.tensor(index, dtype=torch.long, device="cpu")
            self._change(verb, lambda layer: layer.select_rows(index), lambda layer, _: layer.reorder_cache(order))
            self._shared.rope_deltas.select_rows(index, rows)
            if self._shared.snapshots is not None:
                self._shared.snapshots.kept.clear()

    def _change(self, verb: str, ours: Callable[[QAdALayer], None], others: Callable[[Any, int], None]) -> None:
        """Change every layer, or none; an interruption in between is noticed. The argument has been checked, and ours
        refuse nothing else. Transformers' own may (a crop behind a window): copies of them are changed first."""
        self._check_whole()
        changed = {index: copy_layer(each) for index, each in enumerate(self.layers) if not isinstance(each, QAdALayer)}
        for index, layer in changed.items():
            others(layer, index)
        self._shared.progress.changing = verb
        for index, layer in enumerate(self.layers):
            if isinstance(layer, QAdALayer):
                ours(layer)
            else:
                vars(layer).update(vars(changed[index]))
        self._shared.progress.changing = ""

    def _count_rows(self) -> int:
        """The number of rows; 0 if the cache is empty."""
        if bulks := self._list_bulks():
            return len(bulks[0].lengths)
        held = (each for layer in self.layers for each in (getattr(layer, "keys", None), *list_states(layer).values()))
        return next((len(each) for each in held if each is not None and each.dim() > 1), 0)

    def _prepare_layer(self, layer_idx: int, keys: Tensor) -> None:
        """Make one of transformers' layers ready for new keys, or raise as our layers behind it will: it would take
        some of the tokens in before they do."""
        ours = (layer for layer in self.layers[layer_idx:] if isinstance(layer, QAdALayer))
        if (layer := next(ours, None)) is not None:
            layer.check_rows(len(keys))
        move_layer(self.layers[layer_idx], keys.device)

    def _list_bulks(self) -> list[Bulk]:
        return [layer.store.bulk for layer in self.layers if isinstance(layer, QAdALayer) and layer.store is not None]

    @functools.cached_property
    def _counts_tokens(self) -> bool:
        """Whether any layer does: linear ones do not."""
        return any(isinstance(layer, CacheLayerMixin) for layer in self.layers)

    @functools.cached_property
    def _linear_layers(self) -> frozenset[int]:
        layers = enumerate(self.layers)
        return frozenset(index for index, layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin))

    @functools.cached_property
    def _last_layer(self) -> int:
        """Index of the last layer that calls the cache in every pass; -1, if none does."""
        for index in reversed(range(len(self.layers))):
            calls = isinstance(self.layers[index], (CacheLayerMixin, LinearAttentionCacheLayerMixin))
            # In older transformers feed-forward layers have a linear cache and never call it.
            if calls and find_kind(self.layers, self._shared.model.config, index)[1] not in ("mlp", "moe"):
                return max([index, *self._shared.model.readers])  # readers call, too, and are no layers of the cache
        return -1
