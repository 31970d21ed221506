"""Transformers' tables of attention and mask functions, with functions of ours before what models find in them.

A model asks a table for the function of the name in its config, `table.get_interface(name, default)`. While a function
of ours is placed, its first argument is the function that the model would have called, whoever registered that, and
whenever. Eager attention is no entry: each modeling file hands its own to the look-up as the default. So the look-up
changes, and no name, config or entry. It changes by the class of the table, which graphs of `torch.compile` check.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

Function = Callable[..., Any]

_placed: list[Function] = []  # before attention; the last one is called first
_mask_placed: list[Function] = []
_changing = threading.Lock()


def _put_before(functions: list[Function], found: Function) -> Function:
    for function in functions:
        found = partial(function, found)
    return found


class _Attention(AttentionInterface):
    def __getitem__(self, key: str) -> Function:
        return _put_before(_placed, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        found = super().get(key, default)
        return _put_before(_placed, found) if found is default and callable(found) else found

    def get_interface(self, attn_implementation: str, default: Function) -> Function:
        found = super().get_interface(attn_implementation, default)  # by `get` of the class above
        return _put_before(_placed, found) if found is default else found


class _Masks(AttentionMaskInterface):
    def __getitem__(self, key: str) -> Function:
        return _put_before(_mask_placed, super().__getitem__(key))


_OURS: dict[type, type] = {AttentionInterface: _Attention, AttentionMaskInterface: _Masks}
_tables: list[Any] = [ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS]  # those that may have ours before them


def place(function: Function, mask_function: Function | None = None, *, tables: Iterable[Any] = ()) -> None:
    """Put `function` before all attention functions, and `mask_function` before all that make masks. Both get the one
    that was asked for, then its arguments. Files' own `tables` (`find_own_tables`) are changed beside the common ones.
    What is placed stays in its place."""
    with _changing:
        _tables.extend(table for table in tables if not any(table is known for known in _tables))
        if function not in _placed:
            _placed.append(function)
            _mask_placed.extend([] if mask_function is None else [mask_function])
        for table in _tables:
            table.__class__ = _OURS.get(type(table), type(table))


def displace(function: Function, mask_function: Function | None = None) -> None:
    """Undo `place`; the tables are as they were if nothing else is placed."""
    with _changing:
        for functions, gone in ((_placed, function), (_mask_placed, mask_function)):
            functions[:] = [kept for kept in functions if kept is not gone]
        if not _placed:
            theirs = {ours: own for own, ours in _OURS.items()}
            for table in _tables:
                table.__class__ = theirs.get(type(table), type(table))


def find_own_tables(model: nn.Module | None, config: PreTrainedConfig) -> list[AttentionInterface]:
    """The tables of attention functions that a model's modeling files keep for themselves, or that the file which
    belongs to its config keeps."""
    names = {type(config).__module__.replace("configuration_", "modeling_")}
    if model is not None:
        names |= {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    found = [getattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS", None) for name in sorted(names)]
    return [table for table in found if isinstance(table, AttentionInterface)]
