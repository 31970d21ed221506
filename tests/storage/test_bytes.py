"""`stats()` tells the truth about bytes, and there are no more of them than there have to be."""

import gc
import mmap
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WINDOW, FakeAttention, Inputs, make_config
from models import forced, prompt, tiny
from pair import Pair
from scenarios import left_padded
from small_sketch import small_sketch
from stand_in import DEVICES, Copies, on_gpu
from torch import Tensor
from transformers import DynamicCache

from qada_cache import QAdACache, storage
from qada_cache.sketch import count_segments
from qada_cache.storage import pinned
from qada_cache.storage.row_tensors import GROWTH
from qada_cache.versions import pass_cache


def small_cache(**options: Any) -> tuple[QAdACache, list[Pair]]:
    """A cache of two layers and what drives each."""
    config = make_config(2)
    cache = QAdACache(config=config, moments="current", threshold=0.15, sink_tokens=3, local_tokens=11, **options)
    modules = [FakeAttention(config, groups=2, layer_idx=index) for index in range(2)]
    return cache, [Pair(layer=layer, module=module) for layer, module in zip(cache.layers, modules, strict=True)]


def test_both_descriptions_count_the_same_bytes() -> None:
    """Other prompts' moments too, of which heads of so many channels have more than a tenth of a MiB."""
    model, (ids, mask) = tiny(head_dim=256), prompt(150)
    cache = QAdACache(model, sink_tokens=3, local_tokens=11)
    model.generate(ids, attention_mask=mask, **pass_cache(cache), max_new_tokens=2)
    counted = re.search(r"device [\d.]+ MiB, host [\d.]+ MiB", str(cache.stats()))
    assert counted is not None
    assert counted[0] in repr(cache)


def storages(holder: object, seen: dict[int, Tensor] | None = None) -> dict[int, Tensor]:
    """Every tensor storage reachable from an object's attributes, by address; what layers share left out.

    It holds masks of the current call. So are the ways from layer to layer.
    """
    seen = {} if seen is None else seen
    if isinstance(holder, Tensor):
        seen[holder.untyped_storage().data_ptr()] = holder
    elif isinstance(holder, (list, tuple)):
        for item in holder:
            storages(item, seen)
    elif isinstance(holder, dict):
        for name, item in holder.items():
            if name not in ("shared", "bound_module", "next_layer"):
                storages(item, seen)
    elif any(kind.__module__.startswith("qada_cache") for kind in type(holder).__mro__):  # a stand-in as well
        storages(vars(holder), seen)
    return seen


def block_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's storage as memory is allocated: whole pages, or a power of two where torch pins it."""
    size = tensor.untyped_storage().nbytes()
    if tensor.untyped_storage().data_ptr() in pinned._held:
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return next(2**power for power in range(40) if 2**power >= size) if tensor.is_pinned() else size


def reachable_bytes(cache: QAdACache) -> int:
    return sum(map(block_bytes, storages(cache.layers).values()))


@pytest.fixture
def small() -> Iterator[None]:
    """Few tokens have a sketch, of several segments."""
    with small_sketch(6, 16):
        yield


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("offloading", "budget"), [(False, 0), (True, 0), (True, 0.5)])
@pytest.mark.parametrize(("token_threshold", "energies"), [(0.0, False), (1e-30, False), (1e-30, True)])
@pytest.mark.usefixtures("small")
def test_stats_count_real_storages(
    token_threshold: float,
    energies: bool,
    offloading: bool,
    budget: float,
    device: str,
    copies: Copies,
    tmp_path: Path,
) -> None:
    """`stats()` counts the bytes of real storages. With a `token_threshold` all bulks have a sketch."""
    cache, pairs = small_cache(offloading=offloading, device_budget=budget, token_threshold=token_threshold)
    if energies:
        cache._shared.options = replace(cache.options, query_energies=torch.rand(2, 2, 16) + 0.1)
    stats = cache.stats()
    assert (stats.device_bytes, stats.host_bytes) == (0, 0)

    def check(cache: QAdACache) -> None:
        stats = cache.stats()
        stores = [layer.store for layer in cache.layers]
        host = sum(block_bytes(tensor) for store in stores for tensor in (store.bulk.keys, store.bulk.values))
        assert host > 0
        placed = sum(map(block_bytes, (t for store in stores if store.bulk.placed for t in store.bulk.tensors)))
        assert stats.host_bytes == (host - placed if offloading else 0)
        assert stats.device_bytes + stats.host_bytes == reachable_bytes(cache)
        for one in stores if token_threshold else ():
            kept, room = one.sketch.tensors, one.sketch.tensors.scales.shape[2]
            assert 0 < room <= one.bulk.capacity
            tokens, segments = room * (4 + 1), count_segments(room) * ((2 + 1 + 2) * 16 + 4 + 4)
            read = 3 * 4 * 16 + 16 * 8 + 4 * 16  # noise, variances, mean value, slopes and their units
            assert sum(tensor.nbytes for tensor in vars(kept).values()) == one.batch * 2 * (tokens + segments + read)
            # Beside these, the mean key and the covariance in float32, and the queries' energies.
            whole = one.batch * 2 * (tokens + segments + read + 4 * 16 + 4 * 16 * 16) + energies * 4 * 2 * 16
            assert one.sketch.nbytes == whole
            assert one.sketch.nbytes == sum(map(block_bytes, storages(one.sketch).values()))

    inputs = Inputs(device=device)
    for tokens in (60, 1, 20, 1, WINDOW, 1):
        for pair in pairs:
            pair.update(*inputs(tokens))
        check(cache)
    assert cache.stats().device_layers == (1 if budget else 0 if offloading else 2)
    for verb in (
        lambda: cache.crop(-20),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.reorder_cache(torch.tensor([3, 0, 0, 1])),
        lambda: cache.batch_select_indices(torch.tensor([1, 2])),
    ):
        verb()
        check(cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", config=cache._shared.model.config)
    check(loaded)
    cache.reset()
    assert (cache.stats().device_bytes, cache.stats().host_bytes) == (0, 0)


def test_to_ask_for_bytes_changes_none() -> None:
    cache, pairs = small_cache()
    inputs = Inputs()
    for queries in (40, 1, 1):  # the last ones' decisions are summed when they are asked for
        for pair in pairs:
            pair.driver(*inputs(queries), None, scaling=0.25)
    assert cache.stats().device_bytes == cache.stats().device_bytes


@pytest.mark.parametrize("device", ["cpu"])
def test_host_bytes_count_what_pinning_takes(device: str, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two; also where keys and values differ in size."""
    cache, pairs = small_cache(offloading=True)
    for pair in pairs:
        pair.driver(*Inputs(dim=12)(60), None, scaling=0.25)
    sizes = [2 * 2 * layer.store.bulk.capacity * dim * 4 for layer in cache.layers for dim in (12, 16)]
    assert cache.stats().host_bytes == sum(sizes)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    blocks = [
        block_bytes(tensor) for layer in cache.layers for tensor in (layer.store.bulk.keys, layer.store.bulk.values)
    ]
    assert {block > size for size, block in zip(sizes, blocks, strict=True)} == {True, False}
    assert cache.stats().host_bytes == sum(blocks)


def test_a_long_window_takes_memory_for_what_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long window takes memory for the tokens that were seen, in one call, in several, token by token or from a
    file."""
    monkeypatch.setattr(storage, "ROOM_TOKENS", 64)
    model, text = tiny(), prompt(400)[0]
    cache, per_token = QAdACache(model, local_tokens=10**7), 2 * 2 * 2 * 8 * 4  # of layers, keys and values, heads

    def check(cache: QAdACache) -> None:
        room = 16 + max(64, GROWTH * cache.get_seq_length())
        assert cache.stats().device_bytes > per_token * cache.get_seq_length()
        assert cache.stats().device_bytes < per_token * room + 8192  # of moments, and of values with keys

    logits, read = [], 0
    for tokens in (50, 150, 100, *[1] * 100):
        if tokens == 100:
            cache.save(tmp_path / "cache.safetensors")
            cache = QAdACache.load(tmp_path / "cache.safetensors", model)
            check(cache)
        logits.append(forced(model, text[:, read : read + tokens], [tokens], cache))
        read += tokens
        check(cache)
    wanted = forced(model, text, [400], DynamicCache(config=model.config))
    torch.testing.assert_close(torch.cat(logits, dim=1), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("batch", [1, 2])
def test_padding_is_recorded_by_itself(batch: int, tmp_path: Path) -> None:
    """One small record for all layers, up to the last padding: no view that keeps the mask, tokens x tokens."""
    cache, pairs = small_cache()
    valid = left_padded([30] * batch, 40)
    mask = pairs[0].next_mask(batch, 40, valid)
    assert mask.untyped_storage().nbytes() == batch * 40 * 40
    for pair in pairs:
        pair.update(*Inputs()(40, batch), valid, mask=mask)
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", config=cache._shared.model.config)
    for layers in (cache.layers, loaded.layers):
        (record,) = {layer.padding for layer in layers}
        assert torch.equal(record.known, valid[:, :10])
        assert record.known.untyped_storage().nbytes() == batch * 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("token_threshold", [0.0, 1.0])
def test_offloaded_device_bytes_do_not_grow(token_threshold: float, device: str, copies: Copies) -> None:
    """Device bytes of an offloaded cache do not grow with its tokens, except for the sketch."""
    sizes = []
    for tokens in (50, 1000):
        cache, pairs = small_cache(offloading=True, token_threshold=token_threshold)
        inputs = Inputs(device=device)
        for index, pair in enumerate(pairs):
            for count in (tokens, 1):
                pair.driver(*inputs(count), None, scaling=0.25)
            assert pair.layer.index == index
        held = [pair.layer.store.sketch for pair in pairs]
        sketch_read_bytes = sum(map(block_bytes, storages(held).values()))
        assert (sketch_read_bytes > 0) == bool(token_threshold)
        sizes.append((cache.stats().device_bytes - sketch_read_bytes, cache.stats().host_bytes))
    (short_device, short_host), (long_device, long_host) = sizes
    assert short_device == long_device
    assert long_host > 10 * short_host


def count_allocated(tokens: int, token_threshold: float, kernels: str) -> int:
    """Bytes that a cache of so many tokens has of the device, without its sketch."""
    cache, pairs = small_cache(offloading=True, token_threshold=token_threshold, kernels=kernels)
    inputs = Inputs(device="cuda")
    gc.collect()  # what earlier tests left would be freed in between
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for pair in pairs:
        pair.driver(*inputs(tokens, 1), None, scaling=0.25)
        pair.driver(*inputs(1, 1), None, scaling=0.25)
    torch.cuda.synchronize()
    allocated, sketches = torch.cuda.memory_allocated() - before, [pair.layer.store.sketch for pair in pairs]
    assert allocated >= cache.stats().device_bytes
    assert all(layer.store.bulk.keys.is_pinned() for layer in cache.layers)
    return allocated - sum(sketch.nbytes for sketch in sketches if token_threshold)


@on_gpu
@pytest.mark.parametrize(("token_threshold", "kernels"), [(0.0, "auto"), (1.0, "torch")])
def test_real_device_memory_does_not_grow(token_threshold: float, kernels: str) -> None:
    """The allocator's memory after a prefill is the same for ten times the tokens, except for the sketch, and for room
    that parts of a bulk leave each other if a fused kernel reads them. On the device the tokens would take 9 MB."""
    held = [count_allocated(tokens, token_threshold, kernels) for tokens in (200, 2_000, 20_000)]
    assert held[2] <= held[1] + 2**17  # the first call of all leaves libraries' own memory
