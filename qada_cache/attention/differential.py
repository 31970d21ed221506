"""Differential attention (DiffLlama): layers whose module attends twice to the same keys, each time with another half
of the values' heads, which stands for both halves.

A token is stored once, each key with both of its values. The module's first call computes the outputs of both calls.
If the model's own attention computes them, each call computes its own.
"""

from typing import Any

import torch
from torch import Tensor

from ..state.layer import QAdALayer


class DifferentialLayer(QAdALayer):
    """One layer whose values in the store are `[the first half's | the second half's]`, of twice the channels."""

    def reset(self) -> None:
        """Drop all tokens and counters."""
        super().reset()
        self.joined: Tensor | None = None  # values of the new tokens, as they are stored
        self.second: Tensor | None = None  # output of the second call, if the first one computed it

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `QAdALayer`, with values `[batch, kv_heads, tokens, value_dim]`."""
        halves = (half.repeat(1, 2, 1, 1) for half in value_states.chunk(2, dim=1))
        joined = torch.cat(tuple(halves), dim=-1)
        tagged, _ = super().update(key_states, joined)
        self.joined = joined
        return tagged, value_states

    def find_new(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `QAdALayer`, for the first call and for the second."""
        if self.incoming is not key or self.joined is None:
            return None
        half = self.joined.split(value.shape[3], dim=-1)[self.lent is not None]
        # Comparing waits for devices other than CPUs: there only the first tokens of a text are compared.
        known = value.device.type != "cpu" and self.seen > key.shape[2]
        return (key, self.joined) if half.shape == value.shape and (known or torch.equal(half, value)) else None

    def take_first(self, out: Tensor | None) -> Tensor | None:
        """The first half of `out` `[batch, queries, heads, 2 value_dim]`, which has both outputs side by side; the
        second is kept. None, if `out` is."""
        if out is None:
            return None
        first, self.second = out.chunk(2, dim=-1)
        return first

    def take_second(self) -> Tensor | None:
        """The output that `take_first` kept."""
        second, self.second, self.joined = self.second, None, None
        return second
