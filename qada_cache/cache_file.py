"""A QAdACache as one safetensors file, and back."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from .criterion import StaticHeads
from .files import tensor_file, weights
from .files.private_map import PrivateMap
from .key_moments.defaults import together
from .key_moments.key_moments import KeyMoments
from .key_moments.served import served_config
from .key_moments.sharding import check_undivided, processes
from .state.counters import Counters
from .state.layer import QAdALayer
from .state.shared import Shared
from .storage.padding import NONE, Padding

KIND = "qada-cache"
_BULK = ("bulk_keys", "bulk_values")
_OPTIONS = (
    "threshold",
    "sink_tokens",
    "local_tokens",
    "group_rule",
    "update_moments",
    "token_threshold",
    "sketch_bits",
    "offloading",
    "device_budget",
    "audit_every",
)
_IDENTITY = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "vocab_size",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "linear_conv_kernel_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


def _identity(config: PreTrainedConfig) -> dict[str, Any]:
    """What must agree for keys of one model to mean anything to another."""
    config = served_config(config)
    return {name: getattr(config, name, None) for name in _IDENTITY}


def write(path: str | os.PathLike, shared: Shared, layers: Sequence[Any]) -> None:
    """Write what the layers of a cache hold, and share; see `QAdACache.save`."""
    options, served, tensors = shared.options, shared.model, {}
    check_undivided(served.shard.size)
    state: dict[str, Any] = {"options": {name: getattr(options, name) for name in _OPTIONS}}
    state["model"] = _identity(served.config)
    model = served.get()
    state["weights"] = None if model is None else weights.sample(model)
    if isinstance(options.criterion, StaticHeads):
        tensors["static_heads"] = options.criterion.long_context
    else:
        state["criterion"] = options.criterion
    state["current_moments"] = options.current_moments
    if options.other_moments is not None:
        tensors |= options.other_moments.tensors()
        state["moments"] = options.other_moments.header()
    stores = [layer.store for layer in layers if isinstance(layer, QAdALayer) and layer.store is not None]
    dtypes = {dtype for store in stores for dtype in store.dtypes} | {served.dtype} - {None}
    state["dtypes"] = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)  # of tokens, and of their model
    state["layers"] = []
    for index, layer in enumerate(layers):
        kept = _layer_state(layer) if isinstance(layer, QAdALayer) else vars(layer)
        state["layers"].append(_encode(kept, f"layer {index}", tensors))
    tensor_file.write(path, KIND, tensors, state)


@dataclass(frozen=True, eq=False)
class Saved:
    """What a file holds.

    Attributes:
        options: the keywords of `QAdACache` that make a cache like the one saved.
        layers, tensors: what its layers held.
        source: the map of the file that the bulks' tensors are views of; None: they are no views.
    """

    options: dict[str, Any]
    layers: list[Any]
    tensors: dict[str, Tensor]
    source: PrivateMap | None

    def restore(self, layers: Sequence[Any], device: torch.device) -> None:
        """Have new layers of that cache hold, on `device`, what the saved ones held."""
        padding = NONE
        for layer, kept in zip(layers, self.layers, strict=True):
            decoded = _decode(kept, self.tensors, device)
            if isinstance(layer, QAdALayer):
                _restore_layer(layer, decoded, self.source)
                if layer.padding.equals(padding):
                    layer.padding = padding  # layers share one again, see `Padding`
                padding = layer.padding
            else:
                vars(layer).update(decoded)


def read(path: str | os.PathLike, *, model: PreTrainedModel | None, config: PreTrainedConfig | None) -> Saved:
    """Read what `write` wrote; see `QAdACache.load`.

    Raises:
        FileNotFoundError, ValueError, NotImplementedError: as there. What is not given of the model is not compared.
    """
    if model is not None:
        check_undivided(processes(model))
    tensors, state, source = tensor_file.mapped(path, KIND)
    if source is not None:
        tensors = {name: tensor if name.endswith(_BULK) else tensor.clone() for name, tensor in tensors.items()}
    _check_model(path, state, model, config)
    criterion = state["criterion"] if "criterion" in state else StaticHeads(tensors["static_heads"])
    other = KeyMoments.from_file(tensors, state["moments"]) if "moments" in state else None
    moments = together(state["current_moments"], other)
    return Saved({"criterion": criterion, "moments": moments, **state["options"]}, state["layers"], tensors, source)


def _check_model(
    path: str | os.PathLike, state: dict[str, Any], model: PreTrainedModel | None, config: PreTrainedConfig | None
) -> None:
    """Raise ValueError if the file is of another model."""
    given = model.config if model is not None else config
    if given is not None:
        for name, value in _identity(given.get_text_config(decoder=True)).items():
            if state["model"][name] != value:
                raise ValueError(
                    f"{path} was saved for another model: its {name} is {state['model'][name]!r}, "
                    f"this model's is {value!r}"
                )
    if model is None:
        return
    dtype, dtypes = str(model.dtype).removeprefix("torch."), state["dtypes"]
    if dtypes and dtype not in dtypes:  # none are known of an empty cache that was built with a config
        raise ValueError(
            f"{path} was saved for a model in {' or '.join(dtypes)}, this model is in {dtype}: load it with a model of "
            "that dtype"
        )
    if state["weights"] is not None and not weights.same(state["weights"], weights.sample(model)):
        raise ValueError(f"{path} was saved for another model: its config is this model's, and its weights are not")


def _layer_state(layer: QAdALayer) -> dict[str, Any]:
    """Everything `_restore_layer` needs. The unused room of buffers is left out, but for the bulk's: its tokens are
    read where they lie in the file, and others may follow them."""
    layer.check_settled()
    if layer.store is None:
        return {}
    store = layer.store
    state = {"seen": layer.seen, "padding": layer.padding.records, **layer.counters.record}
    used = slice(0, store.sinks + store.end)
    state |= {"near_keys": store.near_keys[:, :, used], "near_values": store.near_values[:, :, used]}
    bulk, stored = store.bulk, max(store.bulk.lengths)
    room = (0, 0, 0, bulk.capacity - stored if stored else 0)  # whose content nobody has set
    kept = (functional.pad(tensor[:, :, :stored], room) for tensor in (bulk.keys, bulk.values))
    state |= dict(zip(_BULK, kept, strict=True))
    state |= {"lengths": store.lengths, "flushed": store.flushed, "decoded": store.decoded}
    if store.moments is not None:
        state |= {"count": store.moments.count, "mean": store.moments.mean, "covariance": store.moments.covariance}
    if store.sketch is not None:
        state |= store.sketch.record
    return state


def _restore_layer(layer: QAdALayer, state: dict[str, Any], source: PrivateMap | None) -> None:
    if not state:
        return
    layer.lazy_initialization(state["near_keys"], state["near_values"])
    store = layer.store
    assert store is not None
    columns = state["near_keys"].shape[2]
    store.reserve(columns - store.sinks)
    store.near_keys[:, :, :columns] = state["near_keys"]
    store.near_values[:, :, :columns] = state["near_values"]
    store.end = columns - store.sinks
    store.lengths, store.flushed = state["lengths"], state["flushed"]
    store.decoded = state["decoded"]
    keys, values = (state[name] for name in _BULK)
    stored = [max(gone - store.sinks, 0) for gone in store.flushed]
    if source is not None and store.bulk.mappable and any(stored):
        store.bulk.adopt(source, keys, values, lengths=stored)
    else:
        for row, tokens in enumerate(stored):
            rows = slice(row, row + 1)
            store.bulk.append(rows, keys[rows, :, :tokens], values[rows, :, :tokens])
    if store.moments is not None:
        store.moments.restore(state["count"], state["mean"], state["covariance"])
    if store.sketch is not None:
        store.sketch.restore(state, store.bulk)
    layer.seen, layer.padding = state["seen"], Padding.from_records(state["padding"])
    layer.counters = Counters.from_record(state)


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON, its tensors moved to `tensors` under names that start with `path`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, (list, tuple)):
        return [_encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {"dict": [[key, _encode(item, f"{path}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise NotImplementedError(f"QAdACache.save cannot write {path}, a {type(value).__name__}")


def _decode(value: Any, tensors: dict[str, Tensor], device: torch.device) -> Any:
    """The inverse of `_encode`, every tensor on `device`."""
    if isinstance(value, list):
        return [_decode(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content].to(device)
    if kind == "dict":
        return {key: _decode(item, tensors, device) for key, item in content}
    return getattr(torch, content) if kind == "dtype" else device
