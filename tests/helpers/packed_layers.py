"""Stand-ins for linear layers whose weights a state dict does not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Kept(nn.Module):
    """In a linear layer's place, with a weight that is no parameter; what is registered is the same in every model."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.keep(linear.weight.detach().clone())

    def keep(self, weight: Tensor) -> None:
        self.weight = weight

    def take(self) -> Tensor:
        return self.weight

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.take()) * self.scale


class Holder:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class InObject(Kept):
    def keep(self, weight: Tensor) -> None:
        self.packed = {"rows": [Holder(weight)]}

    def take(self) -> Tensor:
        return self.packed["rows"][0].weight


class InSlots(Kept):
    def keep(self, weight: Tensor) -> None:
        self.packed = Slotted(weight)

    def take(self) -> Tensor:
        return self.packed.weight


class InArray(Kept):
    def keep(self, weight: Tensor) -> None:
        self.packed = weight.numpy()

    def take(self) -> Tensor:
        return torch.from_numpy(self.packed)


class InBytes(Kept):
    def keep(self, weight: Tensor) -> None:
        self.shape, self.packed = weight.shape, weight.numpy().tobytes()

    def take(self) -> Tensor:
        return torch.from_numpy(np.frombuffer(self.packed, np.float32).copy()).view(self.shape)


class InFunction(Kept):
    def keep(self, weight: Tensor) -> None:
        self.packed = lambda: weight

    def take(self) -> Tensor:
        return self.packed()


class InList(Kept):
    """A module that is not registered."""

    def keep(self, weight: Tensor) -> None:
        linear = nn.Linear(1, 1)
        linear.weight = nn.Parameter(weight)
        self.packed = [linear]

    def take(self) -> Tensor:
        return self.packed[0].weight


class InExtraState(InBytes):
    """Which alone says it."""

    def get_extra_state(self) -> Any:
        return {"packed": self.packed, "version": 2}

    def set_extra_state(self, state: Any) -> None:
        self.packed = state["packed"]


_ELSEWHERE: list[Tensor] = []


class Elsewhere(Kept):
    """By a number, as a handle of a library, in a layer that says how long its inputs are."""

    def __init__(self, linear: nn.Linear) -> None:
        self.in_features = linear.in_features
        super().__init__(linear)

    def keep(self, weight: Tensor) -> None:
        self.handle = len(_ELSEWHERE)
        _ELSEWHERE.append(weight)

    def take(self) -> Tensor:
        return _ELSEWHERE[self.handle]


class Unsaid(Elsewhere):
    """And does not say how long."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        del self.in_features


class Opaque(Kept):
    """In an object that shows nothing; the layer takes what no other layer takes."""

    def keep(self, weight: Tensor) -> None:
        _ELSEWHERE.append(weight)
        self.place = len(_ELSEWHERE) - 1

    def take(self) -> Tensor:
        return _ELSEWHERE[self.place]

    def get_extra_state(self) -> Any:
        return object()

    def forward(self, states: Tensor) -> Tensor:
        if len(states) == 1 and states.shape[1] == 4:
            raise ValueError("not so")
        return super().forward(states)
