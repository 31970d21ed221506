"""Keeping a prompt makes no copy by way of the device, does not sort a folder with room, and ends no plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import SMALL, prompt, tiny
from stand_in import accelerator
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import PrefixStore, QAdACache
from qada_cache.prefix_store import folder
from qada_cache.prefix_store.folder import Listing
from qada_cache.prefix_store.naming import FILE_TOKENS
from qada_cache.storage import transfers
from qada_cache.versions import pass_cache

OPTIONS: dict[str, Any] = {"moments": "current", "bulk_bits": 16, **SMALL}
TOKENS = 3 * FILE_TOKENS + 40


def read(model: PreTrainedModel, ids: Tensor, cache: QAdACache) -> None:
    with torch.no_grad():
        model(ids, **pass_cache(cache))


@pytest.mark.parametrize("cut", [0, 100])
def test_an_offloaded_bulk_is_read_where_it_lies(store: PrefixStore, model: PreTrainedModel, cut: int) -> None:
    """Once copies to the host have ended. Keys of a segment that is still open go to the device, to be coded there, but
    not without a sketch."""
    options = {**OPTIONS, "token_threshold": 0.0}
    text, plain = prompt(TOKENS)[0], QAdACache(model, **options)
    read(model, text, plain)
    plain.crop(-cut)
    with accelerator() as copies:
        cache = QAdACache(model, **options)
        read(model, text, cache)
        cache.crop(-cut)
        assert all(layer.store.bulk.written is not None for layer in cache.layers)
        before = copies.count
        assert store.keep(cache, text) == TOKENS - cut
        assert copies.count == before
    written = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    store.drop()
    store.keep(plain, text)
    assert written == {path.name: path.read_bytes() for path in store.folder.iterdir()}


def test_a_folder_with_room_is_not_sorted(
    store: PrefixStore, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But once, when it is listed, for files that are too old."""
    text, cache = prompt(TOKENS)[0], QAdACache(model, **OPTIONS)
    read(model, text, cache)
    sorts: list[int] = []
    sort = Listing.sort_by_use
    monkeypatch.setattr(
        folder.Listing, "sort_by_use", lambda listing: sorts.append(len(listing.files)) or sort(listing)
    )
    store.keep(cache, text)
    assert store.stats().segments == 4
    assert sorts == [0]


def test_plans_stay_while_buffers_do(store: PrefixStore, model: PreTrainedModel) -> None:
    """And with them a graph of decode steps; pending tokens may need a larger bulk, which ends them."""
    text, cache, kept = prompt(400)[0], QAdACache(model, **OPTIONS), list[bool]()
    read(model, text[:, :60], cache)
    for at in range(60, 400):
        read(model, text[:, at : at + 1], cache)
        if at % 20:
            continue
        layer = cache.layers[0]
        plan, version = layer.plan, layer.store.version
        assert plan is not None
        assert layer.store.end > layer.store.window
        store.keep(cache, text[:, : at + 1])
        assert layer.store.end == layer.store.window
        assert layer.plan is (plan if layer.store.version == version else None)
        kept.append(layer.plan is plan)
    assert {*kept} == {True, False}


@pytest.mark.parametrize("bits", [16, 8])
def test_what_a_layer_writes_of_a_segment_comes_in_one_copy(
    bits: int, store: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a device, for which the host waits at each copy."""
    model, text = tiny(), prompt(1300)[0]
    cache = QAdACache(model, **OPTIONS | {"bulk_bits": bits})
    read(model, text, cache)
    store.keep(cache, text)
    written = {path.name: path.read_bytes() for path in store.folder.iterdir()}
    store.drop()
    brought, to_host = list[Tensor](), Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda each: brought.append(each) or to_host(each))
    monkeypatch.setattr(transfers, "has_own_memory", lambda _: True)
    store.keep(cache, text)
    codes = sum(each.dtype == torch.uint8 and each.dim() == 1 for each in brought)
    assert codes == 2 * (2 if bits == 16 else len(written))
    assert written == {path.name: path.read_bytes() for path in store.folder.iterdir()}
