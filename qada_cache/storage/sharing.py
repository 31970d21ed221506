"""Bulks in memory that copies of a cache share."""

import itertools
import logging
import mmap
import threading
from collections.abc import Sequence

from ..files import private_map
from ..files.private_map import PrivateMap
from ..forked import renew
from ..said_once import warn_once
from .bulk import Bulk

logger = logging.getLogger(__name__)

_moving = renew(threading.Lock())  # of one cache, several threads may make copies at once


def move_to_shared_memory(bulks: Sequence[Bulk]) -> None:
    """Move bulks to memory that their copies can share, unless they lie there already. They stay where they are if they
    are small, pinned, on an accelerator, or the system is none that can do that."""
    with _moving:
        # Every copy would copy the parts of a bulk that were written over, so mostly overwritten ones move anew.
        loose = [bulk for bulk in bulks if bulk.mappable and bulk.stored_bytes > 2 * bulk.shared_bytes]
        if not (private_map.AVAILABLE and loose and sum(bulk.stored_bytes for bulk in loose) >= private_map.WORTH):
            return
        pages = (-(-part.nbytes // mmap.PAGESIZE) for bulk in loose for part in bulk.tensors)
        ends = [end * mmap.PAGESIZE for end in itertools.accumulate(pages, initial=0)]
        try:
            file = private_map.create_anonymous(ends[-1])
            content, source = file.map(shared=True), PrivateMap(file)
        except (OSError, RuntimeError) as error:
            warn_once(logger, f"copies of a QAdACache share no memory, as the system does not give any: {error}")
            return
        starts = iter(ends)
        for bulk in loose:  # one after the other, so that only one bulk at a time takes its memory twice
            moved, used = [], slice(0, max(bulk.stored))  # the room behind them takes no memory yet
            for held, start in zip(bulk.tensors, starts, strict=False):
                target = content[start : start + held.nbytes].view(held.dtype).view(held.shape)
                target[:, :, used] = held[:, :, used]
                moved.append(source.view_tensor(start, held.shape, held.dtype))
            bulk.adopt(source, *moved, lengths=bulk.stored)
