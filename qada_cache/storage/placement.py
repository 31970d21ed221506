"""Placement: which layers of one cache have their bulk on the device, as many as a `device_budget` has room for."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from accelerate.utils import get_max_memory

from .staging import Staging

if TYPE_CHECKING:
    from .bulk import Bulk
    from .row_tensors import RowTensors

RESERVE_BYTES, RESERVE_SHARE = 2**30, 0.1  # of a device's memory; "auto" leaves the larger of the two
AUTO = "auto"


def check_budget(budget: int | float | str) -> None:
    """Raise unless `budget` is a `device_budget` of `QAdACache`."""
    way_out = '0 (none), a number of bytes (an int), a share of the bulk (a float in [0, 1]) or "auto"'
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise TypeError(f"device_budget must be {way_out}, got {type(budget).__name__}")
    share = isinstance(budget, float) and 0.0 <= budget <= 1.0
    count = isinstance(budget, int) and budget >= 0 and budget != 1  # no use of one byte: likely the share 1.0 is meant
    if not (share or count or budget == AUTO):
        raise ValueError(f"device_budget must be {way_out}, got {budget!r}")


def find_free(device: torch.device) -> int:
    """Bytes of `device` that "auto" may take: those that are free, but for a reserve."""
    backend = torch.get_device_module(device)
    if hasattr(backend, "mem_get_info"):  # accelerate would ask every device, and so take memory on all of them
        free, total = backend.mem_get_info(device)
        if hasattr(backend, "memory_reserved"):  # torch holds memory that no tensor uses
            free += backend.memory_reserved(device) - backend.memory_allocated(device)
    else:
        free = total = get_max_memory().get(device.type, 0)  # the host's memory
    return free - max(RESERVE_BYTES, int(RESERVE_SHARE * total))


class Placement:
    """The bulks of one cache, and the budget that each of its devices has for them.

    Whole layers are placed. A bulk that the budget has no room for lies in host memory, for good.
    """

    def __init__(self, budget: int | float | str) -> None:
        self.budget = budget
        self.bulks: WeakSet[Bulk] = WeakSet()  # those that refer to this placement
        self._staging: dict[torch.device, Staging] = {}

    def __deepcopy__(self, memo: dict) -> "Placement":
        memo[id(self)] = twin = Placement(self.budget)  # copies of bulks join it
        return twin

    def has_room(self, bulk: "RowTensors", nbytes: int) -> bool:
        """Whether `bulk` may have `nbytes` on its device; what it has there already stays until it has moved."""
        if not isinstance(self.budget, (int, float)):
            return nbytes <= find_free(bulk.device)
        others = [each for each in self.bulks if each is not bulk and each.device == bulk.device and each.capacity]
        placed = [each for each in others if each.placed]
        if isinstance(self.budget, int):
            return sum(each.nbytes for each in placed) + bulk.placed * bulk.nbytes + nbytes <= self.budget
        # Shares of a token's bytes, as these do not change while layers grow one after the other.
        all_layers = sum(each.row_token_bytes for each in others) + bulk.row_token_bytes
        return sum(each.row_token_bytes for each in placed) + bulk.row_token_bytes <= self.budget * all_layers

    def find_staging(self, device: torch.device) -> Staging:
        """The buffers through which whole layers come to `device`."""
        return self._staging.setdefault(device, Staging(device))

    def retry(self, work: Callable[[], Any], device: torch.device) -> Any:
        """Return `work()`. Each time that `device` runs out of memory a bulk leaves it, and `work` is done again."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                placed = [each for each in self.bulks if each.placed and each.capacity and each.device == device]
                if not placed:
                    raise
            # Outside the handler, whose traceback keeps the tensors of the last try.
            max(placed, key=lambda bulk: bulk.layer).leave_device()
