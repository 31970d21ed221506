"""Models that are split over processes: each process sees only some of the heads, or parts of the weights."""

import sys

from torch import nn


def check_sharding(module: nn.Module, name: str) -> None:
    """Raise NotImplementedError for a model, or a layer of one, that is split over processes; `name` is its type's."""
    if (found := _sharding(module)) is not None:
        raise NotImplementedError(
            f"this {name} model is split over processes ({found}), and QAdACache serves whole models: load it without "
            '(device_map="auto" lays whole layers on several devices of one process), or use '
            "transformers.DynamicCache"
        )


def _sharding(module: nn.Module) -> str | None:
    """How heads or weights are split over processes, in words; None if they are not."""
    if (getattr(module, "_tp_size", None) or 1) > 1:
        return f"tensor parallelism over {module._tp_size}"
    # Whoever has made such modules or tensors has imported what they are of; importing it takes long.
    fsdp, tensors = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    if fsdp is not None and any(
        isinstance(part, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)) for part in module.modules()
    ):
        return "FSDP"
    if tensors is not None and any(isinstance(parameter, tensors.DTensor) for parameter in module.parameters()):
        return "its parameters are DTensors"
    return None
