"""Telling one checkpoint's weights from another's by a sample of them."""

import hashlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLED = 16  # values of each weight that stand for the whole
_DIGITS = 8  # of either digest

_known: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[tuple], list[str]]]" = weakref.WeakKeyDictionary()


def sample(model: PreTrainedModel) -> list[str]:
    """For every weight, digests of its name, shape and dtype, and of a few values unless they cannot be read.

    Values are not there of a weight that is kept elsewhere, and cannot be read of a tensor class that keeps them to
    itself. A quantised weight stands as the tensors it names as its parts. A weight that is split over processes stands
    as this process's part. Remembered until a weight is replaced or written to, as far as torch counts that: it does
    not for `weight.data`.
    """
    held = model.state_dict(keep_vars=True)
    weights = dict(part for name, weight in held.items() if isinstance(weight, Tensor) for part in _parts(name, weight))
    states = None if any(weight.is_inference() for weight in weights.values()) else _states(weights)
    if states is None or model not in _known or _known[model][0] != states:
        made = _sample(weights)
        if states is None:  # inference tensors do not count writes
            return made
        _known[model] = (states, made)
    return _known[model][1]


def same(one: list[str], other: list[str]) -> bool:
    """Whether two samples are of the same weights, as far as both know them."""
    return len(one) == len(other) and all(
        ours.startswith(theirs) or theirs.startswith(ours) for ours, theirs in zip(one, other, strict=True)
    )


def _parts(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weight by its name, or the tensors that it consists of by names of their own."""
    if hasattr(weight, "to_local"):  # a DTensor: this process's part
        weight = weight.to_local()
    if not hasattr(weight, "__tensor_flatten__"):  # torch's protocol for classes that wrap tensors
        yield name, weight
        return
    inner, _ = weight.__tensor_flatten__()
    for attribute in inner:
        yield from _parts(f"{name}.{attribute}", getattr(weight, attribute))


def _readable(weight: Tensor) -> bool:
    """Whether values can be read by index: not those of weights kept elsewhere, nor of tensor classes with rules of
    their own."""
    own_rules = type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not (own_rules or weight.is_meta or weight.is_quantized) and weight.layout is torch.strided


def _states(weights: dict[str, Tensor]) -> list[tuple]:
    return [
        (name, weight.data_ptr() if _readable(weight) else 0, weight._version, weight.dtype, weight.shape)
        for name, weight in weights.items()
    ]


@torch.no_grad()
def _sample(weights: dict[str, Tensor]) -> list[str]:
    read: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, weight in weights.items():
        if not weight.numel() or not _readable(weight):
            continue
        index = torch.linspace(0, weight.numel() - 1, min(SAMPLED, weight.numel()), device=weight.device).long()
        places = torch.unravel_index(index, weight.shape) if weight.dim() else ()
        try:
            with torch._C.DisableTorchFunctionSubclass():  # the plain tensor of a Parameter's subclass
                found = weight.detach()[places].reshape(-1).float()
        except NotImplementedError:  # torch indexes no tensors of dtypes smaller than a byte
            continue
        read.setdefault(weight.device, []).append((name, found))
    values: dict[str, Tensor] = {}
    for entries in read.values():  # one transfer for each device
        parts = torch.cat([part for _, part in entries]).cpu().split([len(part) for _, part in entries])
        values |= {name: part for (name, _), part in zip(entries, parts, strict=True)}
    return [
        _digest(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        + (_digest(values[name].numpy().tobytes()) if name in values else "")
        for name, weight in weights.items()
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
