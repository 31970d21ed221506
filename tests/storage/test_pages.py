"""Host memory in huge pages, and given back."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from host_memory import taken

from qada_cache.files import private_map
from qada_cache.storage import transfers
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.placement import Placement

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping(address: int) -> str:
    """The system's figures of the memory at `address`, from `/proc/self/smaps`: name and value on each line."""
    inside, said = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = line.split()[0]
        if "-" in span and not span.endswith(":"):
            start, stop = (int(end, 16) for end in span.split("-"))
            inside = start <= address < stop
        elif inside:
            said.append(line)
    return "\n".join(said)


@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="needs huge pages")
def test_large_tensors_lie_in_huge_pages() -> None:
    made = transfers.make_empty((2, 3, 1 << 20), torch.bfloat16).fill_(1)
    assert made.shape == (2, 3, 1 << 20)
    assert made.is_contiguous()
    said = mapping(made.data_ptr() + made.nbytes // 2)
    assert "hg" in said.split("VmFlags:")[1].split()
    kilobytes = int(said.split("AnonHugePages:")[1].split()[0])
    assert kilobytes > 0


def test_memory_lives_as_long_as_a_view() -> None:
    view = transfers.make_empty((4, 1 << 20), torch.float32)[1:3]
    view.copy_(torch.arange(2 << 20).view(2, -1))
    assert view.flatten().equal(torch.arange(2 << 20).float())


def test_small_and_empty_tensors() -> None:
    assert transfers.make_empty((2, 0, 8), torch.float16).shape == (2, 0, 8)
    assert transfers.make_empty((3, 5), torch.int64).dtype == torch.int64


def test_where_no_more_mappings_are_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives a process 65,530, which many small caches may take."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(transfers.mmap, "mmap", refuse)
    assert transfers.make_empty((2, transfers.WORTH), torch.bfloat16).fill_(1).sum() == 2 * transfers.WORTH
    with pytest.raises(RuntimeError, match="memory"):  # torch's own words, not a file's
        transfers.make_empty((1 << 60,), torch.uint8)


@pytest.mark.skipif(not private_map.AVAILABLE, reason="needs Linux")
def test_a_bulk_that_grows_leaves_no_memory_behind() -> None:
    """A bulk that grows gives its old memory back. Malloc would keep it, as much again once all layers have grown."""
    torch.empty(1 << 25, dtype=torch.uint8).fill_(1)  # freed, it makes malloc keep all that is smaller
    like, keys = torch.empty(1, 8, 0, 64), torch.ones(1, 8, 1200, 64)
    stores = [Bulk(like, like, offloading=True, placement=Placement(0), layer=0) for _ in range(24)]
    held = []
    for _ in range(2):
        for store in stores:
            store.append(slice(0, 1), keys, keys)
        held.append((taken(), sum(store.nbytes for store in stores)))
    (before, small), (after, large) = held
    assert large > small > 100 * 2**20
    assert after - before < 1.1 * (large - small)
