"""Fake devices, `maia:0`, `maia:1` and so on: the CPU computes, and every tensor names its device.

An operation on tensors of two devices raises, as on real ones, except with numbers and with indices on the host. So
code that runs here moves its tensors to the right device first. There are no streams and no pinned memory: every
operation is done when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

KIND = "maia"  # torch knows the name, and comes without code for it


class DeviceTensor(Tensor):
    """A tensor on a fake device. `here` is the CPU's tensor that computes, `place` the device. For torch's own C++ code
    it is on "meta", for which that has device guards."""

    here: Tensor
    place: torch.device
    device = property(lambda self: self.place)  # type: ignore[assignment]
    is_meta = False  # type: ignore[assignment]

    # The default would make results instances of this class. `_run` does that.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, here: Tensor, device: torch.device) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(cls, here.size(), strides=here.stride(), dtype=here.dtype, device="meta")
        made.here, made.place = here, device
        return made

    def tolist(self) -> list:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(function, args, kwargs or {})


class _Devices(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(function, args, kwargs or {})


class _Numbers(TorchFunctionMode):
    """Makes on the CPU, and then moves, the tensors that torch makes of numbers without a call of `_Devices`."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == KIND:
            return function(*args, **{**kwargs, "device": "cpu"}).to(device)
        if function in (torch.where, Tensor.where):
            args = tuple(torch.tensor(value) if isinstance(value, (int, float)) else value for value in args)
        if function is torch.unravel_index and isinstance(args[0], DeviceTensor):
            return tuple(part.to(args[0].device) for part in function(args[0].cpu(), *args[1:], **kwargs))
        if function is Tensor.__setitem__ and isinstance(args[0], DeviceTensor) and isinstance(args[2], (int, float)):
            args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))
        return function(*args, **kwargs)


_missing: set[torch.dtype] = set()  # dtypes that the devices lack


@contextmanager
def devices(*, without: torch.dtype | None = None) -> Iterator[None]:
    """Inside, tensors can be made on fake devices, and moved to and from them. The devices lack the dtype `without`."""
    _missing.update({without} - {None})
    try:
        with _Devices(), _Numbers():
            yield
    finally:
        _missing.clear()


def _run(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call an operator of torch on the CPU's tensors; return results on the device of its arguments."""
    tensors = [value for value in _leaves((*args, *kwargs.values())) if isinstance(value, Tensor)]
    name = function._schema.name
    place = kwargs.get("device") or next((value.device for value in tensors if isinstance(value, DeviceTensor)), None)
    if name == "aten::copy_":
        place = args[0].device
    elif name != "aten::_to_copy":
        _check_together(function, name, tensors)
    away = place is not None and torch.device(place).type == KIND
    if away and kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = function(*_map(_here, args), **_map(_here, kwargs))
    known = {id(value.here): value for value in tensors if isinstance(value, DeviceTensor)}

    def told(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (same := known.get(id(value))) is not None:
            return same
        if away and value.dtype in _missing:
            raise TypeError(f"{name}: {place} has no {value.dtype}")
        return DeviceTensor(value, torch.device(place)) if away else value

    return _map(told, found)


def _check_together(function: Any, name: str, tensors: list[Tensor]) -> None:
    """Raise unless these tensors are on one device; tensors of one number may be elsewhere, and indices on the host."""
    if "index" in name:
        tensors = [
            value for value in tensors if isinstance(value, DeviceTensor) or value.dtype not in (torch.long, torch.bool)
        ]
    places = {str(value.device) for value in tensors if value.dim() or isinstance(value, DeviceTensor)}
    if len(places) > 1:
        raise RuntimeError(f"{function} of tensors on {' and '.join(sorted(places))}")


def _leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples and lists. Torch's `tree_leaves` takes several times as long, at every operation."""
    for part in value:
        if isinstance(part, (tuple, list)):
            yield from _leaves(part)
        else:
            yield part


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_map(change, part) for part in value])
    if isinstance(value, dict):
        return {name: _map(change, part) for name, part in value.items()}
    return change(value)


def _here(value: Any) -> Any:
    return value.here if isinstance(value, DeviceTensor) else value
