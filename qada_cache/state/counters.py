"""Counts of one layer since the last reset: decisions taken, bytes read, audits."""

import itertools
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from ..kernels.operands import Rows

UNSUMMED_CALLS = 128  # calls whose flags are summed at once: a sum for each would cost more than its decision
UNSUMMED_QUERIES = 8  # of a call, as of a draft: flags of more are large
AUDITED = 5  # sums of an audit


@dataclass(eq=False)
class Counters:
    """Counts of one layer, defined by `CacheStats` if not here. Counting never waits for the device."""

    decisions: int = 0
    steps: int = 0
    bulk_read_bytes: int | Tensor = 0  # this and the next: int64 [] once a kernel counts them
    sketch_read_bytes: int | Tensor = 0
    dense_bulk_bytes: int = 0
    streamed_bytes: int = 0
    prompt_pairs: int = 0
    prompt_read_pairs: int | Tensor = 0  # int64 [] once a device counts them
    # float64 [5], sums over audited decisions of query heads: all decisions; truly long-context ones; those of the
    # latter that were flagged; all flagged ones; missed shares of attention. None before the first audit.
    audited: Tensor | None = None
    audited_bytes: int = 0  # bytes of the bulk that audits read
    # Decisions that called the query head local, int64 [kv_heads, group], and those without a long-context head in the
    # group, int64 [kv_heads]; None before the first sum. `record` sums what is left, so that it has them up to date.
    local_heads: Tensor | None = None
    local_groups: Tensor | None = None
    _unsummed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    # `local_heads` and `local_groups` of steps that a graph replays (`decode_graph/`): the graph adds to these tensors.
    _replayed: tuple[Tensor, Tensor] | None = None

    def count(self, flags: Tensor, rows: Rows, token_bytes: int) -> None:
        """Count one call's decisions `flags`, bool `[batch, kv_heads, group, queries]`, True for long-context. Nobody
        may write to them afterwards. `token_bytes` are the bytes of a token of the bulk, all heads."""
        self.count_call(rows.decisions, rows.dense_tokens * token_bytes if rows.decisions else 0)
        if not rows.decisions:
            return
        self._unsummed.append((flags, rows.decided))
        if len(self._unsummed) == UNSUMMED_CALLS or flags.shape[-1] > UNSUMMED_QUERIES:
            self._sum()

    def count_call(self, decisions: int, dense_bulk_bytes: int) -> None:
        """Count what the host knows of one call."""
        self.steps += 1
        self.decisions += decisions
        self.dense_bulk_bytes += dense_bulk_bytes

    def count_replays(self, local_heads: Tensor, local_groups: Tensor) -> None:
        """Take the tensors that a graph adds to from now on, int64 `[kv_heads, group]` and `[kv_heads]`, both zeros."""
        self._sum()
        self._replayed = local_heads, local_groups

    @property
    def on_device(self) -> list[Tensor]:
        """The sums that a kernel or a graph adds to."""
        counted = self.bulk_read_bytes, self.sketch_read_bytes
        return [count for count in (*counted, *(self._replayed or ())) if isinstance(count, Tensor)]

    def take_flags(self) -> Tensor:
        """Return the flags of the only call since `count_replays`, and forget them: the graph is to sum them."""
        ((flags, _),) = self._unsummed
        self._unsummed.clear()
        return flags

    def add(self, name: str, sums: Tensor) -> None:
        """Add to a counter that is a tensor; one from a file may lie on another device than the model."""
        before = getattr(self, name)
        setattr(self, name, sums if before is None else before.to(sums) + sums)

    def find_on(self, device: torch.device, name: str) -> Tensor:
        """The counter `name`, one that kernels add to, int64 `[]` on `device`."""
        count = getattr(self, name)
        if not isinstance(count, Tensor) or count.device != device:
            with torch.inference_mode(False):  # it may be added to outside inference mode
                setattr(self, name, torch.full((), int(count), dtype=torch.int64, device=device))
        return getattr(self, name)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        held = [*vars(self).values(), *(flags for flags, _ in self._unsummed)]
        return sum(value.nbytes for value in held if isinstance(value, Tensor))

    @property
    def record(self) -> dict[str, Any]:
        """All counters, by name: the arguments that make an equal one."""
        self._sum()
        return {name: getattr(self, name) for name in COUNTER_NAMES}

    def _sum(self) -> None:
        for (_, shape), calls in itertools.groupby(self._unsummed, key=lambda call: (call[0].device, call[0].shape)):
            flags, decided = zip(*calls, strict=True)
            if any(where.shape != decided[0].shape for where in decided):
                decided = tuple(where.expand(shape[0], 1, shape[3]) for where in decided)
            real = torch.stack(decided).unsqueeze(3)
            local = ~torch.stack(flags) & real  # [calls, batch, kv_heads, group, queries]
            self.add("local_heads", local.sum(dim=(0, 1, 4)))
            self.add("local_groups", local.all(dim=3).sum(dim=(0, 1, 3)))
        self._unsummed.clear()
        for name, sums in zip(("local_heads", "local_groups"), self._replayed or (), strict=False):
            self.add(name, sums.clone())
            sums.zero_()


COUNTER_NAMES = tuple(part.name for part in fields(Counters) if not part.name.startswith("_"))
