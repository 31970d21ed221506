"""How often each head was local: sums on the device, made for many calls at once."""

import itertools

import torch
from torch import Tensor

PENDING = 32  # calls whose flags are kept until they are summed: a sum for each would cost more than its decision


class Tally:
    """Counts of a layer's decisions.

    Args:
        heads: int64 `[kv_heads, group]`, decisions that called the query head local; None before the first.
        groups: int64 `[kv_heads]`, decisions without a long-context head in the group.
    """

    def __init__(self, heads: Tensor | None = None, groups: Tensor | None = None) -> None:
        self._heads, self._groups = heads, groups
        self._pending: list[tuple[Tensor, Tensor]] = []

    def add(self, flags: Tensor, decided: Tensor) -> None:
        """Count one call: bool `[batch, kv_heads, group, queries]`, True for long-context, and bool
        `[batch or 1, 1, queries]`, where there was something to decide. Neither may change afterwards."""
        self._pending.append((flags, decided))
        if len(self._pending) == PENDING or flags.shape[-1] > 1:
            self._sum()

    @property
    def heads(self) -> Tensor | None:
        """As given, of all calls."""
        self._sum()
        return self._heads

    @property
    def groups(self) -> Tensor | None:
        """As given, of all calls."""
        self._sum()
        return self._groups

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = [flags for flags, _ in self._pending] + [t for t in (self._heads, self._groups) if t is not None]
        return sum(tensor.nbytes for tensor in held)

    def _sum(self) -> None:
        for shape, calls in itertools.groupby(self._pending, key=lambda call: call[0].shape):
            flags, decided = zip(*calls, strict=True)
            real = torch.stack([where.expand(shape[0], 1, shape[3]) for where in decided]).unsqueeze(3)
            local = ~torch.stack(flags) & real  # [calls, batch, kv_heads, group, queries]
            heads, groups = local.sum(dim=(0, 1, 4)), local.all(dim=3).sum(dim=(0, 1, 3))
            # What was loaded from a file may lie on another device than the model.
            self._heads = heads if self._heads is None else self._heads.to(heads) + heads
            self._groups = groups if self._groups is None else self._groups.to(groups) + groups
        self._pending.clear()
