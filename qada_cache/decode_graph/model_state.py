"""The state of a model that a captured graph depends on: addresses of its weights, and its modules' hooks."""

import weakref
from collections.abc import Callable
from itertools import chain, repeat
from operator import contains, is_
from typing import Any

from torch import Tensor, nn

SAMPLED = 8  # of so many weights, one is looked at before a replay; a decoder's layer has as many or more
_MODULE = nn.modules.module
_GLOBAL_HOOKS: tuple[Any, ...] = (_MODULE._global_forward_hooks, _MODULE._global_forward_pre_hooks)  # for all modules


def list_kinds(decoder: nn.Module) -> list[type]:
    """The classes of a decoder's modules, which say whether it computes with numbers on the host."""
    return list(map(type, decoder.modules()))


class ModelState:
    """A decoder's modules, parameters and buffers at one moment. It has references to these, but not to the decoder.

    Every replay compares them with the present ones, by Python's iterators. They lie in no cache of the processor, so
    to look at all takes as long as the rest of the host's work: `is_moved` looks at few.
    """

    def __init__(self, decoder: nn.Module, *, watches_hooks: bool, forget: Callable[[], None]) -> None:
        """The method `forget` is called once the decoder is freed. With `watches_hooks`, hooks and a `forward` set on
        an instance count as changes."""
        modules = list(decoder.modules())
        self._attributes: list[dict[str, Any]] = [vars(module) for module in modules] if watches_hooks else []
        self._hooks = [values[name] for values in self._attributes for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._hooks += _GLOBAL_HOOKS if watches_hooks else ()
        tables: list[Any] = [table for each in modules for table in (each._modules, each._parameters, each._buffers)]
        self._views = [table.values() for table in tables if table]  # they show later changes
        self._contents = list(chain.from_iterable(self._views))
        self._weights = [each for each in self._contents if isinstance(each, Tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._weights))
        self._few = self._weights[::SAMPLED], self._addresses[::SAMPLED]
        method = weakref.WeakMethod(forget)  # weak, as the method's owner refers to this object
        self._end = weakref.ref(decoder, lambda _: (alive := method()) and alive())

    @property
    def has_hooks(self) -> bool:
        """Whether a module has a hook or a `forward` of its own, with `watches_hooks`; else False."""
        return any(self._hooks) or any(map(contains, self._attributes, repeat("forward")))

    @property
    def is_moved(self) -> bool:
        """Whether one of some weights, of every layer, lies elsewhere: what a replay would read may be nobody's now."""
        weights, addresses = self._few
        return list(map(Tensor.data_ptr, weights)) != addresses

    @property
    def is_changed(self) -> bool:
        """Whether the model has changed since, so that a graph captured then would compute something else."""
        contents = list(chain.from_iterable(self._views))
        if len(contents) != len(self._contents) or not all(map(is_, contents, self._contents)):
            return True
        return list(map(Tensor.data_ptr, self._weights)) != self._addresses or self.has_hooks
