"""Finds the states that transformers' linear layers write in a pass, as far as writes can be seen."""

from collections.abc import Hashable, Mapping, Sequence
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


def find_kind(layers: Sequence[Any], config: Any, index: int) -> tuple[type, Hashable]:
    """A key that is the same for layers that write the same states: the class, and the config's type."""
    types = getattr(config, "layer_types", None)
    return type(layers[index]), types[index] if types else index


def find_expected(layers: Sequence[Any], config: Any, visits: Mapping[int, Visit], last: int) -> set[Hashable]:
    """The states that the last layer is to write in a pass which has just come to it: those that visited layers of its
    kind have written. Later they cannot be told from the next pass's, which may write before its first call."""
    kind = find_kind(layers, config, last)
    alike = (index for index in visits if index != last and find_kind(layers, config, index) == kind)
    return set().union(*(find_written(layers[index], visits[index]) for index in alike))
