"""Stand-ins for linear layers whose weights are not in a state dict, as in libraries that pack or quantise them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Kept(nn.Module):
    """Takes a linear layer's place, with its weight in no parameter and no buffer. Its one buffer is the same in every
    model. Subclasses say where the weight lies: `keep` puts it there, `take` gets it."""

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
    """The weight lies in a module that is in a list, and so not registered."""

    def keep(self, weight: Tensor) -> None:
        linear = nn.Linear(1, 1)
        linear.weight = nn.Parameter(weight)
        self.packed = [linear]

    def take(self) -> Tensor:
        return self.packed[0].weight


class InExtraState(InBytes):
    """The weight lies in bytes, and the layer's extra state has these bytes."""

    def get_extra_state(self) -> Any:
        return {"packed": self.packed, "version": 2}

    def set_extra_state(self, state: Any) -> None:
        self.packed = state["packed"]


_ELSEWHERE: list[Tensor] = []


class Elsewhere(Kept):
    """The layer has a number alone, as the handle of a library that keeps the weight, and `in_features`."""

    def __init__(self, linear: nn.Linear) -> None:
        self.in_features = linear.in_features
        super().__init__(linear)

    def keep(self, weight: Tensor) -> None:
        self.handle = len(_ELSEWHERE)
        _ELSEWHERE.append(weight)

    def take(self) -> Tensor:
        return _ELSEWHERE[self.handle]


class Unsaid(Elsewhere):
    """As `Elsewhere`, without `in_features`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        del self.in_features


class Opaque(Kept):
    """As `Elsewhere`, and the extra state is an object without content. The layer refuses inputs `[1, 4]`."""

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
