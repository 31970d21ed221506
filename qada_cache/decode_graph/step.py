"""One decode step: whether a graph can hold it, and what differs between it and the next."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..attention import forward as attention
from ..kernels.operands import Rows
from ..key_moments.rotation import round_length
from ..state import Shared
from ..state.forward_pass import describe_rows
from ..state.layer import QAdALayer
from ..storage import TokenStore
from ..versions import CACHE_NAMES
from .capturing import GRAPHS

_INPUTS = ("input_ids", "inputs_embeds", "per_layer_inputs", "position_ids")  # of a decoder, that differ by step
ALIGNMENT = 16  # bytes, of tensors side by side
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")  # which make masks on the device, or none
_EAGER = "eager"  # whose masks are made on the host, and others will do
# What tells of a layer's tokens, and of its store's.
_OF_LAYER = attrgetter("store", "seen", "padding", "incoming", "device")
_OF_STORE = attrgetter("end", "lengths")
# What tells where they lie, beside its store: as of `TokenStore.version`.
_IN_STORE = attrgetter("replaced", "bulk")
_IN_BULK = attrgetter("replaced", "sketch")
_IN_SKETCH = attrgetter("replaced", "lengths")


class Step:
    """One decode step, as far as the host knows it before it is computed; and, once it is, those that follow it."""

    def __init__(self, layers: list[QAdALayer], inputs: dict[str, Tensor]) -> None:
        """`inputs` as of `find_inputs`; positions that are not told are made."""
        self.layers, self.shared = list(layers), layers[0].shared
        self.askers = [asker for layer in layers for asker in layer.askers]
        self._told = _list_facts(inputs)
        self.stores: list[TokenStore] = [layer.store for layer in layers if layer.store is not None]
        store, forward_pass = self.stores[0], self.shared.forward_pass
        self.device = store.near_keys.device
        tensors, self.numbers = describe_rows(
            lengths=[length + 1 for length in store.lengths], flushed=store.flushed, end=store.end + 1, queries=1,
            valid=None, sinks=forward_pass.sinks, window=forward_pass.window,
        )  # fmt: skip
        masks, (counts, stored, decided) = tensors[:2], tensors[2:]
        # Of all columns that the near buffers have, seen or not.
        more = store.near_keys.shape[2] - masks[0].shape[3]
        local, pending = (functional.pad(mask, (0, more)) for mask in masks)
        self.inputs = dict(inputs)
        if "position_ids" not in inputs:  # what a decoder makes itself
            self.inputs["position_ids"] = torch.full((1, 1), layers[0].seen, dtype=torch.int64, device=self.device)
        place = torch.tensor([store.sinks + store.end], dtype=torch.int64, device="cpu")
        self.parts = place, counts, stored, local, pending, decided
        self._bulks = [store.bulk for store in self.stores]
        self._sketches = [bulk.sketch for bulk in self._bulks if bulk.sketch is not None]
        sketches = [(replaced, list(lengths)) for replaced, lengths in map(_IN_SKETCH, self._sketches)]  # written to
        self._memory = [*map(_IN_STORE, self.stores)], [*map(_IN_BULK, self._bulks)], sketches
        self._tokens: Any = None  # that the last replay left
        self._settings: dict[str, Any] = {}  # the config's, then
        self._options = self.shared.options
        # By layer that asks.
        self._asked = [layer.store for layer in layers for _ in layer.askers if layer.store is not None]
        heads = [store.near_keys.shape[1] * store.bulk.token_bytes for store in self._asked]  # of a token
        self._dense_bytes = [self.numbers["dense_tokens"] * token_bytes for token_bytes in heads]

    @property
    def plans(self) -> list[Any]:
        """Those of all layers' kernels, weakly; empty, if torch computes one, or if it was a turn."""
        known = [asker.plan for asker in self.askers]
        served = all(each is not None and each.kernel is not None and each.queries[2] == 1 for each in known)
        current = served and all(each.version == store.version for each, store in zip(known, self._asked, strict=True))
        return [weakref.ref(each) for each in known] if current else []

    @property
    def is_torchs(self) -> bool:
        """Whether torch computed a layer's last step."""
        known = [asker.plan for asker in self.askers]
        return any(each is not None and each.kernel is None and each.queries[2] == 1 for each in known)

    def is_followed_by(self, layers: list[QAdALayer]) -> bool:
        """Whether the next step of these differs from the last replayed one by its token alone: nothing else has
        changed them since, nor the options or the config, and the lengths that another prompt's moments are for are
        the same."""
        if layers != self.layers or self._find_tokens() != self._tokens:
            return False
        in_stores, in_bulks, in_sketches = self._memory
        if list(map(_IN_STORE, self.stores)) != in_stores or list(map(_IN_BULK, self._bulks)) != in_bulks:
            return False
        if list(map(_IN_SKETCH, self._sketches)) != in_sketches:
            return False
        if self.shared.options is not self._options or vars(self.shared.model.config) != self._settings:
            return False
        store = self.stores[0]
        behind = [length - store.sinks - store.window + 1 for length in dict.fromkeys(store.lengths)]
        rounded = {round_length(tokens) for tokens in behind}
        return rounded == set(self.numbers["row_moment_lengths"])

    def takes(self, inputs: dict[str, Tensor]) -> bool:
        """Whether a decoder is told the same, but for what the tensors hold."""
        return _list_facts(inputs) == self._told

    def _find_tokens(self) -> tuple[list, list]:
        """What tells of all layers' tokens."""
        return list(map(_OF_LAYER, self.layers)), list(map(_OF_STORE, self.stores))

    @contextlib.contextmanager
    def use(self, places: "Places") -> Iterator[None]:
        """Have a pass meanwhile take what differs from these."""
        self.shared.forward_pass.given = places.find_rows(self.numbers)
        for store in self.stores:
            store.place = places.place
        is_eager = self.shared.model.config._attn_implementation == _EAGER
        try:
            with attention.without_masks() if is_eager else contextlib.nullcontext():
                yield
        finally:
            self.shared.forward_pass.given = None
            for store in self.stores:
                store.place = None

    def advance(self) -> None:
        """Count what a replay of it has added."""
        decisions = self.numbers["decisions"]
        for layer, store in zip(self.layers, self.stores, strict=True):
            layer.seen += 1
            store.advance()
        for asker, dense_bytes in zip(self.askers, self._dense_bytes, strict=True):
            asker.counters.count_call(decisions, dense_bytes)
        self._tokens = self._find_tokens()
        self._settings = dict(vars(self.shared.model.config))


class Places:
    """What differs between steps, in tensors that stay where they are: what the decoder is told, the tensors of `Rows`,
    and the column that the new token goes to."""

    def __init__(self, step: "Step") -> None:
        self._window = step.stores[0].window
        with torch.inference_mode(False):  # they may be written to outside inference mode
            self.inputs = {name: tensor.clone() for name, tensor in step.inputs.items()}
            self._packed = _pack(step.parts).to(step.device)
        self._shapes = [part.shape for part in step.parts]
        pieces = self._packed.split([part.nbytes + _count_padding(part) for part in step.parts])
        self.place, *self._rows = (
            piece[: part.nbytes].view(part.dtype).view(part.shape)
            for piece, part in zip(pieces, step.parts, strict=True)
        )

    def find_rows(self, numbers: dict[str, Any]) -> Rows:
        """Anew for each pass: what is derived from them is computed in it."""
        counts, stored, local, pending, decided = self._rows
        return Rows(local, pending, counts, stored, decided, **numbers)

    def fits(self, step: "Step") -> bool:
        """Whether a step is of the same shapes."""
        return self.take(step.inputs) and self._shapes == [part.shape for part in step.parts]

    def take(self, inputs: dict[str, Tensor]) -> bool:
        """Whether a decoder's inputs are of the same shapes and dtypes."""
        return _list_facts(self.inputs) == _list_facts(inputs)

    def write(self, step: "Step") -> None:
        """What the next replay reads, but for `inputs`. Nothing here waits for the device."""
        self._packed.copy_(_pack(step.parts), non_blocking=True)

    def write_inputs(self, inputs: dict[str, Tensor]) -> None:
        """What the decoder is told by the next replay."""
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)

    def advance(self) -> None:
        """On the device: the next token's position, column, window, pending tokens and bulk, in place of this one's. A
        last column has none behind it: a flush is due, and what is here is written anew."""
        counts, _, local, pending, _ = self._rows
        self.place.copy_((self.place + 1).clamp_max(local.shape[3] - 1))
        left = self.place - self._window
        local.index_fill_(3, self.place, True)
        local.index_fill_(3, left, False)
        pending.index_fill_(3, left, True)
        counts.add_(1)
        self.inputs["position_ids"].add_(1)


def _list_facts(inputs: dict[str, Tensor]) -> list[tuple]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()]


def _pack(parts: tuple[Tensor, ...]) -> Tensor:
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    return torch.cat([functional.pad(bytes_of, (0, _count_padding(bytes_of))) for bytes_of in flat])


def _count_padding(part: Tensor) -> int:
    """Bytes behind a tensor, so that the next one begins where Triton's kernels need no variant of their own."""
    return -part.nbytes % ALIGNMENT


@functools.cache
def takes_positions(decoder: Any) -> bool:
    """Whether the forward function of this class is told the position of a token: else the host knows it alone."""
    return "position_ids" in inspect.signature(decoder.forward).parameters


def find_inputs(
    layers: list[Any], decoder: nn.Module, kwargs: dict[str, Any], *, followed: bool, beside: int
) -> dict[str, Tensor] | None:
    """What a decoder is told by its keywords of a step that a graph may hold; None, if none can hold it. `followed`:
    as of `Step.is_followed_by`, so that one has held the step before. `beside`: the newest tokens of a row that other
    layers hold, padding too."""
    given = {name: value for name, value in kwargs.items() if value is not None and name not in CACHE_NAMES}
    inputs = {name: given.pop(name) for name in _INPUTS if name in given}
    mask, tokens = given.pop("attention_mask", None), inputs.get("input_ids", inputs.get("inputs_embeds"))
    asked = given.pop("use_cache", True), given.pop("return_dict", True)
    given.pop("logits_to_keep", None)  # of the head
    if any(value is not False for value in given.values()) or not all(asked) or tokens is None:
        return None
    if not takes_positions(type(decoder)):  # type: ignore[arg-type]  # a class is hashable
        return None
    first = layers[0] if layers else None
    if not isinstance(first, QAdALayer) or first.store is None:
        return None
    store, device, shared = first.store, tokens.device, first.shared
    # Another step moves tokens into the bulk, or may be of a prompt in chunks.
    room = store.window < store.end < min(store.capacity, store.near_keys.shape[2] - store.sinks)
    if not room or tokens.shape[:2] != (store.batch, 1):
        return None
    if first.device != device or not (followed or _are_alike(layers)):
        return None
    if shared.progress.changing or shared.progress.reached < shared.model.layers[-1]:  # interrupted: it is refused
        return None
    if device.type not in GRAPHS or torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
        return None
    if decoder.training or shared.observer is not None or not (followed or _is_allowed(shared)):
        return None
    attention.check_switched_on(shared.model.config)
    padded = first.padding.known.numel() > 0
    if padded and first.padding.known.shape[1] > first.seen - beside:
        return None
    if (mask is not None or padded) and not _shows_all(first, mask):
        return None
    if "position_ids" not in inputs and padded:  # a decoder may make them of padding
        return None
    return inputs


def _are_alike(layers: list[Any]) -> bool:
    """Whether all have tokens, of which the newest are in the same column, on one device, and are in no pass."""
    if any(not isinstance(layer, QAdALayer) or layer.store is None for layer in layers):
        return False
    first = layers[0]
    return all(
        layer.store.end == first.store.end and layer.incoming is None and layer.device == first.device
        for layer in layers
    )


def _is_allowed(shared: Shared) -> bool:
    """Whether a graph can hold what the options and the config ask for."""
    options, config = shared.options, shared.model.config
    if config.output_hidden_states or config.output_attentions:
        return False
    if config._attn_implementation not in (*_ATTENTION, _EAGER):
        return False
    frozen = options.tracks_moments and not options.update_moments  # whose counts are read on the host
    return not frozen and not options.audit_every


def _shows_all(layer: QAdALayer, mask: Any) -> bool:
    """Whether a mask, or those by kinds of layers that models make which read images, show each row's next token, and
    of those before it what is known; others are the model's to read. To look waits for the device."""
    if isinstance(mask, dict):
        masks = [each for each in mask.values() if each is not None]
        if not all(isinstance(each, Tensor) and _shows(layer, each) for each in masks):
            return False
        # Masks of windows do not tell of padding before these.
        return not layer.padding.known.numel() or any(each.shape[-1] == layer.seen + 1 for each in masks)
    return isinstance(mask, Tensor) and mask.dim() == 2 and _shows(layer, mask)


def _shows(layer: QAdALayer, mask: Tensor) -> bool:
    padding, seen = layer.padding, layer.seen + 1
    assert layer.store is not None
    if mask.dim() == 2 and mask.shape != (layer.store.batch, seen):
        return False
    if mask.shape[-1] != seen:  # of a window
        return mask.dim() == 4 and bool((mask if mask.dtype == torch.bool else mask == 0).all())
    if not padding.known.numel() and mask.dim() == 2 and mask.all():
        return True
    told: dict[str, Any] = {"batch": layer.store.batch, "seen": seen, "queries": 1, "first": True}
    return layer.shared.forward_pass.read_padding(padding, mask, **told)[1:] == (None, None)
