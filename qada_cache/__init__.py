"""QAdACache: a KV cache for Hugging Face transformers that reads the long context only where a head needs it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention.forward import restore_attention
    from .cache import QAdACache
    from .criterion import StaticHeads
    from .key_moments import KeyMoments
    from .prefix_store import PrefixStore
    from .preparing import prepare
    from .stats import CacheStats

__all__ = ["CacheStats", "KeyMoments", "PrefixStore", "QAdACache", "StaticHeads", "prepare", "restore_attention"]
__version__ = "0.2.0"

# Imported when first asked for: torch and transformers take seconds, which `qada --help` is not to wait for.
_PLACES = {
    "CacheStats": ".stats",
    "KeyMoments": ".key_moments",
    "PrefixStore": ".prefix_store",
    "QAdACache": ".cache",
    "StaticHeads": ".criterion",
    "prepare": ".preparing",
    "restore_attention": ".attention.forward",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_PLACES[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
