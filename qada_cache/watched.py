"""A DynamicCache that notices when a forward pass was interrupted, so that its layers hold different tokens."""

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .layer import QAdALayer
from .policy import Policy


class WatchedCache(DynamicCache):
    """Every call of a layer is compared with those before it, see `Progress`.

    Linear layers may write to their states in place: before they do, they ask for them, or whether there are any.
    """

    _policy: Policy

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers' own."""
        self._comes_to(layer_idx, ("conv", state_idx))
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """As transformers' own."""
        self._comes_to(layer_idx, ("recurrent", state_idx))
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """As transformers' own."""
        self._comes_to(layer_idx, ("conv asked for", state_idx))
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """As transformers' own."""
        self._comes_to(layer_idx, ("recurrent asked for", state_idx))
        return super().get_recurrent_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """As transformers' own."""
        if layer_idx is not None and state_idx is None:
            self._comes_to(layer_idx, "previous asked for")
        return super().has_previous_state(layer_idx, state_idx)

    def _comes_to(self, layer_idx: int, event: Hashable) -> None:
        self._check_order(layer_idx, event)
        self._policy.progress.come(layer_idx, event)

    def _check_order(self, layer_idx: int, event: Hashable) -> None:
        """Raise if a forward pass that comes to this layer left something undone before it."""
        progress = self._policy.progress
        if progress.begins_anew(layer_idx, event):
            self._check_whole()
        elif layer_idx > progress.reached:
            self._check_handed_back()

    def _check_handed_back(self) -> None:
        """Raise if keys handed out by the layer reached last did not come to our attention function."""
        reached = self._policy.progress.reached
        if reached >= 0 and isinstance(layer := self.layers[reached], QAdALayer):
            layer.check_settled()

    def _check_whole(self) -> None:
        """Raise unless the last forward pass came through all attention layers: else they hold different tokens."""
        self._check_handed_back()
        if 0 <= (reached := self._policy.progress.reached) < self._last_layer():
            raise RuntimeError(
                f"a forward pass was interrupted after layer {reached}, so layers hold different tokens: "
                "call reset() and read the prompt again"
            )

    def _last_layer(self) -> int:
        """The last layer that calls in every pass."""
        # In older transformers feed-forward layers have a cache of the linear kind, which they never call.
        types = getattr(self._policy.config, "layer_types", None) or [""] * len(self.layers)
        calling = [
            index
            for index, (layer, kind) in enumerate(zip(self.layers, types, strict=False))
            if isinstance(layer, (CacheLayerMixin, LinearAttentionCacheLayerMixin)) and kind not in ("mlp", "moe")
        ]
        return max(calling, default=-1)
