"""A model as its weights alone make it: a copy of its modules that shares the weights, and runs nobody's hooks.

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

# Code that lays weights out, splits or packs them: with its hooks left out, a model computes something else or nothing.
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

    Hooks do not run on it: modules' own, torch's global ones, functions that somebody put in the place of a module's.
    Those that lay weights out do, as accelerate's. The second value names functions that were left, because it is not
    known what their modules compute without.
    """
    copier = _Copier()
    try:
        yield copier.copy_module(model), copier.left
    finally:
        copier.clear()


class _Copier:
    """Copies modules, and what refers to them, each once."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self._made: dict[int, tuple[Any, Any]] = {}  # by the original's id: original and copy

    def clear(self) -> None:
        """Let go of the weights: a module that holds a function of its own is freed only by garbage collection."""
        for original, made in self._made.values():
            if isinstance(made, nn.Module) and made is not original:
                vars(made).clear()
        self._made.clear()

    def copy_module(self, module: Any) -> Any:
        if id(module) in self._made:
            return self._made[id(module)][1]
        if isinstance(module, OptimizedModule):
            return self.copy_module(module._orig_mod)
        if isinstance(module, torch.jit.ScriptModule):  # its state is C++'s, and its hooks may be compiled into it
            self._made[id(module)] = module, module
            self.left += [f"hooks of {type(module).__name__}"] * any(getattr(module, name, None) for name in _HOOKS[:2])
            return module
        made = object.__new__(type(module))
        self._made[id(module)] = module, made
        own = dict(vars(module))  # at once, as other threads may change it
        own.pop("_compiled_call_impl", None)
        state = vars(made)
        forward = own.pop("forward", None)
        if placed := own.get("_hf_hook"):  # of accelerate, whose function stands in the place of this one
            forward = own.pop("_old_forward", None)
        for name, value in own.items():
            if name in _HOOKS:
                kept = {key: self._copy(hook) for key, hook in dict(value).items() if _lays_out(hook)}
                state[name] = OrderedDict(kept if "forward" in name else {})
            elif isinstance(value, _FUNCTIONS) and callable(getattr(type(module), name, None)):
                if (replaced := self._find_function(module, name, value)) is not None:
                    state[name] = replaced
            else:
                state[name] = value if name == "_hf_hook" else self._copy(value)
        if rope_deltas.NAME in state:  # which is another text's
            state[rope_deltas.NAME] = None
        # A forward pass may write to what is derived from the config, as to rotary frequencies.
        derived = own["_non_persistent_buffers_set"]
        for name, buffer in state["_buffers"].items():
            if name in derived and type(buffer) is Tensor:
                state["_buffers"][name] = buffer.detach().clone()
        forward = self._find_function(module, "forward", forward)
        if placed is not None:
            forward = MethodType(type(module).forward, made) if forward is None else forward
            hooks = [hook for hook in getattr(placed, "hooks", [placed]) if _find_module(type(hook)) == "accelerate"]
            forward = update_wrapper(partial(_run_placed, hooks, made, forward), type(module).forward)
        if forward is not None:
            state["forward"] = forward
        state["training"] = False
        state["_compiled_call_impl"] = partial(_call, made)
        return made

    def _find_function(self, module: nn.Module, name: str, function: Any) -> Any:
        """The copy's function in the place of its class' one; None: its class' one."""
        if function is None:
            return None
        method = isinstance(function, MethodType) and function.__self__ is module
        if method and any(function.__func__ in vars(kind).values() for kind in type(module).__mro__):
            return self._copy(function)  # which the module chose itself among its own
        if not _lays_out(function):
            weights = [*module._parameters.values(), *module._buffers.values()]
            packed = any(weight is not None and not weight.is_floating_point() for weight in weights)
            origin = find_origin(function)
            beside = origin in {kind.__module__ for kind in type(module).__mro__} and not _is_library(origin)
            if not (packed or beside):
                return None
            self.left.append(f"{type(module).__name__}.{name}")  # perhaps it unpacks them, or is the model's own
        return self._copy(function)

    def _copy(self, value: Any) -> Any:
        """`value` with copies in the place of modules, as far as containers and functions show them."""
        kind = type(value)
        if isinstance(value, nn.Module):
            return self.copy_module(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.copy_module(value.__self__))
        if kind not in (list, tuple, dict, OrderedDict, partial, FunctionType):
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        made: Any
        if kind is list:
            self._made[id(value)] = value, (made := [])
            made += map(self._copy, list(value))
        elif kind in (dict, OrderedDict):
            self._made[id(value)] = value, (made := kind())
            made.update((key, self._copy(item)) for key, item in list(value.items()))
        elif kind is tuple:
            made = tuple(map(self._copy, value))
        elif kind is partial:
            made = partial(self._copy(value.func), *map(self._copy, value.args), **self._copy(value.keywords))
        else:
            made = self._copy_function(value)
        self._made[id(value)] = value, made
        return made

    def _copy_function(self, function: FunctionType) -> FunctionType:
        """With copies in the place of modules in its closure; the function itself if there are none."""
        if hasattr(function, "_torchdynamo_orig_callable"):  # of `torch.compile`
            return self._copy(function._torchdynamo_orig_callable)
        self._made[id(function)] = function, function  # closures may have functions that call each other
        cells = [cell for cell in function.__closure__ or () if cell != CellType()]  # the others are empty
        copies = {id(cell): self._copy(cell.cell_contents) for cell in cells}
        if all(copies[id(cell)] is cell.cell_contents for cell in cells):
            return function
        if _lays_out(function):  # around a function of somebody's?
            around = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, _FUNCTIONS)]
            self.left += [each for each in map(find_origin, around) if not _is_library(each)]
        closure = tuple(
            CellType(copies[id(cell)]) if id(cell) in copies else cell for cell in function.__closure__ or ()
        )
        made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
        made.__kwdefaults__ = function.__kwdefaults__
        vars(made).update(vars(function))
        return made


def _find_module(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _lays_out(function: Any) -> bool:
    """Whether a hook or function comes from code that lays weights out. Where it was written says so, not what
    `functools.wraps` made it say, which wrappers of users take over from what they wrap."""
    name = find_origin(function)
    return not isinstance(function, nn.Module) and any(name == each or name.startswith(f"{each}.") for each in _LAYOUT)


def find_origin(function: Any) -> str:
    """The name of the module whose code it is."""
    while isinstance(function, (MethodType, partial)):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    where = getattr(function, "__globals__", None)
    return str(type(function).__module__ if where is None else where.get("__name__"))


def _is_library(name: str) -> bool:
    return name.partition(".")[0] in {"builtins", *(each.partition(".")[0] for each in _LAYOUT)}


def _run_placed(
    hooks: Sequence[Any], module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """As accelerate runs a module: its hooks bring weights and inputs together, and take the weights away."""
    for hook in hooks:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
    output = forward(*args, **kwargs)
    for hook in hooks:
        output = hook.post_forward(module, output)
    return output


def _call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """As torch calls a module, without global hooks."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if key in module._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        elif (given := hook(module, args)) is not None:
            args = given if isinstance(given, tuple) else (given,)
    output = module.forward(*args, **kwargs)
    for key, hook in list(module._forward_hooks.items()):
        more = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
        found = hook(module, args, *more, output)
        output = output if found is None else found
    return output
