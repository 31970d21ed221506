"""Lists what a model's modules hold: tensors that can be read, other contents, and modules that can only be asked.

State dicts say most of it. They do not have weights that are packed into an object, or kept as a plain attribute.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

SAMPLED = 4096  # about so many elements, evenly spaced, stand for contents that are no tensor
_FEWEST = 64  # values: smaller attributes are no layer's weights
_DEEPEST = 4  # levels of nested attributes that are searched
_SCALARS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)
# Modules of these packages register what they hold, or put it into their state. Some integrations take it out again.
_REGISTERING = re.compile(r"(torch\.nn|transformers(?!\.integrations)|peft|bitsandbytes)(\.|$)")
_SHARED = ("torch", "transformers", "tokenizers", "accelerate", "huggingface_hub", "numpy")  # hold nobody's weights
_COMMON = frozenset(vars(nn.Module()))
# Names of attributes that are computed from config and text, and so are no weights.
_DERIVED = re.compile(r"(^|_)(cos|sin|freqs?|rope|rotary|masks?|cached?|positions?|alibi)(_|$)")


class Contents:
    """The contents of one model, in the order of its state dict."""

    def __init__(self, model: nn.Module) -> None:
        self.weights: dict[str, Tensor] = {}
        self.others: dict[str, bytes] = {}
        self.closed: dict[str, bool] = {}  # paths of modules to ask, and whether there is something unreadable in them
        self._paths = dict(model.named_modules(remove_duplicate=False))
        self._registered = set(map(id, self._paths.values()))
        for path, module in self._paths.items():
            self._take_module(path, module)

    def _take_module(self, path: str, module: nn.Module) -> None:
        own = vars(module)
        if any(isinstance(value, torch.ScriptObject) for value in own.values()):
            self._close(path)  # its state would be a copy of all that is packed
            return
        prefix, state = f"{path}." if path else "", dict[str, Any]()
        module._save_to_state_dict(state, prefix, True)  # as `state_dict`, without hooks that change it
        for name, value in state.items():
            self._take(path, name, value)
        if _lacks_weights(module):
            self._close(path)
        if not _REGISTERING.match(type(module).__module__):
            self._take_attributes(path, prefix, module)
            if self._stands_in(path, module):
                self.closed.setdefault(path, False)
        elif isinstance(module, nn.Linear | nn.Embedding):
            for name, value in own.items():  # a weight that was put in the place of a registered one
                if isinstance(value, Tensor) and not any(each.startswith(f"{name}_") for each in module._parameters):
                    self._take(path, prefix + name, value)

    def _stands_in(self, path: str, module: nn.Module) -> bool:
        """Whether a module comes from another package than the module around it, as from one that packs weights, and
        shows fewer than `_FEWEST` values of weights."""
        parent_path, parent = path, module
        while parent_path and (parent is module or type(parent).__module__.startswith("torch.nn.")):
            parent_path = parent_path.rpartition(".")[0]
            parent = self._paths.get(parent_path, module)
        if module._modules or len({type(part).__module__.partition(".")[0] for part in (module, parent)}) == 1:
            return False
        return sum(weight.numel() for name, weight in self.weights.items() if name.startswith(f"{path}.")) < _FEWEST

    def _take_attributes(self, path: str, prefix: str, module: nn.Module) -> None:
        """Add the attributes of a module whose class is unknown here, and its buffers that no state dict has."""
        attributes = {name: value for name, value in vars(module).items() if name not in _COMMON}
        if not module._modules and not module._parameters:
            attributes |= {name: module._buffers[name] for name in module._non_persistent_buffers_set}
        for name, value in attributes.items():
            if not _DERIVED.search(name):
                self._find_hidden(path, prefix + name, value, 0)

    def _find_hidden(self, path: str, name: str, value: Any, depth: int) -> None:
        """Take the tensors and bytes of an attribute, also those in containers, objects and functions that it holds."""
        if isinstance(value, (Tensor, torch.ScriptObject)) or _has_bytes(value):
            self._take(path, name, value)
        elif isinstance(value, nn.Module):
            if id(value) not in self._registered:
                self._registered.add(id(value))
                for each, module in value.named_modules():
                    self._take_module(f"{name}.{each}".removesuffix("."), module)
        elif depth < _DEEPEST and (items := _list_items(value)) is not None:
            for each, item in items:
                self._find_hidden(path, f"{name}.{each}", item, depth + 1)
        elif depth < _DEEPEST:
            self._close(path)

    def _take(self, path: str, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            for part, weight in _list_parts(name, value):
                found = self._find_offloaded(part) if weight.is_meta else None
                found = weight if found is None else found.to(weight.dtype)
                self.weights[part] = found
                if found.numel() and not is_readable(found):
                    self._close(path)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._take(path, f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            for index, item in enumerate(value):
                self._take(path, f"{name}.{index}", item)
        elif _has_bytes(value):
            view = memoryview(value)
            whole = np.asarray(view).reshape(-1)
            self.others[name] = f"{view.shape} {view.format}".encode() + whole[:: 1 + len(whole) // SAMPLED].tobytes()
        elif isinstance(value, _SCALARS):
            self.others[name] = repr(value).encode()
        elif value is not None:
            self._close(path)

    def _find_offloaded(self, name: str) -> Tensor | None:
        """The weight `name` from accelerate's map of offloaded weights; None if it is in none."""
        path = name
        while path:
            path = path.rpartition(".")[0]
            hook = getattr(self._paths.get(path), "_hf_hook", None)
            for part in getattr(hook, "hooks", [hook]):
                try:
                    return part.weights_map[name.removeprefix(f"{path}.")]
                except (AttributeError, KeyError, TypeError):  # no such hook, or not of this weight
                    continue
        return None

    def _close(self, path: str) -> None:
        self.closed[path] = True


def find_width(module: nn.Module) -> int | None:
    """The size of a linear layer's inputs; None if the module does not say so."""
    found = (getattr(module, name, None) for name in ("in_features", "infeatures"))
    return next((width for width in found if type(width) is int), None)


def _lacks_weights(module: nn.Module) -> bool:
    """Whether a layer says how long its inputs are, but neither it nor a module in it registers a tensor large enough
    for its weights: they take at least two bits each, in words of 32 bits."""
    if (width := find_width(module)) is None:
        return False
    outputs = getattr(module, "out_features", None)
    outputs = outputs if type(outputs) is int else width
    fewest = min(width * outputs, max(width * outputs // 16, width + 1, outputs + 1))
    return not any(part.numel() >= fewest for part in (*module.parameters(), *module.buffers()))


def is_readable(weight: Tensor) -> bool:
    """Whether a weight's values are in memory, and torch itself reads them by index."""
    own_rules = type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not (own_rules or weight.is_meta or weight.is_quantized) and weight.layout is torch.strided


def _list_parts(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A weight and its name; or the tensors that it consists of, each with a name of its own."""
    if hasattr(weight, "to_local"):  # a DTensor: this process's part
        weight = weight.to_local()
    if not hasattr(weight, "__tensor_flatten__"):  # torch's protocol for classes that wrap tensors
        yield name, weight
        return
    inner, _ = weight.__tensor_flatten__()
    for attribute in inner:
        yield from _list_parts(f"{name}.{attribute}", getattr(weight, attribute))


def _has_bytes(value: Any) -> bool:
    """Whether `value` exposes its bytes to Python's `memoryview`, as arrays do, and holds no Python objects."""
    try:
        return not memoryview(value).format.startswith("O")
    except (BufferError, TypeError, ValueError):
        return False


def _list_items(value: Any) -> list[tuple[Any, Any]] | None:
    """Names and values that a container, an object or a function holds; None if it does not show them."""
    if isinstance(value, partial):
        return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    if isinstance(value, MethodType):
        return [("self", value.__self__)]
    if isinstance(value, FunctionType):
        return [(index, cell.cell_contents) for index, cell in enumerate(value.__closure__ or ()) if _is_filled(cell)]
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (Sequence, Set)) and not isinstance(value, str):
        return list(enumerate(value))
    package = type(value).__module__.partition(".")[0]
    if isinstance(value, (type, PreTrainedConfig)) or package in _SHARED or package in sys.stdlib_module_names:
        return []
    slots = [name for kind in type(value).__mro__ for name in _as_names(vars(kind).get("__slots__", ()))]
    shown = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    if not hasattr(value, "__dict__") and not slots:
        return None
    return shown + list(getattr(value, "__dict__", {}).items())


def _as_names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))


def _is_filled(cell: Any) -> bool:
    return cell != CellType()  # an empty one has no contents, and equals another empty one
