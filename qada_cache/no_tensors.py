"""Refuses, in words, code that takes a cache for the keys and values of each layer, or that moves these itself."""

from collections.abc import Iterator
from typing import Any, NoReturn

from .versions import CACHE

_WAY_OUT = (
    "keys and values of a layer are no single tensors here, and lie in host memory for the most part: give the cache "
    f"to its model whole (model(input_ids, {CACHE}=cache)), keep it by save() and QAdACache.load, or use "
    "transformers.DynamicCache where tensors are needed"
)
_OLD = ("key_cache", "value_cache", "to_legacy_cache", "seen_tokens", "get_usable_length", "to", "cpu", "cuda")


class NoTensors:
    """The refusals of a cache; each has the way out."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"QAdACache cannot be unpacked into keys and values (nn.DataParallel does that): {_WAY_OUT}; run one "
            "process per device"
        )

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"QAdACache cannot be indexed by {index!r:.80}: {_WAY_OUT}")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError(f"QAdACache cannot be written to at {index!r:.80}: {_WAY_OUT}")

    def __contains__(self, value: Any) -> bool:
        raise TypeError(f"QAdACache cannot be searched: {_WAY_OUT}")

    def __getattr__(self, name: str) -> Any:
        about = f": {_WAY_OUT}" if name in _OLD else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{about}")

    @classmethod
    def from_legacy_cache(cls, *_: Any, **__: Any) -> NoReturn:
        """Refused, with a TypeError."""
        raise TypeError(f"QAdACache cannot be made of keys and values: {_WAY_OUT}")

    def offload(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, with a NotImplementedError: the cache does it itself."""
        refuse_moves("offload()")

    def prefetch(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, with a NotImplementedError: the cache does it itself."""
        refuse_moves("prefetch()")


def refuse_moves(verb: str) -> NoReturn:
    """Raise NotImplementedError at a call of this verb."""
    raise NotImplementedError(
        f"QAdACache keeps its bulk in host memory and fetches what is read by itself: leave out {verb}; "
        "offloading=False keeps all on the device, and device_budget a part of it"
    )
