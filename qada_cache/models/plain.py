"""Copies of a model's modules that share its weights and run no hooks: they compute what the weights alone define.

A forward pass that the user did not ask for runs on the copy. The model itself does not change, so other threads may
call it meanwhile, with its hooks. Whatever a pass leaves in modules, rotary frequencies for one, stays in the copy.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from . import rope_deltas

# Libraries that offload, split or pack weights: without their hooks a model computes something else, or nothing.
_LAYOUT = (
    *("accelerate", "auto_round", "bitsandbytes", "compressed_tensors", "deepspeed", "gptqmodel", "hqq", "optimum"),
    *("peft", "quark", "torch.ao", "torch.distributed", "torch.nn.utils", "torchao", "transformers.distributed"),
    *("transformers.integrations", "transformers.utils.output_capturing"),
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FUNCTIONS = (FunctionType, MethodType, partial)
_Part = TypeVar("_Part", bound=nn.Module)


@contextmanager
def make_plain(model: _Part) -> Iterator[tuple[_Part, list[str]]]:
    """A copy of a model, or of a part of it, in evaluation mode. Its modules are new; weights and config are shared.

    It runs no hooks of modules, no global hooks of torch, and no functions that replace a module's. It does run those
    of libraries in `_LAYOUT`, as accelerate's. The second value names other functions that it runs as well, as nobody
    can tell what their modules compute without them.
    """
    copier = _Copier()
    try:
        yield copier.copy_module(model), copier.left
    finally:
        copier.clear()


class _Copier:
    """Copies modules, and containers and functions that refer to modules, each once."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self._copies: dict[int, tuple[Any, Any]] = {}  # by the original's id: original and copy

    def clear(self) -> None:
        """Drop references to the weights at once: a copy that refers to itself by a function would keep them until a
        garbage collection."""
        for original, copy in self._copies.values():
            if isinstance(copy, nn.Module) and copy is not original:
                vars(copy).clear()
        self._copies.clear()

    def copy_module(self, module: Any) -> Any:
        if id(module) in self._copies:
            return self._copies[id(module)][1]
        if isinstance(module, OptimizedModule):
            return self.copy_module(module._orig_mod)
        if isinstance(module, torch.jit.ScriptModule):  # its state is C++'s, and its hooks may be compiled into it
            self._copies[id(module)] = module, module
            self.left += [f"hooks of {type(module).__name__}"] * any(getattr(module, name, None) for name in _HOOKS[:2])
            return module
        copy = object.__new__(type(module))
        self._copies[id(module)] = module, copy
        attributes = dict(vars(module))  # at once, as other threads may change them
        attributes.pop("_compiled_call_impl", None)
        state = vars(copy)
        forward = attributes.pop("forward", None)
        if placed := attributes.get("_hf_hook"):  # accelerate's, whose function replaces the module's `forward`
            forward = attributes.pop("_old_forward", None)
        for name, value in attributes.items():
            if name in _HOOKS:
                hooks = {key: self._copy(hook) for key, hook in dict(value).items() if _lays_out(hook)}
                state[name] = OrderedDict(hooks if "forward" in name else {})
            elif isinstance(value, _FUNCTIONS) and callable(getattr(type(module), name, None)):
                if (replaced := self._find_function(module, name, value)) is not None:
                    state[name] = replaced
            else:
                state[name] = value if name == "_hf_hook" else self._copy(value)
        if rope_deltas.NAME in state:  # they belong to the text that the model read last
            state[rope_deltas.NAME] = None
        # A forward pass may write to buffers that are derived from the config, as to rotary frequencies.
        derived = attributes["_non_persistent_buffers_set"]
        for name, buffer in state["_buffers"].items():
            if name in derived and type(buffer) is Tensor:
                state["_buffers"][name] = buffer.detach().clone()
        forward = self._find_function(module, "forward", forward)
        if placed is not None:
            forward = MethodType(type(module).forward, copy) if forward is None else forward
            all_hooks = getattr(placed, "hooks", [placed])
            accelerates = [hook for hook in all_hooks if _find_module(type(hook)) == "accelerate"]
            forward = update_wrapper(partial(_run_placed, accelerates, copy, forward), type(module).forward)
        if forward is not None:
            state["forward"] = forward
        state["training"] = False
        state["_compiled_call_impl"] = partial(_call, copy)
        return copy

    def _find_function(self, module: nn.Module, name: str, function: Any) -> Any:
        """The function of the copy that replaces the class's `name`; None: the class's runs."""
        if function is None:
            return None
        method = isinstance(function, MethodType) and function.__self__ is module
        if method and any(function.__func__ in vars(kind).values() for kind in type(module).__mro__):
            return self._copy(function)  # a method that the module itself put there
        if not _lays_out(function):
            weights = [*module._parameters.values(), *module._buffers.values()]
            packed = any(weight is not None and not weight.is_floating_point() for weight in weights)
            origin = find_origin(function)
            by_model = origin in {kind.__module__ for kind in type(module).__mro__} and not _is_library(origin)
            if not (packed or by_model):
                return None
            self.left.append(f"{type(module).__name__}.{name}")  # it may unpack weights, or be part of the model
        return self._copy(function)

    def _copy(self, value: Any) -> Any:
        """`value`, with each module in it replaced by its copy: modules in containers, closures and methods."""
        kind = type(value)
        if isinstance(value, nn.Module):
            return self.copy_module(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.copy_module(value.__self__))
        if kind not in (list, tuple, dict, OrderedDict, partial, FunctionType):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        copy: Any
        if kind is list:
            self._copies[id(value)] = value, (copy := [])
            copy += map(self._copy, list(value))
        elif kind in (dict, OrderedDict):
            self._copies[id(value)] = value, (copy := kind())
            copy.update((key, self._copy(item)) for key, item in list(value.items()))
        elif kind is tuple:
            copy = tuple(map(self._copy, value))
        elif kind is partial:
            copy = partial(self._copy(value.func), *map(self._copy, value.args), **self._copy(value.keywords))
        else:
            copy = self._copy_function(value)
        self._copies[id(value)] = value, copy
        return copy

    def _copy_function(self, function: FunctionType) -> FunctionType:
        """A function whose closure has copies instead of modules; the function itself if its closure has no module."""
        if hasattr(function, "_torchdynamo_orig_callable"):  # of `torch.compile`
            return self._copy(function._torchdynamo_orig_callable)
        self._copies[id(function)] = function, function  # now, as functions may refer to each other
        cells = [cell for cell in function.__closure__ or () if cell != CellType()]  # those that are not empty
        copies = {id(cell): self._copy(cell.cell_contents) for cell in cells}
        if all(copies[id(cell)] is cell.cell_contents for cell in cells):
            return function
        if _lays_out(function):  # it may wrap a user's function
            wrapped = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, _FUNCTIONS)]
            self.left += [each for each in map(find_origin, wrapped) if not _is_library(each)]
        closure = tuple(
            CellType(copies[id(cell)]) if id(cell) in copies else cell for cell in function.__closure__ or ()
        )
        copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
        copy.__kwdefaults__ = function.__kwdefaults__
        vars(copy).update(vars(function))
        return copy


def _find_module(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _lays_out(function: Any) -> bool:
    """Whether a hook or function comes from a library in `_LAYOUT`. Its globals tell, not its `__module__`: a user's
    wrapper copies that from the wrapped function by `functools.wraps`."""
    name = find_origin(function)
    return not isinstance(function, nn.Module) and any(name == each or name.startswith(f"{each}.") for each in _LAYOUT)


def find_origin(function: Any) -> str:
    """The name of the Python module that has its code."""
    while isinstance(function, (MethodType, partial)):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    where = getattr(function, "__globals__", None)
    return str(type(function).__module__ if where is None else where.get("__name__"))


def _is_library(name: str) -> bool:
    return name.partition(".")[0] in {"builtins", *(each.partition(".")[0] for each in _LAYOUT)}


def _run_placed(
    hooks: Sequence[Any], module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a module as accelerate does: its hooks load the weights where the inputs are, and free them again."""
    for hook in hooks:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
    output = forward(*args, **kwargs)
    for hook in hooks:
        output = hook.post_forward(module, output)
    return output


def _call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module as torch does, but without global hooks."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if key in module._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        elif (given := hook(module, args)) is not None:
            args = given if isinstance(given, tuple) else (given,)
    output = module.forward(*args, **kwargs)
    for key, hook in list(module._forward_hooks.items()):
        more = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
        replaced = hook(module, args, *more, output)
        output = output if replaced is None else replaced
    return output
