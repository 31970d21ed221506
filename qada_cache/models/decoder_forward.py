"""The forward function of a model's decoder, with one before it that a cache may have compute a step, and that finds
the cache of a pass which was left without.

It goes before by the decoder's class: copies and pickles of a model have the class that it came with.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..versions import CACHE_NAMES, pass_cache

Find = Callable[[Any, dict[str, Any]], Any]


def _find_decoder(model: PreTrainedModel) -> Any:
    """The decoder, None if there is none. Of some types transformers finds a model with its head (Llama 4), or the head
    (ModernBERT's decoder)."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        decoder = None if model.base_model is model else model.base_model
    inner = getattr(decoder, "model", None)
    with_head = isinstance(inner, PreTrainedModel) and (decoder is model or decoder.get_output_embeddings() is not None)
    return inner if with_head else decoder


def is_taken(model: PreTrainedModel) -> bool:
    """Whether another library has put a function before the decoder's forward, as accelerate does, or there is no
    decoder."""
    decoder = _find_decoder(model)
    return decoder is None or "forward" in vars(decoder)


def put_before(model: PreTrainedModel, find: Find | None = None) -> None:
    """Have the decoder of `model` ask a QAdACache to `_read_in_pieces`, then its `_decode_graph`, if it has one: `run`
    gets the cache, the decoder, its own forward function and the keywords. Without a cache, `find(decoder,
    keywords)` finds one."""
    decoder = _find_decoder(model)
    if not hasattr(type(decoder), "_qada_own"):
        decoder.__class__ = _find_class(type(decoder))  # type: ignore[arg-type]  # a class is hashable
    if find is not None:
        type(decoder)._qada_find = staticmethod(find)


def take_away(model: PreTrainedModel) -> None:
    """Undo `put_before`."""
    decoder = _find_decoder(model)
    if "_qada_own" in vars(type(decoder)):  # not of a class that others derived
        decoder.__class__ = type(decoder)._qada_own


def find_cache(kwargs: dict[str, Any]) -> Any:
    """The cache that a decoder is given by its keywords; None without one."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def _make_new(own: Any, *given: Any) -> Any:
    return own.__new__(own, *given)


@functools.cache
def _find_class(own: Any) -> Any:
    """As `own`, by the same name, but for its forward function."""

    @functools.wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = find_cache(kwargs)
        if cache is None and self._qada_find is not None and (cache := self._qada_find(self, kwargs)) is not None:
            kwargs |= pass_cache(cache)
        if args or torch.compiler.is_compiling() or not hasattr(cache, "_decode_graph"):
            return own.forward(self, *args, **kwargs)
        compute = functools.partial(own.forward, self)
        if (read := cache._read_in_pieces(compute, self, kwargs)) is not None:
            return read
        graph = cache._decode_graph
        return compute(**kwargs) if graph is None else graph.run(cache, self, compute, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        # By `copyreg.__newobj__`, which takes no other class than the object's.
        _, given, *rest = own.__reduce_ex__(self, max(protocol, 2))
        return _make_new, (own, *given[1:]), *rest

    named = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    ours = {"forward": forward, "__reduce_ex__": reduce, "_qada_own": own, "_qada_find": None}
    return type(own.__name__, (own,), named | ours)
