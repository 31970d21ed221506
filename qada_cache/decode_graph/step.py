"""One decode step: whether a graph can hold it, and what differs between it and the next."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..attention import forward as attention
from ..kernels.operands import Rows
from ..state.forward_pass import describe_rows
from ..state.layer import QAdALayer
from ..storage import TokenStore
from ..versions import CACHE_NAMES
from .capturing import GRAPHS

_INPUTS = ("input_ids", "inputs_embeds", "position_ids")  # of a decoder, that differ from step to step
ALIGNMENT = 16  # bytes, of tensors side by side
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")  # which make no mask for a single token


class Step:
    """One decode step, as far as the host knows it before it is computed."""

    def __init__(self, layers: list[QAdALayer], inputs: dict[str, Tensor]) -> None:
        self.layers, self.inputs, self.shared = layers, inputs, layers[0].shared
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
        place = torch.tensor([store.sinks + store.end], device="cpu")
        self.parts = place, counts, stored, local, pending, decided

    @property
    def bound(self) -> list[Any]:
        """The operands of all layers' kernels, weakly; empty, if torch computes one, or if it was a turn."""
        known = [layer.last_step.known for layer in self.layers]
        served = all(each is not None and each.kernel is not None and each.queries == 1 for each in known)
        return [weakref.ref(each.operands) for each in known] if served else []

    @contextlib.contextmanager
    def use(self, places: "Places") -> Iterator[None]:
        """Have a pass meanwhile take what differs from these."""
        self.shared.forward_pass.given = places.find_rows(self.numbers)
        for store in self.stores:
            store.place = places.place
        try:
            yield
        finally:
            self.shared.forward_pass.given = None
            for store in self.stores:
                store.place = None

    def advance(self) -> None:
        """Count what a replay of it has added."""
        decisions, dense_tokens = self.numbers["decisions"], self.numbers["dense_tokens"]
        for layer, store in zip(self.layers, self.stores, strict=True):
            layer.seen += 1
            store.end += 1
            store.lengthen(1, None, exact=False)
            layer.counters.count_call(decisions, dense_tokens * store.near_keys.shape[1] * store.bulk.token_bytes)


class Places:
    """What differs between steps, in tensors that stay where they are: what the decoder is told, the tensors of `Rows`,
    and the column that the new token goes to."""

    def __init__(self, step: "Step") -> None:
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
        mine, others = (
            [(name, each.shape, each.dtype) for name, each in inputs.items()] for inputs in (self.inputs, step.inputs)
        )
        return mine == others and self._shapes == [part.shape for part in step.parts]

    def write(self, step: "Step") -> None:
        """What the next replay reads. Nothing here waits for the device."""
        for name, tensor in step.inputs.items():
            self.inputs[name].copy_(tensor)
        self._packed.copy_(_pack(step.parts), non_blocking=True)


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


def find_step(layers: list[Any], decoder: nn.Module, kwargs: dict[str, Any]) -> Step | None:
    """The step that a decoder is asked for by its keywords; None, if a graph cannot hold it."""
    given = {name: value for name, value in kwargs.items() if value is not None and name not in CACHE_NAMES}
    inputs = {name: given.pop(name) for name in _INPUTS if name in given}
    mask, tokens = given.pop("attention_mask", None), inputs.get("input_ids", inputs.get("inputs_embeds"))
    asked = given.pop("use_cache", True), given.pop("return_dict", True)
    if any(value is not False for value in given.values()) or not all(asked) or tokens is None:
        return None
    if not takes_positions(type(decoder)):  # type: ignore[arg-type]  # a class is hashable
        return None
    if not layers or not all(isinstance(layer, QAdALayer) and layer.store is not None for layer in layers):
        return None
    first, store, device = layers[0], layers[0].store, tokens.device
    config, options, shared = first.shared.model.config, first.options, first.shared
    if tokens.shape[:2] != (store.batch, 1) or any(layer.device != device for layer in layers):
        return None
    # Another step moves tokens into the bulk, or may be of a prompt in chunks.
    room = store.window < store.end < min(store.capacity, store.near_keys.shape[2] - store.sinks)
    if not room or any(layer.store.end != store.end or layer.incoming is not None for layer in layers):
        return None
    if shared.progress.changing or shared.progress.reached != layers[-1].index:  # interrupted: it is refused
        return None
    if device.type not in GRAPHS or torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
        return None
    if decoder.training or config.output_hidden_states or config.output_attentions:
        return None
    if config._attn_implementation not in _ATTENTION:
        return None
    frozen = options.tracks_moments and not options.update_moments  # whose counts are read on the host
    if frozen or options.audit_every or shared.observer is not None:
        return None
    attention.check_switched_on(config)
    if mask is not None or first.padding.known.numel():
        # Of its shape, or it is the model's to read.
        if not isinstance(mask, Tensor) or mask.shape != (store.batch, first.seen + 1):
            return None
        told = {"batch": store.batch, "seen": first.seen + 1, "queries": 1, "first": True}
        if shared.forward_pass.read_padding(first.padding, mask, **told)[1:] != (None, None):
            return None
    if "position_ids" not in inputs:  # what a decoder makes itself, unless it makes them of padding
        if first.padding.known.numel():
            return None
        inputs["position_ids"] = torch.full((1, 1), first.seen, device=device)
    step = Step(layers, inputs)
    return step if step.numbers["decisions"] == store.batch else None
