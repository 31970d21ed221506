"""The rows of a cache that one of transformers' verbs leaves, such as those of beams that go on."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class SelectedRows(list[int]):
    """The old row of each new row. Layers share it: the indices that change their tensors come to a device once, as the
    host waits for that."""

    def __init__(self, rows: Iterable[int]) -> None:
        super().__init__(rows)
        self._indices: dict[torch.device, tuple[Tensor, ...]] = {}  # of new rows, and of the old ones they are

    def apply(self, tensor: Tensor) -> Tensor:
        """`tensor` `[rows, ...]` with these rows: itself, written in place, if there are as many as before."""
        in_place = len(self) == len(tensor)
        if tensor.device not in self._indices:
            moved = [(new, old) for new, old in enumerate(self) if not (in_place and new == old)]
            index = torch.tensor(moved, dtype=torch.int64, device="cpu").view(-1, 2).mT.contiguous()
            self._indices[tensor.device] = index.to(tensor.device).unbind()
        new, old = self._indices[tensor.device]
        rows = tensor.index_select(0, old)
        return tensor.index_copy_(0, new, rows) if in_place else rows


def find_selected_rows(verb: str, argument: Any, rows: int) -> SelectedRows:
    """The old row of each row that this verb leaves, as `DynamicCache` with `rows` rows reads its argument. ValueError,
    if that fails, or has no rows as a result."""
    here = argument.cpu() if isinstance(argument, Tensor) else argument
    old = torch.arange(rows, dtype=torch.int64, device="cpu")[:, None]  # whatever the default device
    new, cause = None, "what it selects has no dimension of rows, or more than one"
    try:
        if verb == "reorder_cache":
            new = old.index_select(0, here)
        elif verb == "batch_repeat_interleave":
            new = old.repeat_interleave(here, dim=0)
        else:
            new = old[here, ...]
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        cause = str(error).partition("\n")[0]
    if new is None or new.dim() != 2:
        raise ValueError(
            f"{verb} cannot select from {rows} rows by {argument!r:.80} ({cause}): reorder_cache takes a tensor of "
            "ints [rows], batch_repeat_interleave a count, batch_select_indices ints or a bool mask [rows]"
        )
    return SelectedRows(new[:, 0].tolist())
