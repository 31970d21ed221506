"""Makes Triton's interpreter faster: leaves out, or does once, work that it repeats for every value. And makes it right
about bools."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
from triton import language
from triton.runtime import interpreter


def quicken(patch: pytest.MonkeyPatch) -> None:
    builder = interpreter.interpreter_builder
    # The check for overflow adds all integers a second time, and its result is not used.
    patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
    # The interpreter replaces functions of `triton.language` in every call, even if they are replaced already.
    patch.setattr(interpreter.InterpretedFunction, "__call__", _call)
    # These follow from a type or a shape alone, so they are remembered.
    patch.setattr(interpreter, "_get_np_dtype", _remember_dtypes(interpreter._get_np_dtype))
    patch.setattr(language.block_type, "__init__", _remember_types(language.block_type.__init__))
    patch.setattr(language.tensor, "__init__", _init_tensor)
    patch.setattr(type(builder), "create_splat", _keep_bools(type(builder).create_splat))


@functools.cache
def _list_seen(function: Any) -> list[Any]:
    seen = list(map(id, function.__globals__.values()))
    return [module for module in (language, language.core) if id(module) in seen]


def _call(own: Any, *args: Any, **kwargs: Any) -> Any:
    if any(language.core.is_builtin(module.load) for module in _list_seen(own.fn)):
        interpreter._patch_lang(own.fn)
    return own.rewrite()(*args, **kwargs)


def _remember_dtypes(find: Any) -> Any:
    known: dict[str, Any] = {}

    def find_dtype(type: Any) -> Any:
        if (found := known.get(type.name)) is None:
            found = known[type.name] = find(type)
        return found

    return find_dtype


def _remember_types(init: Any) -> Any:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_once(own: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if (found := known.get(key)) is None:
            init(own, element_ty, shape)
            found = known[key] = vars(own).copy()
        vars(own).update(found)

    return init_once


@functools.cache
def _find_shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return language.constexpr(math.prod(sizes)), language.tuple([language.constexpr(size) for size in sizes])


def _init_tensor(own: Any, handle: Any, type: Any) -> None:
    own.handle, own.type, own.dtype = handle, type, type.scalar
    own.numel, own.shape = _find_shape(tuple(type.shape) if type.is_block() else ())


def _keep_bools(splat: Any) -> Any:
    """Scalars that were compared are spread over a block as bools, not as bytes, which Triton 3.9 takes for no mask."""

    def create_splat(own: Any, type: Any, scalar: Any) -> Any:
        spread = splat(own, type, scalar)
        if type.scalar == language.int1:
            spread.data = spread.data.astype(bool, copy=False)
        return spread

    return create_splat
