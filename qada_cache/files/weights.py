"""Telling one checkpoint's weights from another's by a sample of them."""

import hashlib
import weakref

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLED = 16  # values of each weight that stand for the whole
_DIGITS = 8  # of either digest

_known: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[tuple], list[str]]]" = weakref.WeakKeyDictionary()


def sample(model: PreTrainedModel) -> list[str]:
    """For every weight, digests of its name, shape and dtype, and of a few values unless it is kept elsewhere.

    Of a weight that is split over processes, of this part. Remembered until a weight is replaced or written to, as far
    as torch counts that: it does not for `weight.data`.
    """
    held = model.state_dict(keep_vars=True)
    weights = {name: _here(weight) for name, weight in held.items() if isinstance(weight, Tensor)}
    states = None if any(weight.is_inference() for weight in weights.values()) else _states(weights)
    if states is None or model not in _known or _known[model][0] != states:
        made = _sample(weights)
        if states is None:  # inference tensors do not count what is written to them
            return made
        _known[model] = (states, made)
    return _known[model][1]


def same(one: list[str], other: list[str]) -> bool:
    """Whether two samples are of the same weights, as far as both know them."""
    return len(one) == len(other) and all(
        ours.startswith(theirs) or theirs.startswith(ours) for ours, theirs in zip(one, other, strict=True)
    )


def _here(weight: Tensor) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight  # a DTensor's part


def _states(weights: dict[str, Tensor]) -> list[tuple]:
    return [
        (name, 0 if weight.is_meta else weight.data_ptr(), weight._version, weight.dtype, weight.shape)
        for name, weight in weights.items()
    ]


@torch.no_grad()
def _sample(weights: dict[str, Tensor]) -> list[str]:
    read: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, weight in weights.items():
        if weight.is_meta or not weight.numel():  # kept elsewhere by accelerate
            continue
        index = torch.linspace(0, weight.numel() - 1, min(SAMPLED, weight.numel()), device=weight.device).long()
        places = torch.unravel_index(index, weight.shape) if weight.dim() else ()
        read.setdefault(weight.device, []).append((name, weight.detach()[places].reshape(-1).float()))
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
