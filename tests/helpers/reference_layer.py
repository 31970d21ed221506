"""One layer of a query-adaptive cache in float64, built on `reference.py`, with state and operations of a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from reference import (
    LOCAL_TOKENS,
    SINK_TOKENS,
    Moments,
    bulk_indices,
    key_moments,
    qada_attention,
    rows_from_padding,
    visible_tokens,
)
from rounding import deviation, naive_attention
from torch import Tensor


class ReferenceLayer:
    """One layer's cache and attention: the real keys and values of each row in float64, nothing clever.

    `keys[row] [Hkv, T_row, d]`, `values[row]`; `history[row]`: validity of each logical position, padding
    included; `frozen_counts[row]`: bulk tokens at the end of the last exact call (fewer after a crop), used
    when `update_moments` is False. `options` are those of `decide` (criterion, threshold, moments, ...).
    """

    def __init__(
        self,
        *,
        scaling: float,
        update_moments: bool = True,
        sink_tokens: int = SINK_TOKENS,
        local_tokens: int = LOCAL_TOKENS,
        **options: Any,
    ) -> None:
        self.scaling, self.update_moments, self.options = scaling, update_moments, options
        self.sizes = {"sink_tokens": sink_tokens, "local_tokens": local_tokens}
        self.reset()

    def reset(self) -> None:
        """Empty the cache; the next update may have another batch size."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.history: list[list[bool]] = []
        self.frozen_counts: list[int] = []

    @property
    def length(self) -> int:
        """Logical positions, padding included, the same for every row."""
        return len(self.history[0]) if self.history else 0

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return [sum(history) for history in self.history]

    @property
    def bulk_counts(self) -> list[int]:
        """Bulk tokens of each row."""
        return [max(0, length - self.sizes["local_tokens"]) for length in self.lengths]

    def update(
        self,
        keys: Tensor,
        values: Tensor,
        queries: Tensor,
        valid: Tensor | None = None,
        *,
        moments_of: Callable[[int], dict[str, int]] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append N positions and attend from them; returns as `qada_attention`.

        `keys [B, Hkv, N, d]`, `values [B, Hkv, N, dv]`, `queries [B, Hq, N, d]`, `valid` bool `[B, N]` (None:
        all). Exact when the cache was empty or N exceeds the window, else query-adaptive. `moments_of` is as for
        `qada_attention`. Without it moments cover the whole bulk, or, if frozen, the bulk of the last exact call.
        """
        batch, count = keys.shape[0], keys.shape[2]
        exact = self.length == 0 or count > self.sizes["local_tokens"] - self.sizes["sink_tokens"]
        valid = torch.ones(batch, count, dtype=torch.bool) if valid is None else valid.to("cpu", torch.bool)
        new_keys = rows_from_padding(tensor=keys.cpu(), valid=valid)
        new_values = rows_from_padding(tensor=values.cpu(), valid=valid)
        if not self.history:
            self.keys, self.values = [key[:, :0] for key in new_keys], [value[:, :0] for value in new_values]
            self.history, self.frozen_counts = [[] for _ in range(batch)], [0] * batch
        before = torch.tensor(self.lengths)[:, None]
        positions = torch.where(valid, before + valid.cumsum(dim=1) - 1, -1)
        self.keys = [torch.cat(pair, dim=1) for pair in zip(self.keys, new_keys, strict=True)]
        self.values = [torch.cat(pair, dim=1) for pair in zip(self.values, new_values, strict=True)]
        self.history = [old + new for old, new in zip(self.history, valid.tolist(), strict=True)]
        answer = qada_attention(
            queries=queries.cpu(), query_positions=positions, keys=self.keys, values=self.values, exact=exact,
            scaling=self.scaling, moments_of=moments_of or self._frozen, **self.sizes, **self.options,
        )  # fmt: skip
        if exact:
            self.frozen_counts = self.bulk_counts
        return answer

    def _frozen(self, row: int) -> dict[str, int]:
        return {} if self.update_moments else {"frozen_count": self.frozen_counts[row]}

    def naive_outputs(self, queries: Tensor, local: Tensor, dtype: torch.dtype, valid: Tensor | None = None) -> Tensor:
        """`naive_attention` in `dtype` for the queries of the latest update, under its `local` flags.

        Arguments as given to and returned by that `update` -> `[B, Hq, N, dv]`: the `lowp` of `error_budget`.
        """
        return self._attend(partial(naive_attention, dtype=dtype), queries, local, dtype, valid)

    def deviations(self, queries: Tensor, local: Tensor, valid: Tensor | None = None) -> Tensor:
        """`deviation` for the same arguments: the `deviations` of `error_budget`."""
        return self._attend(deviation, queries, local, torch.float64, valid)

    def _attend(
        self, attention: Callable[..., Tensor], queries: Tensor, local: Tensor, dtype: torch.dtype, valid: Tensor | None
    ) -> Tensor:
        batch, heads, count, _ = queries.shape
        outputs = torch.zeros(batch, heads, count, self.values[0].shape[-1], dtype=dtype)
        for row in range(batch):
            kept = torch.arange(count) if valid is None else valid[row].cpu().nonzero()[:, 0]
            length = self.lengths[row]
            masks = [
                visible_tokens(local=local[row, :, index], position=position, tokens=length, **self.sizes)
                for position, index in enumerate(kept.tolist(), start=length - len(kept))
            ]
            if masks:
                outputs[row, :, kept] = attention(
                    query=queries[row, :, kept].cpu()[None], keys=self.keys[row][None], values=self.values[row][None],
                    scaling=self.scaling, mask=torch.stack(masks, dim=1),
                )[0]  # fmt: skip
        return outputs

    def moments(self, row: int, count: int | None = None) -> Moments:
        """Mean `[Hkv, d]` and covariance `[Hkv, d, d]` of the row's bulk, or of its first `count` tokens."""
        bulk = bulk_indices(self.lengths[row] - 1, **self.sizes)[:count]
        heads = [key_moments(keys=head_keys[bulk]) for head_keys in self.keys[row]]
        return torch.stack([mean for mean, _ in heads]), torch.stack([covariance for _, covariance in heads])

    def crop(self, count: int) -> None:
        """Remove the last `count` logical positions, padding included, from every row."""
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot crop {count} of {self.length} positions")
        kept = self.length - count
        self.history = [history[:kept] for history in self.history]
        self.keys = [key[:, :length] for key, length in zip(self.keys, self.lengths, strict=True)]
        self.values = [value[:, :length] for value, length in zip(self.values, self.lengths, strict=True)]
        self.frozen_counts = [min(pair) for pair in zip(self.frozen_counts, self.bulk_counts, strict=True)]

    def select_rows(self, index: Tensor) -> None:
        """Keep these rows, in this order; `index` integers, repeats allowed, or a bool mask."""
        rows = torch.arange(len(self.history))[index.cpu()].tolist()
        self.keys, self.values = [self.keys[row] for row in rows], [self.values[row] for row in rows]
        self.history = [list(self.history[row]) for row in rows]
        self.frozen_counts = [self.frozen_counts[row] for row in rows]

    def reorder(self, index: Tensor) -> None:
        """Beam search: row i becomes the former row `index[i]`."""
        self.select_rows(index)

    def repeat(self, count: int) -> None:
        """Repeat each row `count` times, copies side by side (`repeat_interleave`)."""
        self.select_rows(torch.arange(len(self.history)).repeat_interleave(count))
