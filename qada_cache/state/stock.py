"""What a file may put into one of transformers' layers: its own attributes, each of the kind that stands there."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

COUNTED = "cumulative_length"  # the one number of such a layer that a text changes
# Attributes that a layer has from its first tokens on.
_LATER = {
    **{"device": torch.device, "dtype": torch.dtype},
    **{"indexer_device": torch.device, "indexer_dtype": torch.dtype},
}
# What comes instead of None if it is no tensor.
_FOLLOWING = {"conv_kernel_size": int, **_LATER}
_STATES = {"conv_states": "is_conv_states_initialized", "recurrent_states": "is_recurrent_states_initialized"}


def require_fit(holder: str, fits: Any, what: str, wanted: str = "") -> None:
    """Raise ValueError, which says that `holder` cannot hold `what`, unless it fits."""
    if not fits:
        raise ValueError(f"{holder} cannot hold {what}" + (f", which should be {wanted}" if wanted else ""))


def check_stock(layer: Any, record: dict[str, Any]) -> None:
    """Raise ValueError unless `record` has the attributes of `layer`, a new and empty one, and no others, with values
    that such a layer may come to hold."""
    fresh, require = vars(layer), partial(require_fit, f"a {type(layer).__name__}")
    for name in record:
        own = name in fresh or (name in _LATER and not hasattr(layer, name))
        require(own, f"an attribute {name!r}", f"one of {', '.join(fresh)}")
    for name, made in fresh.items():
        require(name in record, f"no {name}")
        _check_kind(require, name, made, record[name])
    for name in record.keys() - fresh.keys():
        _check_kind(require, name, None, record[name])
    _check_keys(require, fresh, record)
    for name, flags in _STATES.items():
        for place, state in record.get(name, {}).items():
            require(record[flags][place] is (state is not None), f"{flags} of {record[flags]} beside {name}")
            require(state is None or state.is_floating_point(), f"{name} in another dtype", "a floating one")
    for place, size in record.get("conv_kernel_size", {}).items():
        state = record["conv_states"][place]
        fits = state is None or state.shape[-1] == size or record["record_past"]
        require(fits and (state is None) is (size is None), f"conv_kernel_size of {size} beside another state")


def _check_kind(require: Any, name: str, made: Any, kept: Any) -> None:
    """Raise ValueError unless `kept` may stand where a new layer has `made`."""
    what = f"{name} of {kept!r:.80}"
    if isinstance(made, dict):
        require(isinstance(kept, dict) and made.keys() == kept.keys(), what)
        for place, each in made.items():
            _check_kind(require, name, each, kept[place])
    elif made is None:
        kind = _FOLLOWING.get(name, Tensor)
        require(kept is None or (isinstance(kept, kind) and type(kept) is not bool), what, f"a {kind.__name__}")
    elif isinstance(made, Tensor):
        require(isinstance(kept, Tensor) and kept.dtype == made.dtype and made.equal(kept.to(made.device)), what)
    else:
        changes = type(made) is bool or name == COUNTED
        require(type(kept) is type(made) and (changes or kept == made), what, str(type(made) if changes else made))


def _check_keys(require: Any, fresh: dict[str, Any], record: dict[str, Any]) -> None:
    """Raise ValueError unless keys and values are of as many tokens as the layer counts, or there are none."""
    keys, values = record.get("keys"), record.get("values")
    if keys is None or values is None:
        initialized = record.get("is_initialized", False)
        require(keys is values, "keys without values, or values without keys")
        require(initialized in (False, fresh.get("is_initialized")), f"is_initialized of {initialized} without keys")
        require(not record.get(COUNTED), f"{record.get(COUNTED)} tokens without keys")
        return
    require(record["is_initialized"], "keys that are not initialized")
    require(isinstance(record.get("device"), torch.device), "keys without a device")
    shapes = f"keys {keys.dtype} {list(keys.shape)} beside values {values.dtype} {list(values.shape)}"
    fits = keys.dim() == values.dim() == 4 and keys.shape[:3] == values.shape[:3]
    require(fits and keys.is_floating_point() and values.is_floating_point(), shapes)
    seen = record.get(COUNTED, keys.shape[2])
    require(type(seen) is int and seen >= keys.shape[2], f"{keys.shape[2]} of {seen} tokens")
    window = fresh.get("sliding_window", 0)
    least = min(seen, window - 1) if window > 1 else seen
    enough = keys.shape[2] == least or (record.get("record_past") and keys.shape[2] > least)
    require(enough, f"{keys.shape[2]} of {seen} tokens, where a window has {least}")
