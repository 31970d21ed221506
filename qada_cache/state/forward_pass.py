"""What the queries of a pass see of each row: found by its first layer for all."""

import weakref
from itertools import accumulate, chain, compress
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..kernels.operands import Rows
from ..key_moments.rotation import round_length
from ..storage.padding import Padding


def _see(
    total: int, gone: int, later: list[int], *, end: int, sinks: int, window: int
) -> tuple[list[bytes], list[bytes]]:
    """The local and the pending columns of queries with so many tokens behind them in their row, a bool each. Of
    `total` tokens `gone` are flushed, and the newest is in the last of `end` recent columns."""
    held, first = min(gone, sinks), end - (total - gone)  # flushed sinks; the row's first recent column
    far = min(max(first, end - total + sinks), end)  # where those begin that are no sinks
    near, none = b"\1" * held + bytes(sinks - held + first) + b"\1" * (far - first), bytes(sinks + far)
    window = min(window, end)  # which may be much longer than all texts
    older, newer = b"\1" * end + bytes(window + end), bytes(end) + b"\1" * window + bytes(end)  # than a window's start
    local, pending = [], []
    for behind in later:
        last = max(first, end - behind)  # where the query's tokens end
        start, shift = min(far, last), end + window - last
        local.append(near[: sinks + start] + newer[start + shift : end + shift])
        pending.append(none[: sinks + start] + older[start + shift : end + shift])
    return local, pending


def describe_rows(
    *,
    lengths: list[int],  # real tokens of each row, the call's own included
    flushed: list[int],  # of these, the oldest ones, that have been flushed to sinks and bulk
    end: int,  # recent columns in use; they are right-aligned, so column `end - 1` is every row's newest token
    queries: int,  # tokens of the call, padding included
    valid: Tensor | None,  # bool [batch, queries] on the host, False for padding; None when every token is real
    sinks: int,
    window: int,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The tensors of `Rows`, on the host, and its numbers, of a call whose tokens have already been appended."""
    alike = valid is None and len(set(lengths)) == 1 and len(set(flushed)) == 1
    rows = 1 if alike else len(lengths)
    bulk_lengths = [max(0, gone - sinks) for gone in flushed[:rows]]
    stands_for = len(lengths) // rows  # rows of the batch
    local, pending = bytearray(), bytearray()
    bulk_tokens: list[list[int]] = []  # by row and query, as is `decided`
    decided: list[list[bool]] = []
    real = [[True] * queries] * rows if valid is None else valid.tolist()
    for total, gone, shown in zip(lengths[:rows], flushed[:rows], real, strict=True):
        # A padding query borrows the position of the real one before it: its output is finite and unused.
        new = sum(shown)
        later = [new - count for count in accumulate(shown)]
        seen = _see(total, gone, later, end=end, sinks=sinks, window=window)
        tokens = [max(0, total - sinks - window - behind) for behind in later]
        local += b"".join(seen[0])
        pending += b"".join(seen[1])
        bulk_tokens.append(tokens)
        decided.append([bulk > 0 and there for bulk, there in zip(tokens, shown, strict=True)])
    masks = [torch.frombuffer(mask, dtype=torch.bool).view(rows, 1, queries, -1) for mask in (local, pending)]
    counts, stored = (torch.tensor(part, dtype=torch.int64, device="cpu") for part in (bulk_tokens, bulk_lengths))
    decides = torch.tensor(decided, dtype=torch.bool, device="cpu")
    last_lengths = tuple(round_length(max(1, row[-1])) for row in bulk_tokens)
    deciding = chain.from_iterable(map(compress, bulk_tokens, decided))
    return (*masks, counts.unsqueeze(1), stored, decides.unsqueeze(1)), {
        "decisions": sum(map(sum, decided)) * stands_for,
        "dense_tokens": sum(map(mul, bulk_lengths, map(any, decided))) * stands_for,
        "query_moment_lengths": tuple(sorted(set(map(round_length, set(deciding))))),
        "row_moment_lengths": last_lengths[:1] if len(set(last_lengths)) == 1 else last_lengths,
    }


class Seen(int):
    """How many tokens of a `QAdALayer` a mask is asked for: attention there needs no mask of every pair."""

    forward_pass: "ForwardPass | None" = None  # which is to know whether the mask hides any of them


class Lead(NamedTuple):
    """What the first layer of a pass found of one token of every row, none of them padding, that a kernel computed."""

    layer: int  # its index
    mask: Any  # as the model gave it
    padding: Padding
    lengths: list[int]  # as `find_rows` is told of them
    flushed: list[int]
    end: int
    rows: Rows


class ForwardPass:
    """The pass under way: what its mask says, its `Rows`, and whether it reads a prompt."""

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window  # tokens
        self.is_prefill_chunk = False  # whether it is of `generate`'s prompt: exact, whatever its length
        self.prompt_tokens = 0  # of that prompt and what was held before it, if it comes in chunks; else 0
        # Of a step that a graph is captured of (`decode_graph/`), whose new tokens are all real: they are written to.
        self.given: Rows | None = None
        self.lead: Lead | None = None  # of this pass, which layers behind the first one may follow
        # Of the mask that a model made last, weakly: that of its pass, as long as this is at work.
        self.mask: weakref.ref[Tensor] | None = None
        # The tokens that it is of, if it hides none of them, which what an indexer picks does not say.
        self.shown = 0
        self._rows: tuple[Any, Rows] | None = None
        self._read: Any = WeakTensorKeyDictionary()  # what `read_padding` found for a mask, as long as that is there

    def __deepcopy__(self, memo: dict) -> "ForwardPass":
        return ForwardPass(self.sinks, self.window)  # a copy is in no pass

    def note_mask(self, mask: Any, shown: int) -> None:
        """Of the mask that was made, whether it hides none of so many tokens; 0, if it may hide some."""
        self.mask, self.shown = (weakref.ref(mask), shown) if isinstance(mask, Tensor) else (None, 0)

    def read_padding(
        self, padding: Padding, mask: Tensor | None, *, batch: int, seen: int, queries: int, first: bool
    ) -> tuple[Padding, Tensor | None, Tensor | None]:
        """As `padding.extend`. Every layer of a pass is handed the same mask: the first one reads it for all, and anew,
        as it may have been written to since the last pass."""
        if self.given is not None:
            return padding, None, None
        if mask is None:
            return padding.extend(mask, batch=batch, seen=seen, queries=queries)
        call = padding, batch, seen, queries
        found = {} if first else self._read.get(mask, {})
        if call not in found:
            found[call] = padding.extend(mask, batch=batch, seen=seen, queries=queries)
            self._read[mask] = found
        return found[call]

    def find_rows(
        self,
        *,
        lengths: list[int],
        flushed: list[int],
        end: int,
        queries: int,
        valid: Tensor | None,
        device: torch.device,  # where the masks go
    ) -> Rows:
        """Of a call as for `describe_rows`: layers move in lockstep, so they share it."""
        if self.given is not None:
            return self.given
        # By content, not identity: a layer whose state differs must get its own masks.
        key = (tuple(lengths), tuple(flushed), end, queries, None if valid is None else valid.numpy().tobytes(), device)
        if self._rows is not None and self._rows[0] == key:
            return self._rows[1]
        told: dict[str, Any] = {"lengths": lengths, "flushed": flushed, "end": end, "queries": queries, "valid": valid}
        tensors, numbers = describe_rows(**told, sinks=self.sinks, window=self.window)
        # A blocking copy would wait for everything the accelerator still has to do.
        near, waiting, counts, stored, decides = (
            tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors
        )
        made = Rows(near, waiting, counts, stored, decides, **numbers)
        self._rows = (key, made)
        return made
