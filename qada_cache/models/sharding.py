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
    """The heads that this process has of every layer: of `size` equal parts, in order, the one numbered `rank`."""

    rank: int
    size: int  # processes
    group: Any  # of these
    device: torch.device  # where tensors that go to the others have to lie
    splits_keys: bool = True  # by KV heads; else every process has all keys, which are latents
    splits_queries: bool = True  # by heads; else every process has all of these, too, and computes the same

    @property
    def parts(self) -> int:
        """How many the query heads are split into."""
        return self.size if self.splits_queries else 1

    def take_own(self, whole: Tensor) -> Tensor:
        """This process's part of a tensor `[kv_heads, ...]` over all KV heads, a view."""
        return whole.chunk(self.size)[self.rank] if self.splits_keys else whole

    def take_own_queries(self, whole: Tensor) -> Tensor:
        """This process's part of a tensor over all query heads, or one over all KV heads, a view."""
        is_whole = not self.splits_queries or (not self.splits_keys and len(whole) == 1)
        return whole if is_whole else whole.chunk(self.size)[self.rank]

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The inverse of `take_own`, on the part's device; every process calls it, with parts of one shape and
        dtype."""
        return self.gather_all(part, dim) if self.splits_keys else part

    def gather_queries(self, part: Tensor, dim: int) -> Tensor:
        """Likewise of a tensor over query heads."""
        return self.gather_all(part, dim) if self.splits_queries else part

    def average_queries(self, part: Tensor) -> Tensor:
        """Likewise of means over the query heads of each KV head that this process has: those over all of them."""
        return part if self.splits_keys else self.gather_queries(part[None], 0).mean(dim=0)

    def gather_all(self, part: Tensor, dim: int) -> Tensor:
        """What all processes give to this call, in order; likewise."""
        if self.size == 1:
            return part
        sent = part.to(self.device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        distributed.all_gather(parts, sent, group=self.group)
        return torch.cat(parts, dim).to(part.device)

    def holds_everywhere(self, here: bool) -> bool:
        """Whether it is so in every process; every process calls it."""
        return bool(self.gather_all(torch.tensor([here], dtype=torch.bool, device="cpu"), 0).all())


UNSHARDED = HeadShard(0, 1, None, torch.device("cpu"))  # of a model that is in one process


def find_shard(model: PreTrainedModel, config: PreTrainedConfig, layers: Sequence[int]) -> HeadShard:
    """Which heads of these full-attention layers this process has; `config` is the decoder's. A model that is split in
    another way than by equal numbers of KV heads, with the query heads that share them, is refused. Latents, which are
    one KV head, are in every process: equal numbers of query heads may be split, or nothing of attention."""
    size, kind = count_processes(model), config.model_type
    check_sharding(model, kind, by_heads=size > 1)
    if distributed.is_available() and distributed.is_initialized():
        there = {getattr(module, "layer_idx", None) for module in model.modules()} - {None}
        if there and (gone := sorted(set(layers) - there)):
            _refuse(kind, f"pipeline parallelism: layers {', '.join(map(str, gone))} are not in this one")
    if size == 1 or not layers:  # nothing of a cache is split
        return UNSHARDED
    where = f"tensor parallelism over {size}, where"
    latents = find_latent_sizes(config) is not None
    made_by, split = (EXPANDING if latents else "k_proj"), [(n, p) for n, p in model.named_parameters() if _is_split(p)]
    if latents and not any(made_by in name.split(".") for name, _ in split):
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
        if getattr(module, "layer_idx", None) is None or not hasattr(module, made_by):
            continue  # no attention, or one that makes keys by no projection of its own
        for projection in (made_by,) if latents else ("q_proj", made_by, "v_proj"):
            weight: Any = getattr(getattr(module, projection, None), "weight", None)
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{projection}"))
            # Its outputs are split into that many parts, and nothing else is.
            by_rows = style == "colwise" and _is_split(weight) and weight.device_mesh.size() == size
            if not (by_rows and len(weight.placements) == 1 and weight.placements[0].is_shard(0)):
                found = f"every process has all heads of {name}.{projection}, or they are split in another way"
                _refuse(kind, f"{where} {found}")
        left.discard(module.layer_idx)
    if left:
        _refuse(kind, f"{where} layers {', '.join(map(str, sorted(left)))} make keys by no projection of their own")
    return _make_shard(weight, size, splits_keys=not latents)  # any one's


def _is_split(weight: Any) -> bool:
    return hasattr(weight, "to_local")


def _make_shard(weight: Any, size: int, **splits: bool) -> HeadShard:
    """Of the processes that have a part of this weight each."""
    mesh = weight.device_mesh
    return HeadShard(mesh.get_local_rank(), size, mesh.get_group(), weight.to_local().device, **splits)


def count_processes(model: PreTrainedModel | None) -> int:
    """Over how many processes tensor parallelism splits the model; one, if it is not known."""
    return getattr(model, "_tp_size", None) or 1


def check_whole_config(config: PreTrainedConfig) -> None:
    """Raise NotImplementedError for the config of a model that transformers split as it was loaded, which does not say
    what is in this process."""
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
    """Raise NotImplementedError for a model, or a layer of one, with parts of its weights; `name` is its type's. If
    `by_heads`, DTensors do not count."""
    kinds = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}  # to import them takes long
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
