"""Finds the states that transformers' linear layers write in a pass, as far as writes can be seen."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from . import Visit


def list_states(layer: Any) -> dict[Hashable, Tensor | None]:
    """The states of a linear layer, by the calls that write them; none for other layers."""
    kinds = {"conv": getattr(layer, "conv_states", {}), "recurrent": getattr(layer, "recurrent_states", {})}
    return {(kind, index): state for kind, states in kinds.items() for index, state in states.items()}


def count_writes(layer: Any) -> dict[Hashable, int]:
    """How often each state was written to in place, as far as torch counts that: not in tensors made in inference mode,
    and no writes by other libraries' kernels."""
    states = list_states(layer).items()
    return {name: state._version for name, state in states if state is not None and not state.is_inference()}


def find_written(layer: Any, visit: Visit) -> set[Hashable]:
    """The states that a linear layer has visibly written in a pass, by calls or in place, and its keys."""
    in_place = {name for name, now in count_writes(layer).items() if visit.versions.get(name, now) != now}
    return in_place | (visit.calls & {"keys", *list_states(layer)})
