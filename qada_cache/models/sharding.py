"""A model's heads over processes: which of them this one has, and models that are split in another way.

Under transformers' tensor parallelism every process sees every token, and has some of the KV heads of every layer, with
the query heads that share them. It decides about these alone, by its part of key moments and tables of all heads.
Latents are in every process as a whole, with some of the query heads or with all.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedConfig, PreTrainedModel

from . import list_sizes
from .latent import EXPANDING, find_latent_sizes


@dataclass(frozen=True, eq=False)
class HeadShard:
    """The heads that this process has of every layer: part number `rank` of `size` equal parts, in order."""

    rank: int
    size: int  # number of processes
    group: Any  # torch.distributed's group of these processes
    device: torch.device  # tensors that go to other processes have to lie here
    splits_keys: bool = True  # False: every process has all keys, which are latents
    splits_queries: bool = True  # False: every process has all query heads too, and computes the same

    @property
    def parts(self) -> int:
        """The number of parts that the query heads are split into."""
        return self.size if self.splits_queries else 1

    def take_own(self, whole: Tensor) -> Tensor:
        """This process's part of a tensor `[kv_heads, ...]` over all KV heads, a view."""
        return whole.chunk(self.size)[self.rank] if self.splits_keys else whole

    def take_own_queries(self, whole: Tensor) -> Tensor:
        """This process's part of a tensor over all query heads, or one over all KV heads, a view."""
        is_whole = not self.splits_queries or (not self.splits_keys and len(whole) == 1)
        return whole if is_whole else whole.chunk(self.size)[self.rank]

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """All processes' parts over KV heads, joined in dimension `dim` on the part's device: the inverse of
        `take_own`. Every process calls it, with a part of the same shape and dtype."""
        return self.gather_all(part, dim) if self.splits_keys else part

    def gather_queries(self, part: Tensor, dim: int) -> Tensor:
        """As `gather`, for parts over query heads."""
        return self.gather_all(part, dim) if self.splits_queries else part

    def average_queries(self, part: Tensor) -> Tensor:
        """The mean over all query heads of each KV head, from `part`, the mean over this process's query heads. Every
        process calls it."""
        return part if self.splits_keys else self.gather_queries(part[None], 0).mean(dim=0)

    def gather_all(self, part: Tensor, dim: int) -> Tensor:
        """All processes' `part`, joined in dimension `dim` in order of rank. Every process calls it, as `gather`."""
        if self.size == 1:
            return part
        sent = part.to(self.device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        distributed.all_gather(parts, sent, group=self.group)
        return torch.cat(parts, dim).to(part.device)

    def holds_everywhere(self, here: bool) -> bool:
        """Whether `here` is True in every process. Every process calls it."""
        return bool(self.gather_all(torch.tensor([here], dtype=torch.bool, device="cpu"), 0).all())


UNSHARDED = HeadShard(0, 1, None, torch.device("cpu"))  # all heads, of a model in one process


def find_shard(model: PreTrainedModel, config: PreTrainedConfig, layers: Sequence[int]) -> HeadShard:
    """Which heads of these full-attention layers this process has; `config` is the decoder's.

    NotImplementedError for a model that is split in another way than by equal numbers of KV heads, with the query heads
    that share them. Latents are one KV head, which is in every process: either the query heads are split into equal
    numbers, or nothing of attention is split."""
    size, kind = count_processes(model), config.model_type
    check_sharding(model, kind, by_heads=size > 1)
    if distributed.is_available() and distributed.is_initialized():
        present = {getattr(module, "layer_idx", None) for module in model.modules()} - {None}
        if present and (missing := sorted(set(layers) - present)):
            _refuse(kind, f"pipeline parallelism: layers {', '.join(map(str, missing))} are not in this one")
    if size == 1 or not layers:  # nothing of a cache is split
        return UNSHARDED
    where = f"tensor parallelism over {size}, where"
    latents = find_latent_sizes(config) is not None
    key_projection = EXPANDING if latents else "k_proj"
    split = [(name, weight) for name, weight in model.named_parameters() if _is_split(weight)]
    if latents and not any(key_projection in name.split(".") for name, _ in split):
        if not split:
            _refuse(kind, f"{where} every process has all weights")
        return _make_shard(split[0][1], size, splits_keys=False, splits_queries=False)
    if len(sizes := list_sizes(config)) > 1:
        _refuse(kind, f"{where} layers differ in their heads")
    ((heads, kv_heads, _),) = sizes
    if heads % size or (kv_heads % size and not latents):
        counted = f"{heads} query heads" if latents else f"{kv_heads} KV heads and {heads} query heads"
        _refuse(kind, f"{where} {counted} have no {size} equal parts")
    plan, left = model.tp_plan or {}, set(layers)
    for name, module in model.named_modules():
        if getattr(module, "layer_idx", None) is None or not hasattr(module, key_projection):
            continue  # no attention, or one that makes keys by no projection of its own
        for projection in (key_projection,) if latents else ("q_proj", key_projection, "v_proj"):
            weight: Any = getattr(getattr(module, projection, None), "weight", None)
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{projection}"))
            # Its outputs, and no other dimension, are split into `size` parts.
            by_rows = style == "colwise" and _is_split(weight) and weight.device_mesh.size() == size
            if not (by_rows and len(weight.placements) == 1 and weight.placements[0].is_shard(0)):
                found = f"every process has all heads of {name}.{projection}, or they are split in another way"
                _refuse(kind, f"{where} {found}")
        left.discard(module.layer_idx)
    if left:
        _refuse(kind, f"{where} layers {', '.join(map(str, sorted(left)))} make keys by no projection of their own")
    return _make_shard(weight, size, splits_keys=not latents)  # all of these weights lie on the same processes


def _is_split(weight: Any) -> bool:
    return hasattr(weight, "to_local")


def _make_shard(weight: Any, size: int, **splits: bool) -> HeadShard:
    """The shard of this process among those that have a part of this weight each."""
    mesh = weight.device_mesh
    return HeadShard(mesh.get_local_rank(), size, mesh.get_group(), weight.to_local().device, **splits)


def count_processes(model: PreTrainedModel | None) -> int:
    """The number of processes that tensor parallelism splits the model over; 1 if it is unknown."""
    return getattr(model, "_tp_size", None) or 1


def check_whole_config(config: PreTrainedConfig) -> None:
    """Raise NotImplementedError for the config of a model that transformers split when it loaded it: the config does
    not say which heads are in this process."""
    if (size := getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1) > 1:
        _refuse(config.model_type, f"tensor parallelism over {size}, of which config= says nothing")


def check_unsharded(size: int) -> None:
    """Raise NotImplementedError if the model of a cache is in `size` processes and not in one."""
    if size > 1:
        raise NotImplementedError(
            f"each of {size} processes has a part of this cache's model, and a file is of a whole one: read the prompt "
            "again, or save and load in a process that has the whole model"
        )


def check_sharding(module: nn.Module, name: str, *, by_heads: bool = False) -> None:
    """Raise NotImplementedError if `module`, a model or a layer, has only parts of its weights in this process. `name`
    is the model type, for the message. With `by_heads`, DTensors are allowed."""
    # Classes are known by name, as importing FSDP takes long.
    kinds = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
    if not kinds.isdisjoint(("FullyShardedDataParallel", "FSDPModule")):
        _refuse(name, "FSDP")
    if not by_heads and any(map(_is_split, module.parameters())):
        _refuse(name, "its parameters are DTensors")


def _refuse(name: str, how: str) -> NoReturn:
    raise NotImplementedError(
        f"this {name} model is split over processes ({how}), and QAdACache serves whole models and those whose "
        "KV heads tensor parallelism splits, or query heads of latents, built as QAdACache(model): load it with "
        'distributed_config=DistributedConfig(tp_plan="auto") if its plan splits keys and values by head and their '
        'number divides, or without (device_map="auto" lays whole layers on several devices of one process), '
        "or use transformers.DynamicCache"
    )
