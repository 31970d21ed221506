"""Sinks and recent tokens of a layer, on the compute device."""

import torch
from torch import Tensor
from torch.nn import functional

from .padding import find_real_tokens
from .row_tensors import GROWTH
from .versioned import Buffer, Versioned

Pair = tuple[Tensor, ...]  # keys and values


class NearTokens(Versioned):
    """Sinks and recent tokens of a `TokenStore`. Sink columns come first, then recent tokens, right-aligned, so that
    the newest ones of all rows share columns. Rows are alike if their `lengths` and their `flushed` are equal."""

    near_keys, near_values = Buffer[Tensor](), Buffer[Tensor]()

    def __init__(self, keys: Tensor, values: Tensor, *, sinks: int, capacity: int, columns: int) -> None:
        """Room in `columns` for tokens like `keys` `[batch, kv_heads, *, dim]` and `values` (`value_dim`), of which
        `capacity` are recent at most."""
        batch, kv_heads = keys.shape[:2]
        self.sinks, self.capacity = sinks, capacity
        self.end = 0  # recent columns in use
        self.place: Tensor | None = None  # int64 [1]: the column that a graph under capture writes a token to
        self.lengths = [0] * batch  # tokens of each row
        self.flushed = [0] * batch  # the number of each row's oldest tokens that are no longer recent
        with torch.inference_mode(False):  # an inference tensor could not be written to outside inference mode
            # `[batch, kv_heads, columns, dim]` and `value_dim`. Zeros, not empty: masked columns meet a weight of 0,
            # and 0 times garbage could be nan.
            self.near_keys = torch.zeros(batch, kv_heads, columns, keys.shape[3], dtype=keys.dtype, device=keys.device)
            # Values have a dtype of their own: models under autocast may return float32 keys beside bfloat16 values.
            self.near_values = self.near_keys.new_zeros(batch, kv_heads, columns, values.shape[3], dtype=values.dtype)

    @property
    def batch(self) -> int:
        """Rows held."""
        return len(self.lengths)

    @property
    def newest(self) -> int | Tensor:
        """The column of the newest token; the tensor `place` instead, while a graph is captured."""
        return self.sinks + self.end - 1 if self.place is None else self.place

    @property
    def has_room(self) -> bool:
        """Whether the present buffers have room for one more token of every row."""
        return self.end < self.capacity and self.sinks + self.end < self.near_keys.shape[2]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` recent tokens."""
        columns = self.near_keys.shape[2]
        if self.sinks + tokens > columns:
            # Not `capacity` at once: a window may be much longer than the texts that are read.
            more = self.sinks + min(int(GROWTH * tokens), self.capacity) - columns
            with torch.inference_mode(False):  # as in __init__
                self.near_keys = functional.pad(self.near_keys, (0, 0, 0, more))
                self.near_values = functional.pad(self.near_values, (0, 0, 0, more))

    def trim(self, tokens: int) -> None:
        """Cut the buffers to room for `tokens` recent tokens, or for those held if they are more."""
        stop = self.sinks + max(tokens, self.end)
        with torch.inference_mode(False):  # as in __init__
            self.near_keys, self.near_values = (
                near[:, :, :stop].clone() for near in (self.near_keys, self.near_values)
            )

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Put the newest tokens of every row into their columns."""
        for near, new in ((self.near_keys, keys), (self.near_values, values)):
            old = near.narrow(2, self.sinks + self.end - new.shape[2], new.shape[2])
            old.copy_(new) if self.place is None else near.index_copy_(2, self.place, new)

    def view_near(self, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """Views of sinks and recent tokens of rows alike, `[rows, kv_heads, tokens, dim]` each."""
        sinks = slice(0, min(self.flushed[rows.start], self.sinks))
        return [(self.near_keys[rows, :, sinks], self.near_values[rows, :, sinks]), self._view_recent(rows)]

    def view_joined(self) -> list[tuple[Tensor, Tensor]]:
        """As `view_near`, for all rows, which are alike. One view if sinks and recent tokens lie side by side; empty
        views are left out."""
        held, recent = min(self.flushed[0], self.sinks), self.lengths[0] - self.flushed[0]
        spans = [(0, held), (self.sinks + self.end - recent, recent)]
        if held == self.sinks and recent == self.end:
            spans = [(0, held + recent)]
        return [(self.near_keys.narrow(2, *span), self.near_values.narrow(2, *span)) for span in spans if span[1]]

    def _list_rows(self) -> list[slice]:
        return [slice(row, row + 1) for row in range(self.batch)]

    def _group_rows(self, *per_row: list[int]) -> list[slice]:
        """Groups of rows that can be handled as one: all of them if these counts agree, else one by one."""
        return [slice(0, self.batch)] if all(len(set(counts)) == 1 for counts in per_row) else self._list_rows()

    def _view_recent(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Views of the recent tokens of rows alike."""
        start = (stop := self.sinks + self.end) - (self.lengths[rows.start] - self.flushed[rows.start])
        return self.near_keys[rows, :, start:stop], self.near_values[rows, :, start:stop]

    def _extend(self, rows: slice, new: Pair, valid: Tensor | None) -> Pair:
        """The recent tokens of rows alike, followed by the real ones of `new`; no views of the buffers."""
        real = slice(None) if valid is None else find_real_tokens(valid, rows.start, new[0].device)
        new = tuple(part[rows][:, :, real] for part in new)
        if self.lengths[rows.start] == self.flushed[rows.start]:
            return new
        return tuple(torch.cat(parts, dim=2) for parts in zip(self._view_recent(rows), new, strict=True))

    def _set_recent(self, groups: list[slice], recents: list[Pair]) -> None:
        """Replace the recent tokens of every group of rows by these, right-aligned (copies, not views of them)."""
        self.end = max(keys.shape[2] for keys, _ in recents)
        self.reserve(self.end)
        stop = self.sinks + self.end
        for rows, (keys, values) in zip(groups, recents, strict=True):
            self.near_keys[rows, :, stop - keys.shape[2] : stop] = keys
            self.near_values[rows, :, stop - values.shape[2] : stop] = values
