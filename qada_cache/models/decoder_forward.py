"""Puts a function before the forward function of a model's decoder. It lets a cache compute a step by itself, and gives
a cache to a pass that the model would compute without.

It replaces the decoder's class by a derived one. Copies and pickles of a model have the original class.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..versions import CACHE_NAMES, pass_cache

Find = Callable[[Any, dict[str, Any]], Any]


def find_decoder(model: PreTrainedModel) -> Any:
    """The decoder without its head; None if there is none. For some types `get_decoder` returns a model with its head
    (Llama 4), or the head (ModernBERT's decoder)."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        decoder = None if model.base_model is model else model.base_model
    inner = getattr(decoder, "model", None)
    with_head = isinstance(inner, PreTrainedModel) and (decoder is model or decoder.get_output_embeddings() is not None)
    return inner if with_head else decoder


def is_taken(model: PreTrainedModel) -> bool:
    """Whether another library has replaced the decoder's `forward`, as accelerate does, or there is no decoder."""
    decoder = find_decoder(model)
    return decoder is None or "forward" in vars(decoder)


def put_before(model: PreTrainedModel, find: Find | None = None) -> None:
    """Have each pass of `model`'s decoder with a QAdACache try the cache's `_read_in_pieces` first, then `run` of its
    `_decode_graph`, if there is one. `run` gets the cache, the decoder, the original forward function and the keywords.
    A pass without a cache gets that of `find(decoder, keywords)`."""
    decoder = find_decoder(model)
    if not hasattr(type(decoder), "_qada_own"):
        decoder.__class__ = _find_class(type(decoder))  # type: ignore[arg-type]  # a class is hashable
    if find is not None:
        type(decoder)._qada_find = staticmethod(find)


def take_away(model: PreTrainedModel) -> None:
    """Undo `put_before`."""
    decoder = find_decoder(model)
    if "_qada_own" in vars(type(decoder)):  # not of a class that others derived
        decoder.__class__ = type(decoder)._qada_own


def find_cache(kwargs: dict[str, Any]) -> Any:
    """The cache among a decoder's keywords; None without one."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def _make_new(original: Any, *args: Any) -> Any:
    return original.__new__(original, *args)


@functools.cache
def _find_class(original: Any) -> Any:
    """A class derived from `original`, of the same name, with another forward function."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = find_cache(kwargs)
        if cache is None and self._qada_find is not None and (cache := self._qada_find(self, kwargs)) is not None:
            kwargs |= pass_cache(cache)
        if args or torch.compiler.is_compiling() or not hasattr(cache, "_decode_graph"):
            return original.forward(self, *args, **kwargs)
        compute = functools.partial(original.forward, self)
        if (output := cache._read_in_pieces(compute, self, kwargs)) is not None:
            return output
        graph = cache._decode_graph
        return compute(**kwargs) if graph is None else graph.run(cache, self, compute, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        # `_make_new` instead of `copyreg.__newobj__`, which pickle refuses with another class than the object's.
        _, args, *state = original.__reduce_ex__(self, max(protocol, 2))
        return _make_new, (original, *args[1:]), *state

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    ours = {"forward": forward, "__reduce_ex__": reduce, "_qada_own": original, "_qada_find": None}
    return type(original.__name__, (original,), names | ours)
