"""Whole layers on their way to the device: what is brought is what the bulk has by then."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from qada_cache.storage import staging, transfers
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.placement import Placement

HEADS, TOKENS = 3, 300


def make(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(1, HEADS, tokens, 8, generator=made), torch.randn(1, HEADS, tokens, 16, generator=made)


@pytest.fixture
def bulks() -> list[Bulk]:
    """The bulks of two layers of one cache, which count as offloaded to the host."""
    placement, found = Placement(0), []
    for layer in (0, 4):
        bulk = Bulk(*make(0, 0), offloading=False, placement=placement, layer=layer)
        bulk.append(slice(0, 1), *make(TOKENS, layer))
        bulk.offloaded = True
        found.append(bulk)
    return found


def bring(bulk: Bulk) -> tuple[Tensor, ...]:
    """All of a bulk, put together again."""
    own = bulk.placement.find_staging(bulk.device)
    blocks = [[part.clone() for part in tensors] for _, tensors in own.bring(bulk, staging.cut_blocks(bulk))]
    return tuple(torch.cat(each, dim=2) for each in zip(*blocks, strict=True))


def holds(found: tuple[Tensor, ...], bulk: Bulk) -> bool:
    return all(torch.equal(one, held[:, :, : bulk.stored[0]]) for one, held in zip(found, bulk.tensors, strict=True))


@pytest.mark.parametrize("most", [0, 1 << 19])
@pytest.mark.parametrize("segment", [64, 512])
def test_each_layer_is_copied_once(segment: int, most: int, bulks: list[Bulk], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of its turn, in blocks, head by head or whole; memory is let go of after the last one."""
    monkeypatch.setattr(staging, "SEGMENT_TOKENS", segment)
    monkeypatch.setattr(staging, "BLOCK_BYTES", 1)
    monkeypatch.setattr(staging, "COPY_BYTES", most)
    copied, refill = [], transfers.refill
    monkeypatch.setattr(
        transfers, "refill", lambda pairs, *to, **told: copied.append(pairs) or refill(pairs, *to, **told)
    )
    own = bulks[0].placement.find_staging(bulks[0].device)
    for bulk in (*bulks, *bulks):
        assert holds(bring(bulk), bulk)
        assert (own._ahead is None) == (bulk is bulks[1])
    assert own._memory == [None, None]
    assert len(copied) == 4 * -(-TOKENS // segment)
    assert {len(pairs) for pairs in copied} == ({2} if most else {2 * HEADS})
    assert all(source.is_contiguous() for pairs in copied for _, source in pairs)


def test_what_changed_since_is_copied_anew(bulks: list[Bulk]) -> None:
    """A bulk that has changed since its copy began is copied again, as after a pass that ended between two layers."""
    bring(bulks[0])
    bulks[1].truncate([TOKENS - 9])
    bulks[1].append(slice(0, 1), *make(9, 7))
    assert bulks[1].stored == [TOKENS]
    assert holds(bring(bulks[1]), bulks[1])
    bring(bulks[0])
    assert holds(bring(bulks[0]), bulks[0])


def test_a_bulk_on_its_way_may_go(bulks: list[Bulk]) -> None:
    """After a pass that ended between two layers, of a cache that then forgets all."""
    placement, (first, second) = bulks[0].placement, bulks
    bring(first)
    gone = weakref.ref(second)
    bulks.clear()
    del second
    gc.collect()
    assert gone() is None
    assert set(placement.bulks) == {first}
    assert holds(bring(first), first)
