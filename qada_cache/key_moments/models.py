"""A model as a cache meets it: wrappers, its inputs' device, full-attention layers, their queries, and parts of it.

Under transformers' tensor parallelism every process sees every token, and has some of the KV heads of every layer, with
the query heads that share them. It decides about these alone, by its part of key moments and tables of all heads.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch._dynamo import OptimizedModule
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .. import attention_table
from ..versions import pass_cache

_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")


def unwrap_model(model: Any) -> Any:
    """The model that `torch.compile` or peft wrapped; anything else as it is. Peft's prompt learning is refused."""
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if hasattr(model, "get_base_model"):
        settings = model.active_peft_config
        if settings.is_prompt_learning:
            raise NotImplementedError(
                f"QAdACache does not serve peft's prompt learning ({settings.peft_type}), which may hand the model a "
                "cache of its own: generate without a cache, or build it for get_base_model() and use that"
            )
        model = model.get_base_model()
    return model


def inputs_device(model: PreTrainedModel) -> torch.device:
    """The device for token ids: the embeddings compute there, and may be kept elsewhere."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        if (device := getattr(part, "execution_device", None)) is not None:
            return torch.device(device)
    return model.device


def full_attention_layers(cache: DynamicCache) -> list[int]:
    """The layers of `DynamicCache(config=...)` that keep every key: those a QAdACache takes over."""
    # Exact type: subclasses (sliding windows, indexers, linear attention) keep their own states.
    return [index for index, layer in enumerate(cache.layers) if type(layer) is DynamicLayer]


def full_attention_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A decoder's config as its managed layers have it; the config itself unless it has others for some layers.
    Managed layers that differ in their heads are refused."""
    if not config.is_heterogeneous:
        return config
    # Without any, the cache acts as DynamicCache, and the first layer stands for all.
    layers = full_attention_layers(DynamicCache(config=config)) or [0]
    configs = [config.per_layer_config[index] for index in layers]
    found = sorted({tuple(getattr(own, name, None) or 0 for name in _SIZES) for own in configs})
    if len(found) > 1:
        raise NotImplementedError(
            f"the full-attention layers of {config.model_type} differ in ({', '.join(_SIZES)}), {found}, and QAdACache "
            f"keeps tables of one shape for all: use transformers.DynamicCache for {config.model_type}"
        )
    return configs[0]


def sizes(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    """`(layers, heads, kv_heads, dim)`, the last of a head's keys; of the layers that are served."""
    config = full_attention_config(config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, heads, kv_heads, dim


def read_keys(
    model: PreTrainedModel, ids: Tensor, positions: Tensor | None, *, chunk: int, done: Callable[[int], object]
) -> dict[int, Tensor]:
    """Keys `[batch, kv_heads, tokens, dim]` of every full-attention layer, of this process's heads, on the CPU. The
    model reads `chunk` tokens of `ids` `[batch, tokens]` at a time, at `positions` `[batch, tokens]` (None: its own).
    `done` is told after each chunk how many it had. A ValueError if a layer keeps other keys."""
    config = model.config.get_text_config(decoder=True)
    cache, device = DynamicCache(config=config), inputs_device(model)
    for start in range(0, ids.shape[1], chunk):
        part = slice(start, start + chunk)
        place = {} if positions is None else {"position_ids": positions[:, part].to(device)}
        model(input_ids=ids[:, part].to(device), **pass_cache(cache), use_cache=True, logits_to_keep=1, **place)
        done(len(ids[0, part]))
    found = {}
    for index in full_attention_layers(cache):
        keys = getattr(cache.layers[index], "keys", None)
        if keys is None or keys.dim() != 4:
            raise ValueError(
                f"layer {index} of {config.model_type} keeps no [batch, heads, tokens, dim] keys to take moments of: "
                'use moments="current"'
            )
        found[index] = keys.cpu()
    return found


@contextmanager
def observed(model: PreTrainedModel, observe: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside, `observe(layer, query)` sees the queries `[batch, heads, tokens, dim]` of each of the model's layers, if
    these take their attention function from transformers' table."""
    ours = set(model.modules())

    def attention(base: Callable[..., Any], module: nn.Module, query: Tensor, *args: object, **kwargs: object) -> Any:
        if module in ours and isinstance(index := getattr(module, "layer_idx", None), int):
            observe(index, query)
        return base(module, query, *args, **kwargs)

    attention_table.place(attention, tables=attention_table.own_tables(model, model.config))
    try:
        yield
    finally:
        attention_table.displace(attention)


@dataclass(frozen=True, eq=False)
class HeadShard:
    """The KV heads that this process has of every layer: of `size` equal parts, in order, the one numbered `rank`."""

    rank: int
    size: int
    group: Any  # the processes that have the parts
    device: torch.device  # where tensors that go to the others have to lie

    def own(self, whole: Tensor) -> Tensor:
        """This process's part of a tensor `[kv_heads, ...]` over all heads, a view."""
        return whole.chunk(self.size)[self.rank]

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The inverse of `own`, on the part's device; every process calls it, with parts of one shape and dtype."""
        if self.size == 1:
            return part
        sent = part.to(self.device).contiguous()
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        distributed.all_gather(parts, sent, group=self.group)
        return torch.cat(parts, dim).to(part.device)

    def all_true(self, here: bool) -> bool:
        """Whether it is so in every process; every process calls it."""
        return bool(self.gather(torch.tensor([here], device="cpu"), 0).all())


UNSHARDED = HeadShard(0, 1, None, torch.device("cpu"))  # of a model that is in one process


def head_shard(model: PreTrainedModel, config: PreTrainedConfig, layers: Sequence[int]) -> HeadShard:
    """Which KV heads of these full-attention layers this process has; `config` is the decoder's. A model that is split
    in another way than by equal numbers of KV heads, with the query heads that share them, is refused."""
    size, kind = processes(model), config.model_type
    check_sharding(model, kind, by_heads=size > 1)
    if distributed.is_available() and distributed.is_initialized():
        there = {getattr(module, "layer_idx", None) for module in model.modules()} - {None}
        if there and (gone := sorted(set(layers) - there)):
            _refuse(kind, f"pipeline parallelism: layers {', '.join(map(str, gone))} are not in this one")
    if size == 1 or not layers:  # nothing of a cache is split
        return UNSHARDED
    where = f"tensor parallelism over {size}, where"
    _, heads, kv_heads, _ = sizes(config)
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


def processes(model: PreTrainedModel | None) -> int:
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
