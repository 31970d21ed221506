"""A model's heads over processes: which of them this one has, and models that are split in another way.

Under transformers' tensor parallelism every process sees every token, and has some of the KV heads of every layer, with
the query heads that share them. It decides about these alone, by its part of key moments and tables of all heads.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedConfig, PreTrainedModel

from . import list_sizes


@dataclass(frozen=True, eq=False)
class HeadShard:
    """The KV heads that this process has of every layer: of `size` equal parts, in order, the one numbered `rank`."""

    rank: int
    size: int
    group: Any  # the processes that have the parts
    device: torch.device  # where tensors that go to the others have to lie

    def take_own(self, whole: Tensor) -> Tensor:
        """This process's part of a tensor `[kv_heads, ...]` over all heads, a view."""
        return whole.chunk(self.size)[self.rank]

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The inverse of `take_own`, on the part's device; every process calls it, with parts of one shape and
        dtype."""
        if self.size == 1:
            return part
        sent = part.to(self.device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        distributed.all_gather(parts, sent, group=self.group)
        return torch.cat(parts, dim).to(part.device)

    def holds_everywhere(self, here: bool) -> bool:
        """Whether it is so in every process; every process calls it."""
        return bool(self.gather(torch.tensor([here], dtype=torch.bool, device="cpu"), 0).all())


UNSHARDED = HeadShard(0, 1, None, torch.device("cpu"))  # of a model that is in one process


def find_shard(model: PreTrainedModel, config: PreTrainedConfig, layers: Sequence[int]) -> HeadShard:
    """Which KV heads of these full-attention layers this process has; `config` is the decoder's. A model that is split
    in another way than by equal numbers of KV heads, with the query heads that share them, is refused."""
    size, kind = count_processes(model), config.model_type
    check_sharding(model, kind, by_heads=size > 1)
    if distributed.is_available() and distributed.is_initialized():
        there = {getattr(module, "layer_idx", None) for module in model.modules()} - {None}
        if there and (gone := sorted(set(layers) - there)):
            _refuse(kind, f"pipeline parallelism: layers {', '.join(map(str, gone))} are not in this one")
    if size == 1 or not layers:  # nothing of a cache is split
        return UNSHARDED
    where = f"tensor parallelism over {size}, where"
    if len(sizes := list_sizes(config)) > 1:
        _refuse(kind, f"{where} layers differ in their heads")
    ((heads, kv_heads, _),) = sizes
    if kv_heads % size or heads % size:
        _refuse(kind, f"{where} {kv_heads} KV heads and {heads} query heads have no {size} equal parts")
    plan, left = model.tp_plan or {}, set(layers)
    for name, module in model.named_modules():
        if getattr(module, "layer_idx", None) is None or not hasattr(module, "k_proj"):
            continue  # no attention, or one that makes keys by no projection of its own
        for projection in ("q_proj", "k_proj", "v_proj"):
            weight: Any = getattr(getattr(module, projection, None), "weight", None)
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{projection}"))
            # Its outputs are split into that many parts, and nothing else is.
            split = style == "colwise" and hasattr(weight, "to_local") and weight.device_mesh.size() == size
            if not (split and len(weight.placements) == 1 and weight.placements[0].is_shard(0)):
                found = f"every process has all heads of {name}.{projection}, or they are split in another way"
                _refuse(kind, f"{where} {found}")
        left.discard(module.layer_idx)
    if left:
        _refuse(kind, f"{where} layers {', '.join(map(str, sorted(left)))} make keys by no projection of their own")
    mesh = weight.device_mesh  # any one's
    return HeadShard(mesh.get_local_rank(), size, mesh.get_group(), weight.to_local().device)


def count_processes(model: PreTrainedModel | None) -> int:
    """Over how many processes tensor parallelism splits the model; one, if it is not known."""
    return getattr(model, "_tp_size", None) or 1


def check_unsharded(size: int) -> None:
    """Raise NotImplementedError if a cache is in `size` processes and not in one."""
    if size > 1:
        raise NotImplementedError(
            f"each of {size} processes has some heads of this cache, and a file keeps whole ones: read the prompt "
            "again, or save and load in a process that has the whole model"
        )


def check_sharding(module: nn.Module, name: str, *, by_heads: bool = False) -> None:
    """Raise NotImplementedError for a model, or a layer of one, with parts of its weights; `name` is its type's. If
    `by_heads`, DTensors do not count."""
    kinds = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}  # to import them takes long
    if not kinds.isdisjoint(("FullyShardedDataParallel", "FSDPModule")):
        _refuse(name, "FSDP")
    if not by_heads and any(hasattr(parameter, "to_local") for parameter in module.parameters()):
        _refuse(name, "its parameters are DTensors")


def _refuse(name: str, how: str) -> NoReturn:
    raise NotImplementedError(
        f"this {name} model is split over processes ({how}), and QAdACache serves whole models and those whose "
        "KV heads tensor parallelism splits, built as QAdACache(model): load it with "
        'distributed_config=DistributedConfig(tp_plan="auto") if its plan splits keys and values by head and their '
        'number divides, or without (device_map="auto" lays whole layers on several devices of one process), '
        "or use transformers.DynamicCache"
    )
