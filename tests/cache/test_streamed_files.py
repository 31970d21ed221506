"""Saving and loading make one pass over the bulk, and no second copy of it."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from host_memory import takes_at_most
from models import generate, prompt, tiny
from test_copies import shares, snapshot
from test_shared_memory import extend, large

from qada_cache import QAdACache, cache_file
from qada_cache.files import private_map, tensor_file

pytestmark = pytest.mark.skipif(not private_map.AVAILABLE, reason="needs Linux")


@contextmanager
def peak_at_most(size: float) -> Iterator[None]:
    """Resident memory, pages of files included, as it was in between."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")

    def resident(which: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024

    before = resident("VmRSS:")
    yield
    assert resident("VmHWM:") - before <= size


@pytest.mark.parametrize("why", ["asked for", "open to be written", "no leases"])
def test_a_file_that_is_read_into_memory(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be cut off, and written over in its old time, between two calls or within one."""
    path, cache = tmp_path / "file", large()
    cache.save(path)
    config, whole = cache._shared.model.config, cache.stats().host_bytes
    if why == "no leases":
        monkeypatch.setattr(private_map.OpenFile, "quiet", False)
    with path.open("r+b") as file, takes_at_most(1.2 * whole):
        if why != "open to be written":
            file.close()
        with peak_at_most(1.3 * whole):
            loaded = QAdACache.load(path, config=config, mmap=why != "asked for")
    assert loaded.stats().shared_bytes == 0
    assert shares(QAdACache.load(path, config=config)) == (why != "no leases")
    os.truncate(path, 100)
    torch.testing.assert_close(snapshot(loaded), snapshot(cache), rtol=0, atol=0)
    for each in (cache, loaded):
        extend(each, 700)
    torch.testing.assert_close(snapshot(copy.deepcopy(loaded)), snapshot(cache), rtol=0, atol=0)


def test_saving_takes_no_second_copy(tmp_path: Path) -> None:
    """Neither in memory nor, for the room behind the tokens, on the disk."""
    cache, path = large(), tmp_path / "file"
    whole, stored = cache.stats().host_bytes, sum(bulk.stored_bytes for bulk in cache._list_bulks())
    assert whole > stored + 2**20
    with peak_at_most(0.2 * stored):
        cache.save(path)
    used = path.stat().st_blocks * 512
    assert path.stat().st_size > whole
    assert used < path.stat().st_size - 0.8 * (whole - stored)


def test_nothing_but_tokens_is_written(tmp_path: Path) -> None:
    """Memory behind a row's tokens may hold anything."""
    cache, rest = large(1000), torch.full((1, 8, 300, 64), 7.25)
    for layer in cache.layers:
        layer.store.absorb(rest, rest, None)
        layer.seen += 300
    cache.crop(-300)
    cache.save(tmp_path / "file")
    tensors, _ = tensor_file.read(tmp_path / "file", "qada-cache")
    for index, bulk in enumerate(cache._list_bulks()):
        for name, held in (("keys", bulk.keys), ("values", bulk.values)):
            kept = tensors[f"layer {index}.bulk_{name}"]
            assert torch.equal(kept[:, :, : bulk.lengths[0]], held[:, :, : bulk.lengths[0]])
            assert not kept[:, :, bulk.lengths[0] :].any()


def test_the_bulk_is_not_sent_to_the_device_and_back(tmp_path: Path) -> None:
    """All else goes there; the bulk lives on the host."""
    model = tiny()
    cache = QAdACache(model, moments="current", sink_tokens=4, local_tokens=20)
    generate(model, prompt(150)[0], cache)
    cache.save(tmp_path / "file")
    tensors, state = tensor_file.read(tmp_path / "file", cache_file.KIND)
    decoded = cache_file.decode_record(state["layers"][1], tensors, torch.device("meta"))
    there = {name: value.device.type for name, value in decoded.items() if isinstance(value, torch.Tensor)}
    assert {name for name, place in there.items() if place == "cpu"} == {"bulk_keys", "bulk_values"}
    assert there["near_keys"] == "meta"
