"""One decode step, and the values in which the next step differs from it."""

import contextlib
import weakref
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..attention import forward as attention
from ..attention.decode import find_other_moments
from ..kernels.operands import Rows
from ..state.forward_pass import describe_rows, round_rows
from ..state.layer import QAdALayer
from ..storage import TokenStore

ALIGNMENT = 16  # bytes, of the tensors that `_pack` puts side by side
EAGER = "eager"  # makes its mask on the host; a step of real tokens can do without, see `Step.use`
# These change when a layer, or its store, gets or loses tokens.
_LAYER_TOKENS = attrgetter("store", "seen", "padding", "incoming", "device")
_STORE_TOKENS = attrgetter("end", "lengths")
# These change when a tensor of the storage is replaced by another one, as in `TokenStore.version`.
_STORE_TENSORS = attrgetter("replaced", "bulk")
_BULK_TENSORS = attrgetter("replaced", "sketch")
_SKETCH_TENSORS = attrgetter("replaced", "lengths")


class Step:
    """The host's numbers and tensors of one decode step. Once it is replayed, `advance` makes it the next step."""

    def __init__(self, layers: list[QAdALayer], inputs: dict[str, Tensor]) -> None:
        """`inputs` are those that `find_inputs` returns; without `position_ids`, these are made here."""
        self.layers, self.shared = list(layers), layers[0].shared
        self.askers = [asker for layer in layers for asker in layer.askers]
        self._input_facts = _list_facts(inputs)
        self.stores: list[TokenStore] = [layer.store for layer in layers if layer.store is not None]
        store, forward_pass = self.stores[0], self.shared.forward_pass
        self.device = store.near_keys.device
        tensors, self.numbers = describe_rows(
            lengths=[length + 1 for length in store.lengths], flushed=store.flushed, end=store.end + 1, queries=1,
            valid=None, sinks=forward_pass.sinks, window=forward_pass.window,
        )  # fmt: skip
        masks, (counts, stored, decided) = tensors[:2], tensors[2:]
        # Masks over all columns of the near buffers, as later steps use columns that are still empty.
        unused = store.near_keys.shape[2] - masks[0].shape[3]
        local, pending = (functional.pad(mask, (0, unused)) for mask in masks)
        self.inputs = dict(inputs)
        if "position_ids" not in inputs:  # the decoder would make them on the host, anew in each step
            self.inputs["position_ids"] = torch.full((1, 1), layers[0].seen, dtype=torch.int64, device=self.device)
        column = torch.tensor([store.sinks + store.end], dtype=torch.int64, device="cpu")  # of the new token
        self.parts = column, counts, stored, local, pending, decided
        self._bulks = [store.bulk for store in self.stores]
        self._sketches = [bulk.sketch for bulk in self._bulks if bulk.sketch is not None]
        # A sketch changes its list of lengths in place.
        sketches = [(replaced, list(lengths)) for replaced, lengths in map(_SKETCH_TENSORS, self._sketches)]
        self._memory = [*map(_STORE_TENSORS, self.stores)], [*map(_BULK_TENSORS, self._bulks)], sketches
        self._tokens: Any = None  # `_find_tokens()` after the last replay
        self._settings: dict[str, Any] = {}  # the config's fields after the last replay
        self._options = self.shared.options
        self._asked_stores = [layer.store for layer in layers for _ in layer.askers if layer.store is not None]
        # Of a token in all KV heads.
        token_bytes = [store.near_keys.shape[1] * store.bulk.token_bytes for store in self._asked_stores]
        self._dense_bytes = [self.numbers["dense_tokens"] * nbytes for nbytes in token_bytes]

    @property
    def plans(self) -> list[Any]:
        """Weak references to all askers' plans of single tokens. Empty if one has none, or torch computes it."""
        plans = [asker.plan for asker in self.askers]
        served = all(plan is not None and plan.kernel is not None for plan in plans)
        pairs = zip(plans, self._asked_stores, strict=True)
        current = served and all(plan.version == store.version for plan, store in pairs)
        return [weakref.ref(plan) for plan in plans] if current else []

    @property
    def is_torchs(self) -> bool:
        """Whether torch computed a layer's last step."""
        plans = [asker.plan for asker in self.askers]
        return any(plan is not None and plan.kernel is None for plan in plans)

    def is_followed_by(self, layers: list[QAdALayer]) -> bool:
        """Whether the next step of `layers` differs from the last replayed one by its token alone: nothing else has
        changed layers, options or config."""
        if layers != self.layers or self._find_tokens() != self._tokens:
            return False
        in_stores, in_bulks, in_sketches = self._memory
        if list(map(_STORE_TENSORS, self.stores)) != in_stores or list(map(_BULK_TENSORS, self._bulks)) != in_bulks:
            return False
        if list(map(_SKETCH_TENSORS, self._sketches)) != in_sketches:
            return False
        return self.shared.options is self._options and vars(self.shared.model.config) == self._settings

    @property
    def keeps_moments(self) -> bool:
        """Whether the bulks of the next step round to the lengths of the last replayed one, for another prompt's
        moments."""
        store = self.stores[0]
        alike = len(set(store.lengths)) == 1
        bulk_tokens = [length - store.sinks - store.window + 1 for length in store.lengths[: 1 if alike else None]]
        return round_rows(bulk_tokens) == self.numbers["row_moment_lengths"]

    def find_moments(self) -> list[tuple[int, int]]:
        """Bring another prompt's moments up to date, as computed steps do. Returns addresses and lengths of their
        tensors: those of fewer rows may lie where those of more did."""
        pairs = [
            find_other_moments(asker, store, self.numbers["row_moment_lengths"])
            for asker, store in zip(self.askers, self._asked_stores, strict=True)
        ]
        return [(part.data_ptr(), len(part)) for pair in pairs if pair is not None for part in pair]

    def takes(self, inputs: dict[str, Tensor]) -> bool:
        """Whether `inputs` have this step's names, shapes and dtypes."""
        return _list_facts(inputs) == self._input_facts

    def _find_tokens(self) -> tuple[list, list]:
        """State that differs whenever a layer's tokens do."""
        return list(map(_LAYER_TOKENS, self.layers)), list(map(_STORE_TOKENS, self.stores))

    @contextlib.contextmanager
    def use(self, places: "Places") -> Iterator[None]:
        """Inside, a pass reads its `Rows` and its token's column from `places`."""
        self.shared.forward_pass.given = places.find_rows(self.numbers)
        for store in self.stores:
            store.place = places.place
        is_eager = self.shared.model.config._attn_implementation == EAGER
        try:
            with attention.without_masks() if is_eager else contextlib.nullcontext():
                yield
        finally:
            self.shared.forward_pass.given = None
            for store in self.stores:
                store.place = None

    def advance(self) -> None:
        """Count the replayed step's token and decisions on the host. This is then the step after it."""
        decisions = self.numbers["decisions"]
        for layer, store in zip(self.layers, self.stores, strict=True):
            layer.seen += 1
            store.advance()
        for asker, dense_bytes in zip(self.askers, self._dense_bytes, strict=True):
            asker.counters.count_call(decisions, dense_bytes)
        self._tokens = self._find_tokens()
        self._settings = dict(vars(self.shared.model.config))


class Places:
    """All that differs between steps, in tensors whose addresses never change: the decoder's inputs, the tensors of
    `Rows`, and the column that the new token goes to."""

    def __init__(self, step: "Step") -> None:
        self._window = step.stores[0].window
        with torch.inference_mode(False):  # else they could not be written to outside inference mode
            self.inputs = {name: tensor.clone() for name, tensor in step.inputs.items()}
            self._packed = _pack(step.parts).to(step.device)
        self._shapes = [part.shape for part in step.parts]
        pieces = self._packed.split([part.nbytes + _count_padding(part) for part in step.parts])
        self.place, *self._rows = (
            piece[: part.nbytes].view(part.dtype).view(part.shape)
            for piece, part in zip(pieces, step.parts, strict=True)
        )

    def find_rows(self, numbers: dict[str, Any]) -> Rows:
        """New `Rows` of the tensors here for each pass: kernels keep tensors derived from `Rows` in them, and each pass
        has to compute these itself."""
        counts, stored, local, pending, decided = self._rows
        return Rows(local, pending, counts, stored, decided, **numbers)

    def fits(self, step: "Step") -> bool:
        """Whether the step's inputs and parts have the shapes of the tensors here."""
        alike = _list_facts(self.inputs) == _list_facts(step.inputs)
        return alike and self._shapes == [part.shape for part in step.parts]

    def write(self, step: "Step") -> None:
        """Write the step's parts, all that the next replay reads but `inputs`. Nothing here waits for the device."""
        self._packed.copy_(_pack(step.parts), non_blocking=True)

    def write_inputs(self, inputs: dict[str, Tensor]) -> None:
        """Write the decoder's inputs of the next replay."""
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)

    def advance(self) -> None:
        """Replace this token's position, column, window, pending tokens and bulk by the next token's, on the device, at
        the graph's end. No column follows the last one: a flush is due then, and `write` replaces all."""
        counts, _, local, pending, _ = self._rows
        self.place.copy_((self.place + 1).clamp_max(local.shape[3] - 1))
        leaving = self.place - self._window  # the column that the window moves past
        local.index_fill_(3, self.place, True)
        local.index_fill_(3, leaving, False)
        pending.index_fill_(3, leaving, True)
        counts.add_(1)
        self.inputs["position_ids"].add_(1)


def _list_facts(inputs: dict[str, Tensor]) -> list[tuple]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()]


def _pack(parts: tuple[Tensor, ...]) -> Tensor:
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    return torch.cat([functional.pad(part, (0, _count_padding(part))) for part in flat])


def _count_padding(part: Tensor) -> int:
    """Bytes behind a tensor, so that the next one is aligned: Triton compiles anew for an address that is not."""
    return -part.nbytes % ALIGNMENT
