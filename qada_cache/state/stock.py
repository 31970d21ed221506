"""Checks the attributes that a file sets on a stock layer, one of transformers' own: those that a new layer of its kind
has, and no others, each of the same type."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

COUNTED = "cumulative_length"  # the only numeric attribute of such a layer that changes with its tokens
# Attributes that a layer gets with its first tokens.
_LATER = {
    **{"device": torch.device, "dtype": torch.dtype},
    **{"indexer_device": torch.device, "indexer_dtype": torch.dtype},
}
# Types of attributes that are None at first and later no tensor.
_FOLLOWING = {"conv_kernel_size": int, **_LATER}
_STATES = {"conv_states": "is_conv_states_initialized", "recurrent_states": "is_recurrent_states_initialized"}


def require_fit(holder: str, fits: Any, what: str, wanted: str = "") -> None:
    """Raise ValueError, which says that `holder` cannot hold `what`, unless it fits."""
    if not fits:
        raise ValueError(f"{holder} cannot hold {what}" + (f", which should be {wanted}" if wanted else ""))


def describe_attribute(saved: Any) -> str:
    """A few words about an attribute. They need no values of a tensor, for which a GPU would have to finish."""
    if isinstance(saved, Tensor):
        return f"{saved.dtype} {list(saved.shape)}"
    return f"a {type(saved).__name__}" if isinstance(saved, (dict, list)) else f"{saved!r:.80}"


def check_stock(layer: Any, record: dict[str, Any]) -> None:
    """Raise ValueError unless `record` has the attributes of `layer`, a new and empty one, and no others, with values
    that a layer of its class may have."""
    fresh, require = vars(layer), partial(require_fit, f"a {type(layer).__name__}")
    for name in record:
        allowed = name in fresh or (name in _LATER and not hasattr(layer, name))
        require(allowed, f"an attribute {name!r}", f"one of {', '.join(fresh)}")
    for name, initial in fresh.items():
        require(name in record, f"no {name}")
        _check_kind(require, name, initial, record[name])
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


def _check_kind(require: Any, name: str, initial: Any, saved: Any) -> None:
    """Raise ValueError unless a layer whose attribute was `initial` when new may have `saved` later."""
    what = f"{name} of {describe_attribute(saved)}"
    if isinstance(initial, dict):
        require(isinstance(saved, dict) and initial.keys() == saved.keys(), what)
        for place, each in initial.items():
            _check_kind(require, name, each, saved[place])
    elif initial is None:
        kind = _FOLLOWING.get(name, Tensor)
        require(saved is None or (isinstance(saved, kind) and type(saved) is not bool), what, f"a {kind.__name__}")
    elif isinstance(initial, Tensor):
        same = isinstance(saved, Tensor) and saved.dtype == initial.dtype and initial.equal(saved.to(initial.device))
        require(same, what)
    else:
        changes = type(initial) is bool or name == COUNTED
        wanted = str(type(initial) if changes else initial)
        require(type(saved) is type(initial) and (changes or saved == initial), what, wanted)


def _check_keys(require: Any, fresh: dict[str, Any], record: dict[str, Any]) -> None:
    """Raise ValueError unless keys and values have the tokens that the layer counts, or both are missing."""
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
