"""Layers without keys of their own: they read the keys of an earlier layer (Gemma 3n, some of Gemma 4)."""

from typing import Any

from transformers import PreTrainedConfig

READS = "reuse"  # transformers' mode of a layer that reads another layer's keys


def find_readers(config: PreTrainedConfig) -> dict[int, int]:
    """The layers of full attention that read another layer's keys, and that layer: the last one of their type that has
    any. NotImplementedError, if the config shares in another way."""
    types: list[str] = list(getattr(config, "layer_types", None) or ())
    modes = _list_modes(config, len(types))
    if READS not in modes and not getattr(config, "num_kv_shared_layers", 0):
        return {}
    own = {kind: index for index, (kind, mode) in enumerate(zip(types, modes, strict=True)) if mode != READS}
    known = {mode for mode in modes if mode is not None} <= {READS, "store"} and own.keys() == set(types)
    if not known or getattr(config, "kv_lora_rank", None):
        raise NotImplementedError(
            f"QAdACache does not know how layers of {config.model_type} share another layer's keys: use "
            f"transformers.DynamicCache for {config.model_type}"
        )
    pairs = enumerate(zip(types, modes, strict=True))
    return {index: own[kind] for index, (kind, mode) in pairs if mode == READS and kind == "full_attention"}


def _list_modes(config: PreTrainedConfig, layers: int) -> list[Any]:
    """For each layer `READS`, if it reads another's keys. Older configs say how many of the last layers do."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return list(modes)
    first = layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return [None if index < first else READS for index in range(layers)]
