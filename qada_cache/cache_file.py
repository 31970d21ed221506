"""A QAdACache as one safetensors file, and back."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from .criterion import StaticHeads
from .files import tensor_file
from .key_moments import KeyMoments
from .key_moments.defaults import combine_sources
from .models import (
    find_full_attention_config,
    find_inputs_device,
    identity,
    list_layer_devices,
    list_sizes,
    rope_deltas,
)
from .models.asking import UntoldWeightsError
from .models.sharding import check_unsharded, count_processes
from .said_once import warn_once
from .state import DECIDING, LAID_OUT, Shared
from .state.layer import QAdALayer
from .state.record import BULK, RECORDS, check_alike, record_layer, restore_layer
from .state.stock import check_stock, require_fit
from .storage import transfers

logger = logging.getLogger(__name__)

KIND = "qada-cache"
# Tables and moments are tensors; the process that loads a file chooses its kernels.
_OPTIONS = tuple(name for name in DECIDING + LAID_OUT if name not in ("criterion", "moments", "kernels", "cuda_graph"))
_MAPPED = (*BULK, RECORDS)  # how names of tensors end that are used in the file itself
_KINDS: dict[str, Any] = {"model": dict, "weights": (list, type(None)), "dtypes": list, "options": dict, "layers": list}
# Fields of the config that have to agree between the model of a file and the model that loads it.
_IDENTITY = (
    *("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"),
    *("vocab_size", "rope_parameters", "layer_types", "sliding_window", "linear_conv_kernel_dim"),
    *("kv_lora_rank", "qk_rope_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
)


def _read_identity(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a config that have to agree for a cache to fit a model."""
    sizes = list_sizes(config) if config.is_heterogeneous else []
    decoder = find_full_attention_config(config)
    differing = {"sizes": list(map(list, sizes))} if len(sizes) > 1 else {}
    return {name: getattr(decoder, name, None) for name in _IDENTITY} | differing


def _sample_weights(model: PreTrainedModel) -> list[str]:
    """As `identity.sample`; empty, with a warning, if it cannot be had."""
    try:
        return identity.sample(model)
    except UntoldWeightsError as error:
        warn_once(logger, f"this model's caches are saved, and load with config= alone, without the model: {error}")
        return []


def write_cache(path: str | os.PathLike, shared: Shared, layers: Sequence[Any]) -> None:
    """Write what the layers of a cache hold, and share; see `QAdACache.save`."""
    options, managed = shared.options, shared.model
    check_unsharded(managed.shard.size)
    model, stores = managed.get(), [layer.store for layer in layers if isinstance(layer, QAdALayer) and layer.store]
    dtypes = {dtype for store in stores for dtype in store.dtypes} | {managed.dtype} - {None}
    if model is not None and model.dtype not in dtypes:  # no model would have these weights and that dtype
        raise RuntimeError(
            f"this cache was filled by its model in {' or '.join(sorted(map(str, dtypes)))}, and the model is in "
            f"{model.dtype} now: save it before the model is moved, or move the model back"
        )
    state: dict[str, Any] = {
        "options": {name: getattr(options, name) for name in _OPTIONS},
        "model": _read_identity(managed.config),
        "weights": None if model is None else _sample_weights(model),
        "current_moments": options.current_moments,
        "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in dtypes),  # of tokens, and of their model
    }
    tensors: dict[str, tensor_file.FileTensor] = {}
    if isinstance(options.criterion, StaticHeads):
        tensors["static_heads"] = options.criterion.long_context
    else:
        state["criterion"] = options.criterion
    if options.other_moments is not None:
        tensors |= options.other_moments.to_tensors()
        state["moments"] = options.other_moments.to_header()
    if shared.rope_deltas.held is not None:
        tensors[rope_deltas.NAME] = shared.rope_deltas.held
    _check_readable(layers, managed.config)
    records = [record_layer(layer) if isinstance(layer, QAdALayer) else vars(layer) for layer in layers]
    state["layers"] = [encode_record(record, f"layer {index}", tensors) for index, record in enumerate(records)]
    tensor_file.write(path, KIND, tensors, state)


def _check_readable(layers: Sequence[Any], config: PreTrainedConfig) -> None:
    """Raise NotImplementedError if `load` would refuse one of transformers' own layers, as those with other counts."""
    for layer, fresh in zip(layers, DynamicCache(config=config).layers, strict=True):
        try:
            if not isinstance(layer, QAdALayer):
                check_stock(fresh, vars(layer))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NotImplementedError(f"QAdACache.save has no format for layers of this model: {error}") from error


def read_cache(
    path: str | os.PathLike,
    make: Callable[..., Any],
    *,
    model: PreTrainedModel | None,
    config: PreTrainedConfig,
    mmap: bool,
) -> Any:
    """The inverse of `write_cache`; see `QAdACache.load`. `config` is the decoder's. `make` takes the keywords of
    `QAdACache` that make a cache like the one saved, and returns an empty one."""
    check_unsharded(count_processes(model))
    tensors, state, source = tensor_file.map_file(path, KIND, transfers.make_empty, mmap=mmap)
    if source is not None:
        tensors = {name: tensor if name.endswith(_MAPPED) else tensor.clone() for name, tensor in tensors.items()}
    for name, kind in _KINDS.items():
        if not isinstance(state, dict) or not isinstance(state.get(name, ()), kind):
            raise ValueError(f"{path} cannot be loaded: it lacks {name}, or has one of another kind")
    _check_model(path, state, model, config)
    try:
        criterion = state["criterion"] if "criterion" in state else StaticHeads(tensors["static_heads"])
        other = KeyMoments.from_file(tensors, state["moments"]) if "moments" in state else None
        moments = combine_sources(state["current_moments"], other)
        if given := state["options"].keys() ^ set(_OPTIONS):
            raise ValueError(f"it was saved with or without the options {', '.join(sorted(given))}")
        cache = make(criterion=criterion, moments=moments, **state["options"])
        if (saved := len(state["layers"])) != (own := len(cache.layers)):
            raise ValueError(f"it has {saved} layers, and this version of transformers makes {own}: save it again")
        devices = list_layer_devices(model, own)
        for layer, encoded, device in zip(cache.layers, state["layers"], devices, strict=True):
            record = decode_record(encoded, tensors, device)
            if isinstance(layer, QAdALayer):
                restore_layer(layer, record, source)
            else:
                check_stock(layer, record)
                vars(layer).update(record)
        check_alike(cache.layers)
        filled = [layer for layer in cache.layers if isinstance(layer, QAdALayer) and layer.store]
        for layer in filled:
            layer.padding = filled[0].padding  # equal ones: layers share one again, see `Padding`
        if (deltas := tensors.get(rope_deltas.NAME)) is not None:
            fits = deltas.dtype == torch.int64 and deltas.dim() == 2 and deltas.shape[1] == 1 and len(deltas) > 0
            actual = f"{rope_deltas.NAME} {deltas.dtype} {list(deltas.shape)}"  # of beams, one of each prompt's
            require_fit("the cache", fits and not cache._count_rows() % len(deltas), actual, "int64 [rows, 1]")
            cache._shared.rope_deltas.held = deltas if model is None else deltas.to(find_inputs_device(model))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} cannot be loaded: {said}") from error
    return cache


def _check_model(
    path: str | os.PathLike, state: dict[str, Any], model: PreTrainedModel | None, config: PreTrainedConfig
) -> None:
    for name, value in _read_identity(config).items():
        if (saved := state["model"].get(name)) != value:
            raise ValueError(f"{path} was saved for another model: its {name} is {saved!r}, this model's is {value!r}")
    if model is None:
        return
    dtype, dtypes = str(model.dtype).removeprefix("torch."), [*map(str, state["dtypes"])]
    if dtypes and dtype not in dtypes:  # none are known of an empty cache that was built with a config
        raise ValueError(
            f"{path} was saved for a model in {' or '.join(dtypes)}, this model is in {dtype}: load it with a model of "
            "that dtype"
        )
    if state["weights"] is None:
        return
    try:
        sample = identity.sample(model)
    except UntoldWeightsError as error:
        raise ValueError(
            f"{path} cannot be loaded with this model: {error}. If these are the weights that it was saved for, give "
            "config=model.config instead of the model"
        ) from error
    if not identity.is_same([*map(str, state["weights"])], sample):
        raise ValueError(f"{path} was saved for another model: its config is this model's, and its weights are not")


def encode_record(value: Any, path: str, tensors: dict[str, tensor_file.FileTensor]) -> Any:
    """`value` as JSON, its tensors moved to `tensors` under names that start with `path`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Tensor, tensor_file.PaddedTensor)):
        tensors[path] = value
        return {"tensor": path, **_describe(value)}
    if isinstance(value, (list, tuple)):
        return [encode_record(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {"dict": [[key, encode_record(item, f"{path}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise NotImplementedError(f"QAdACache.save cannot write {path}, a {type(value).__name__}")


def _describe(tensor: tensor_file.FileTensor) -> dict[str, Any]:
    """Dtype and shape of a tensor, as a file has them beside the tensor itself."""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def decode_record(value: Any, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """The inverse of `encode_record`, with tensors on `device`, but for the bulk's; ValueError at another shape or
    dtype, or what `encode_record` never writes."""
    if isinstance(value, list):
        return [decode_record(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor = tensors[value["tensor"]]
        if any(value.get(name) != look for name, look in _describe(tensor).items()):
            raise ValueError(f"{value['tensor']} is {_describe(tensor)}, where {value} was written")
        return tensor if value["tensor"].endswith(_MAPPED) else tensor.to(device)
    ((kind, content),) = value.items()
    if kind == "dict":
        return {key: decode_record(item, tensors, device) for key, item in content}
    if kind == "dtype" and isinstance(dtype := getattr(torch, content, None), torch.dtype):
        return dtype
    if kind != "device":
        raise ValueError(f"{kind} of {content!r:.80} is nothing that a cache holds")
    return device
