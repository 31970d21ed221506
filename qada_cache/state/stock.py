"""Checks of transformers' own layers from a file, and of all layers together: they have to hold one text."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .layer import QAdALayer

COUNTED = "cumulative_length"  # the one number of such a layer that a text changes


def check_stock(layer: Any, record: dict[str, Any]) -> None:
    """Raise ValueError unless `record` has possible attributes of `layer`, a new and empty one."""
    fresh, kind = vars(layer), type(layer).__name__

    def require(fits: Any, what: str) -> None:
        if not fits:
            raise ValueError(f"a {kind} cannot hold {what}")

    for name, made in fresh.items():
        kept = record.get(name)
        if isinstance(made, Tensor):
            require(isinstance(kept, Tensor) and made.equal(kept.to(made.device)), f"{name} of {kept}")
        elif isinstance(made, dict):
            require(isinstance(kept, dict) and made.keys() == kept.keys(), f"{name} of {kept}")
        elif type(made) is int and name != COUNTED:
            require(kept == made, f"{name} of {kept}, which is {made}")
    keys, values = record.get("keys"), record.get("values")
    if isinstance(keys, Tensor) and isinstance(values, Tensor):
        require(keys.shape[:3] == values.shape[:3], f"keys {list(keys.shape)} beside values {list(values.shape)}")
        seen = record.get(COUNTED, keys.shape[2])
        require(type(seen) is int and seen >= keys.shape[2], f"{keys.shape[2]} of {seen} tokens")
        least = min(seen, fresh.get("sliding_window", 0) - 1) if fresh.get("sliding_window", 0) > 1 else seen
        enough = keys.shape[2] == least or (record.get("record_past") and keys.shape[2] > least)
        require(enough, f"{keys.shape[2]} of {seen} tokens, where a window has {least}")
    for place, size in (record.get("conv_kernel_size") or {}).items():
        state = record["conv_states"][place]
        fits = state is None or state.shape[-1] == size or record.get("record_past")
        require(fits, f"conv_kernel_size of {size} beside another state")


def check_alike(layers: Sequence[Any]) -> None:
    """Raise ValueError unless these layers from a file hold the same tokens of as many rows."""
    ours = [layer for layer in layers if isinstance(layer, QAdALayer) and layer.store is not None]
    texts = [(layer.seen, layer.store.lengths, layer.store.flushed) for layer in ours if layer.store is not None]
    if any(text != texts[0] for text in texts) or not all(layer.padding.equals(ours[0].padding) for layer in ours):
        raise ValueError(f"its layers hold different tokens: {texts}")
    rows = {len(lengths) for _, lengths, _ in texts} | {len(state) for layer in layers for state in _held_states(layer)}
    seen = {layer.get_seq_length() for layer in layers if hasattr(layer, COUNTED)} | {seen for seen, _, _ in texts}
    if len(rows) > 1 or len(seen) > 1:
        raise ValueError(f"its layers hold different texts: {sorted(seen)} tokens in {sorted(rows)} rows")


def _held_states(layer: Any) -> list[Tensor]:
    """Those of a layer of transformers' own, a row for each of the batch."""
    if isinstance(layer, QAdALayer):
        return []
    held = [getattr(layer, name, None) for name in ("keys", "values")]
    for name in ("conv_states", "recurrent_states"):
        held += (getattr(layer, name, None) or {}).values()
    return [state for state in held if isinstance(state, Tensor) and state.dim() > 1]
