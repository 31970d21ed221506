"""What a graph takes from a model: where its weights lie, and what its modules call."""

import weakref
from collections.abc import Callable
from itertools import chain, repeat
from operator import contains, is_
from typing import Any

from torch import Tensor, nn

_MODULE = nn.modules.module
_GLOBAL_HOOKS: tuple[Any, ...] = (_MODULE._global_forward_hooks, _MODULE._global_forward_pre_hooks)  # of all modules


class ModelState:
    """A decoder's modules, parameters and buffers as they are now. It keeps these, but not the decoder.

    Every replay asks for them, and the device waits meanwhile: Python's own iterators look at them.
    """

    def __init__(self, decoder: nn.Module, *, watches_hooks: bool, forget: Callable[[], None]) -> None:
        """The method `forget` is called once the decoder is gone. `watches_hooks`: a hook, and a forward function that
        is an instance's own, are changes."""
        modules = list(decoder.modules())
        self._owns: list[dict[str, Any]] = [vars(module) for module in modules] if watches_hooks else []
        self._hooks = [own[name] for own in self._owns for name in ("_forward_hooks", "_forward_pre_hooks")]
        self._hooks += _GLOBAL_HOOKS if watches_hooks else ()
        tables: list[Any] = [part for own in modules for part in (own._modules, own._parameters, own._buffers)]
        self._views = [table.values() for table in tables if table]  # of what is in them, whenever they are read
        self._held = list(chain.from_iterable(self._views))
        self._weights = [each for each in self._held if isinstance(each, Tensor)]
        self._addresses = list(map(Tensor.data_ptr, self._weights))
        method = weakref.WeakMethod(forget)  # whoever has this is nobody's that this keeps
        self._end = weakref.ref(decoder, lambda _: (found := method()) and found())

    @property
    def has_hooks(self) -> bool:
        """Whether something may come between its modules, as far as that is watched."""
        return any(self._hooks) or any(map(contains, self._owns, repeat("forward")))

    @property
    def is_changed(self) -> bool:
        """Whether a graph captured then would compute something else than the model now."""
        held = list(chain.from_iterable(self._views))
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            return True
        return list(map(Tensor.data_ptr, self._weights)) != self._addresses or self.has_hooks
