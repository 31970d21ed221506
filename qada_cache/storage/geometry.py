"""Which tokens of the local buffer each query sees: computed by the first layer of a pass for all."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, compress
from operator import mul, sub
from typing import Any

import torch
from torch import Tensor

from ..kernels.decode_call import Rows
from ..kernels.query_adaptive import Masks
from ..key_moments.rotation import round_length

PENDING_SHARE = 4  # see `Geometry.own_log_tokens`


@dataclass(frozen=True, eq=False)
class Geometry(Masks):
    """Masks over the local buffer for the queries of one call; `rows` is 1 when all rows are alike."""

    stored: Tensor  # int64 [rows, 1, queries], of `bulk_tokens` the ones that have left the local buffer
    # Bulk lengths of `decided` queries, rounded for another prompt's moments (`rotation.round_length`), each once,
    # ascending; nearly always one.
    distinct_moment_lengths: tuple[int, ...]
    row_lengths: tuple[int, ...]  # likewise of each row's last query, decided or not; one for all rows if they agree
    decisions: int  # how many (row, query) pairs `decided` holds over the whole batch
    dense_tokens: int  # in the bulks of rows with such a query, over the whole batch

    def __deepcopy__(self, memo: dict) -> "Geometry":
        return self  # nothing in it ever changes

    @cached_property
    def log_tokens(self) -> Tensor:
        """The logarithm of `bulk_tokens`, float32 `[rows, 1, 1, queries]`; `-inf` without a bulk."""
        return self.bulk_tokens.unsqueeze(2).float().log()

    @cached_property
    def own_log_tokens(self) -> Tensor:
        """As `log_tokens`, but `+inf` where more than one in `PENDING_SHARE` of a bulk is pending: too many for moments
        of stored keys to stand for. Such a bulk is short, and is read."""
        pending = self.bulk_tokens - self.stored
        return self.log_tokens.masked_fill((PENDING_SHARE * pending > self.bulk_tokens).unsqueeze(2), torch.inf)

    @cached_property
    def rows(self) -> Rows:
        """The part of a call of one query a row that decode kernels take, for all layers."""
        return Rows(self.local.flatten(1), self.pending.flatten(1), self.stored.flatten(), self.decided.flatten())


def _see(
    total: int, gone: int, later: list[int], *, end: int, sinks: int, window: int
) -> tuple[list[bytes], list[bytes], list[int]]:
    """The local and the pending columns of queries with so many tokens behind them in their row, a bool each, and how
    many are pending. Of `total` tokens `gone` are flushed, and the newest is in the last of `end` recent columns."""
    held, first = min(gone, sinks), end - (total - gone)  # flushed sinks; the row's first recent column
    far = min(max(first, end - total + sinks), end)  # where those begin that are no sinks
    near, none = b"\1" * held + bytes(sinks - held + first) + b"\1" * (far - first), bytes(sinks + far)
    older, newer = b"\1" * end + bytes(window + end), bytes(end) + b"\1" * window + bytes(end)  # than a window's start
    local, pending, counts = [], [], []
    for behind in later:
        last = max(first, end - behind)  # where the query's tokens end
        start, shift = min(far, last), end + window - last
        local.append(near[: sinks + start] + newer[start + shift : end + shift])
        pending.append(none[: sinks + start] + older[start + shift : end + shift])
        counts.append(max(0, last - window - start))
    return local, pending, counts


class ForwardPass:
    """The geometry of the pass under way, found by its first layer for all."""

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window  # tokens
        self.is_prefill_chunk = False  # whether it is of `generate`'s prompt: exact, whatever its length
        self._geometry: tuple[Any, Geometry] | None = None

    def geometry(
        self,
        *,
        lengths: list[int],  # real tokens of each row, the call's own included
        flushed: list[int],  # of these, the oldest ones, that have been flushed to sinks and bulk
        end: int,  # recent columns in use; they are right-aligned, so column `end - 1` is every row's newest token
        queries: int,  # tokens of the call, padding included
        valid: Tensor | None,  # bool [batch, queries] on the host, False for padding; None when every token is real
        device: torch.device,  # where the masks go
    ) -> Geometry:
        """Masks for a call whose tokens have already been appended: layers move in lockstep, so they share them."""
        # By content, not identity: a layer whose state differs must get its own masks.
        key = (tuple(lengths), tuple(flushed), end, queries, None if valid is None else valid.numpy().tobytes(), device)
        if self._geometry is not None and self._geometry[0] == key:
            return self._geometry[1]
        alike = valid is None and len(set(lengths)) == 1 and len(set(flushed)) == 1
        rows = 1 if alike else len(lengths)
        stands_for = len(lengths) // rows  # rows of the batch
        local, pending = bytearray(), bytearray()
        counts: tuple[list[list[int]], ...] = [], [], []  # by row and query
        bulk_tokens, decided, stored = counts
        real = [[True] * queries] * rows if valid is None else valid.tolist()
        for total, gone, shown in zip(lengths[:rows], flushed[:rows], real, strict=True):
            # A padding query borrows the position of the real one before it: its output is finite and unused.
            new = sum(shown)
            later = [new - count for count in accumulate(shown)]
            seen = _see(total, gone, later, end=end, sinks=self.sinks, window=self.window)
            tokens = [max(0, total - self.sinks - self.window - behind) for behind in later]
            local += b"".join(seen[0])
            pending += b"".join(seen[1])
            bulk_tokens.append(tokens)
            decided.append([bulk > 0 and there for bulk, there in zip(tokens, shown, strict=True)])
            stored.append(list(map(sub, tokens, seen[2])))
        masks = [torch.frombuffer(mask, dtype=torch.bool).view(rows, 1, queries, -1) for mask in (local, pending)]
        tensors = [*masks, *(torch.tensor(count, device="cpu").unsqueeze(1) for count in counts)]
        # A blocking copy would wait for everything the accelerator still has to do.
        near, waiting, far, decides, left = (
            tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors
        )
        row_lengths = tuple(round_length(max(1, row[-1])) for row in bulk_tokens)
        deciding = chain.from_iterable(map(compress, bulk_tokens, decided))
        made = Geometry(
            *(near, waiting, far, decides, left),
            distinct_moment_lengths=tuple(sorted(set(map(round_length, set(deciding))))),
            row_lengths=row_lengths[:1] if len(set(row_lengths)) == 1 else row_lengths,
            decisions=sum(map(sum, decided)) * stands_for,
            dense_tokens=sum(max(map(mul, *row)) for row in zip(stored, decided, strict=True)) * stands_for,
        )
        self._geometry = (key, made)
        return made
