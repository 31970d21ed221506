"""QAdACache: a KV cache for Hugging Face transformers that reads the long context only where a head needs it."""

from .attention.forward import restore_attention
from .cache import QAdACache
from .criterion import StaticHeads
from .key_moments import KeyMoments
from .prefix_store import PrefixStore
from .preparing import prepare
from .stats import CacheStats

__all__ = ["CacheStats", "KeyMoments", "PrefixStore", "QAdACache", "StaticHeads", "prepare", "restore_attention"]
__version__ = "0.1.0"
