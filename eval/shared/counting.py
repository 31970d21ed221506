"""What a cache holds, and what a decoded token reads of it, in bytes."""

from typing import Any

from torch import Tensor
from transformers import Cache

from qada_cache import QAdACache


def list_tensors(value: Any) -> list[Tensor]:
    """The plain tensors that a layer of a cache holds, those that quantised ones are made of included."""
    if isinstance(value, Tensor):
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        return list_tensors([getattr(value, name) for name in parts]) if parts else [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in values for tensor in list_tensors(part)]


def count_held(cache: Cache) -> tuple[int, int]:
    """Bytes of keys and values on the device and on the host."""
    if isinstance(cache, QAdACache):
        stats = cache.stats()
        return stats.device_bytes, stats.host_bytes
    tensors = [tensor for layer in cache.layers for tensor in list_tensors(vars(layer))]
    by_host = [tensor.nbytes for tensor in tensors if tensor.device.type == "cpu"]
    total = sum(tensor.nbytes for tensor in tensors)
    return (total, 0) if str(tensors[0].device) == "cpu" else (total - sum(by_host), sum(by_host))


def count_read_bytes(cache: Cache, name: str, steps: int) -> float:
    """Bytes of keys and values that a decoded token read, on average."""
    if name == "no context":
        return 0.0
    if not isinstance(cache, QAdACache):
        return float(sum(count_held(cache)))
    near = sum(layer.store.near_keys.nbytes + layer.store.near_values.nbytes for layer in cache.layers)
    stats = cache.stats()
    return near + (stats.bulk_read_bytes + stats.sketch_read_bytes + stats.streamed_bytes) / steps


def count_bus_bytes(cache: Cache, steps: int) -> float:
    """Of these, what came over the bus to an accelerator."""
    held = count_held(cache)[1]  # of which DynamicCache moves all
    if not held or not isinstance(cache, QAdACache):
        return float(held)
    stats = cache.stats()
    return (stats.bulk_read_bytes + stats.streamed_bytes) / steps
