"""The tokens of each row that a pass's queries see: its first layer finds them for all layers."""

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


def _mark_columns(
    total: int, flushed: int, newer: list[int], *, end: int, sinks: int, window: int
) -> tuple[list[bytes], list[bytes]]:
    """Masks of the columns that one row's queries find local, and of those that they find pending: a byte per column,
    `sinks` columns, then `end` recent ones. `newer[i]` is the number of tokens newer than query `i`. The row has
    `total` tokens, `flushed` of them in the bulk; the newest is in the last recent column."""
    held, first = min(flushed, sinks), end - (total - flushed)  # flushed sinks; the row's first recent column
    far = min(max(first, end - total + sinks), end)  # the first recent column whose token is no sink
    near, none = b"\1" * held + bytes(sinks - held + first) + b"\1" * (far - first), bytes(sinks + far)
    window = min(window, end)  # the option may be much longer than any text
    # Columns before a window, and a window's, of which each query takes a slice of `end - start` columns.
    older, inside = b"\1" * end + bytes(window + end), bytes(end) + b"\1" * window + bytes(end)
    local, pending = [], []
    for count in newer:
        stop = max(first, end - count)  # the column after the query's own
        start, shift = min(far, stop), end + window - stop
        local.append(near[: sinks + start] + inside[start + shift : end + shift])
        pending.append(none[: sinks + start] + older[start + shift : end + shift])
    return local, pending


def describe_rows(
    *,
    lengths: list[int],  # real tokens of each row, the call's own included
    flushed: list[int],  # the number of a row's oldest tokens that have been flushed to sinks and bulk
    end: int,  # recent columns in use; they are right-aligned, so column `end - 1` is every row's newest token
    queries: int,  # tokens of the call, padding included
    valid: Tensor | None,  # bool [batch, queries] on the host, False for padding; None when every token is real
    sinks: int,
    window: int,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The tensors of `Rows`, on the host, and its numbers, for a call whose tokens have already been appended."""
    alike = valid is None and len(set(lengths)) == 1 and len(set(flushed)) == 1
    rows = 1 if alike else len(lengths)
    bulk_lengths = [max(0, count - sinks) for count in flushed[:rows]]
    stands_for = len(lengths) // rows  # rows of the batch for each described row
    local, pending = bytearray(), bytearray()
    bulk_tokens: list[list[int]] = []  # by row and query, as `decided` is
    decided: list[list[bool]] = []
    real = [[True] * queries] * rows if valid is None else valid.tolist()
    for total, row_flushed, is_real in zip(lengths[:rows], flushed[:rows], real, strict=True):
        # A padding query borrows the position of the real one before it: its output is finite and unused.
        new = sum(is_real)
        newer = [new - count for count in accumulate(is_real)]  # by query, the number of later tokens of the row
        columns = _mark_columns(total, row_flushed, newer, end=end, sinks=sinks, window=window)
        tokens = [max(0, total - sinks - window - count) for count in newer]
        local += b"".join(columns[0])
        pending += b"".join(columns[1])
        bulk_tokens.append(tokens)
        decided.append([bulk > 0 and query for bulk, query in zip(tokens, is_real, strict=True)])
    masks = [torch.frombuffer(mask, dtype=torch.bool).view(rows, 1, queries, -1) for mask in (local, pending)]
    counts, stored = (torch.tensor(part, dtype=torch.int64, device="cpu") for part in (bulk_tokens, bulk_lengths))
    decides = torch.tensor(decided, dtype=torch.bool, device="cpu")
    deciding = chain.from_iterable(map(compress, bulk_tokens, decided))
    return (*masks, counts.unsqueeze(1), stored, decides.unsqueeze(1)), {
        "decisions": sum(map(sum, decided)) * stands_for,
        "dense_tokens": sum(map(mul, bulk_lengths, map(any, decided))) * stands_for,
        "query_moment_lengths": tuple(sorted(set(map(round_length, set(deciding))))),
        "row_moment_lengths": round_rows([row[-1] for row in bulk_tokens]),
    }


def round_rows(bulk_tokens: list[int]) -> tuple[int, ...]:
    """The bulk tokens of rows, rounded for another prompt's moments: one number for all rows, if they agree."""
    rounded = tuple(round_length(max(1, tokens)) for tokens in bulk_tokens)
    return rounded[:1] if len(set(rounded)) == 1 else rounded


class MaskSize(int):
    """The number of tokens that a `QAdALayer` gives as its mask's size."""


class Seen(MaskSize):
    """The same of a mask for our attention alone, which needs no mask of every pair."""

    forward_pass: "ForwardPass | None" = None  # the pass that notes whether the mask hides any of these tokens


class Lead(NamedTuple):
    """A step's state after its first layer, if a kernel computed it and no row's token is padding: later layers of the
    same state can skip the checks."""

    layer: int  # its index
    mask: Any  # as the model gave it
    padding: Padding
    lengths: list[int]  # this and the next two as in `find_rows`
    flushed: list[int]
    end: int
    rows: Rows


class ForwardPass:
    """The pass under way: what its mask says, its `Rows`, and whether it reads a prompt."""

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window  # tokens
        self.is_prefill_chunk = False  # whether it reads a chunk of `generate`'s prompt: exact, whatever its length
        self.prompt_tokens = 0  # if so, tokens of that prompt and of the cache before it; else 0
        self.goes_on_from_padding = False  # whether `generate` reads a turn whose rows end in padding: exact as well
        # The rows of a step under capture (`decode_graph/`), all of whose new tokens are real; replays write to them.
        self.given: Rows | None = None
        self.lead: Lead | None = None  # the first layer's state in this pass, for later layers
        self.mask: weakref.ref[Tensor] | None = None  # the last mask that the model made, while its pass is under way
        # The number of tokens that `mask` covers, if it hides none of them; else 0. Layers with an indexer need it: the
        # mask that their attention gets also hides tokens that the indexer did not pick.
        self.shown = 0
        self._rows: tuple[Any, Rows] | None = None
        self._read: Any = WeakTensorKeyDictionary()  # results of `read_padding`, by mask, while the mask lives

    def __deepcopy__(self, memo: dict) -> "ForwardPass":
        return ForwardPass(self.sinks, self.window)  # a copy is in no pass

    def note_mask(self, mask: Any, shown: int) -> None:
        """Note the mask that the model made, and the number `shown` of tokens if it hides none of them (0: it may)."""
        self.mask, self.shown = (weakref.ref(mask), shown) if isinstance(mask, Tensor) else (None, 0)

    def read_padding(
        self, padding: Padding, mask: Tensor | None, *, batch: int, seen: int, queries: int, first: bool
    ) -> tuple[Padding, Tensor | None, Tensor | None]:
        """As `padding.extend`. Every layer of a pass is given the same mask, and the first layer reads it for all. The
        first layer reads a known mask again, as it may have been written to since the last pass."""
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
        """The `Rows` of a call, with arguments as for `describe_rows`. Layers in the same state share them."""
        if self.given is not None:
            return self.given
        # By content, not by identity: a layer whose state differs must get masks of its own.
        key = (tuple(lengths), tuple(flushed), end, queries, None if valid is None else valid.numpy().tobytes(), device)
        if self._rows is not None and self._rows[0] == key:
            return self._rows[1]
        call: dict[str, Any] = {"lengths": lengths, "flushed": flushed, "end": end, "queries": queries, "valid": valid}
        tensors, numbers = describe_rows(**call, sinks=self.sinks, window=self.window)
        # A blocking copy would wait for everything the accelerator still has to do.
        local, pending, counts, stored, decided = (
            tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors
        )
        rows = Rows(local, pending, counts, stored, decided, **numbers)
        self._rows = (key, rows)
        return rows
