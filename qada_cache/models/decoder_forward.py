"""The forward function of a model's decoder, with one before it that a cache may have compute a step."""

import functools
import weakref
from typing import Any

from transformers import PreTrainedModel

from ..versions import CACHE_NAMES


def put_before(model: PreTrainedModel | None) -> None:
    """Have the decoder of `model` ask the `decode_graph` of a cache that has one: its `run` gets the cache's layers,
    the decoder, its own forward function and the keywords. ValueError without a model, NotImplementedError if another
    library has put a function there."""
    if model is None:
        raise ValueError("cuda_graph=True needs the model: QAdACache(model, cuda_graph=True)")
    decoder = model.get_decoder()
    if (known := vars(decoder).get("forward")) is not None:
        if hasattr(known, "_qada_graph"):
            return
        raise NotImplementedError(
            "cuda_graph=True cannot go before the forward function that another library gave this model (accelerate's "
            "device_map does): load it on one device without, or build the cache without cuda_graph"
        )
    own, reference = type(decoder).forward, weakref.ref(decoder)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        decoder, cache = reference(), find_cache(kwargs)
        if args or (graph := getattr(cache, "decode_graph", None)) is None:
            return own(decoder, *args, **kwargs)
        return graph.run(cache.layers, decoder, functools.partial(own, decoder), kwargs)

    forward._qada_graph = True  # type: ignore[attr-defined]
    decoder.forward = forward


def take_away(model: PreTrainedModel) -> None:
    """Undo `put_before`."""
    decoder = model.get_decoder()
    if hasattr(vars(decoder).get("forward"), "_qada_graph"):
        del decoder.forward


def find_cache(kwargs: dict[str, Any]) -> Any:
    """The cache that a decoder is given by its keywords; None without one."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
