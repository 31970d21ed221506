"""Puts functions before all entries of transformers' tables of attention and mask functions.

A model looks up the function of its config's name, `table.get_interface(name, default)`. While a function of ours is
placed, the look-up returns ours, whose first argument is the function that the model would have called. It may have
been registered by anybody, at any time. Eager attention is no entry: each modeling file passes its own as the default.
So the look-up changes, and no name, config or entry. It changes by the table's class, which graphs of `torch.compile`
check.
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

from ..forked import renew

Function = Callable[..., Any]

_placed: list[Function] = []  # before attention; the last one is called first
_mask_placed: list[Function] = []
_changing = renew(threading.Lock())


def _put_before(functions: list[Function], entry: Function) -> Function:
    """A function that calls the last of `functions`, which gets the one before it, and the first gets `entry`."""
    for function in functions:
        entry = partial(function, entry)
    return entry


class _Attention(AttentionInterface):
    def __getitem__(self, key: str) -> Function:
        return _put_before(_placed, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        entry = super().get(key, default)
        return _put_before(_placed, entry) if entry is default and callable(entry) else entry

    def get_interface(self, attn_implementation: str, default: Function) -> Function:
        entry = super().get_interface(
            attn_implementation, default
        )  # by the base class's `get`, and so by `__getitem__` here
        return _put_before(_placed, entry) if entry is default else entry


class _Masks(AttentionMaskInterface):
    def __getitem__(self, key: str) -> Function:
        return _put_before(_mask_placed, super().__getitem__(key))


_OURS: dict[type, type] = {AttentionInterface: _Attention, AttentionMaskInterface: _Masks}
_tables: list[Any] = [ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS]  # those that `place` changes


def place(function: Function, mask_function: Function | None = None, *, tables: Iterable[Any] = ()) -> None:
    """Put `function` before all attention functions, and `mask_function` before all mask functions. Both get the
    function that was looked up, then its arguments. The common tables change, and `tables` of modeling files
    (`find_own_tables`). A function that is already placed stays in its place."""
    with _changing:
        _tables.extend(table for table in tables if not any(table is each for each in _tables))
        if function not in _placed:
            _placed.append(function)
            _mask_placed.extend([] if mask_function is None else [mask_function])
        for table in _tables:
            table.__class__ = _OURS.get(type(table), type(table))


def displace(function: Function, mask_function: Function | None = None) -> None:
    """Undo `place`; without any placed function the tables get their classes back."""
    with _changing:
        for functions, removed in ((_placed, function), (_mask_placed, mask_function)):
            functions[:] = [each for each in functions if each is not removed]
        if not _placed:
            originals = {ours: original for original, ours in _OURS.items()}
            for table in _tables:
                table.__class__ = originals.get(type(table), type(table))


def find_own_tables(model: nn.Module | None, config: PreTrainedConfig) -> list[AttentionInterface]:
    """Tables of attention functions that a model's modeling files define themselves; without a model, the table of the
    modeling file that belongs to the config."""
    names = {type(config).__module__.replace("configuration_", "modeling_")}
    if model is not None:
        names |= {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    tables = [getattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS", None) for name in sorted(names)]
    return [table for table in tables if isinstance(table, AttentionInterface)]
