"""An offloaded bulk gives the same answers as one on the device, and `stats()` tells the truth about bytes.

Without an accelerator the offloaded path is forced on the CPU: copies to read, blocks to stream. The tests marked
`gpu` take the real one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness import SINKS, WINDOW, FakeAttention, Inputs
from models import forced, prompt, tiny
from pair import Pair, stored_tokens
from scenarios import SCENARIOS, left_padded, play, small_buffers
from stand_in import Copies, accelerator
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from qada_cache import QAdACache
from qada_cache.storage import bulk, store
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.residents import Residents

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.fixture
def copies(request: pytest.FixtureRequest) -> Iterator[Copies]:
    """Streams in blocks of 7 tokens; on the CPU, offloads as an accelerator would."""
    with (
        mock.patch.object(bulk, "STREAM_TOKENS", 7),
        small_buffers(),
        accelerator(request.node.callspec.params["device"]) as spy,
    ):
        yield spy


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"update_moments": False}, {"criterion": "oracle"}], ids=["frozen", "oracle"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_offloaded_equals_reference(scenario: str, options: dict[str, Any], device: str, copies: Copies) -> None:
    pair = play(scenario, device=device, offloading=True, **options)
    assert pair.layer.store.bulk.offloaded
    assert copies.count
    assert pair.layer.store.bulk.keys.device.type == "cpu"


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_equals_on_device(device: str, copies: Copies) -> None:
    """Flags, tokens and moments alike to the bit; outputs to rounding, as blocks are merged."""
    outputs = []
    for offloading in (False, True):
        pair, inputs = Pair(offloading=offloading), Inputs(device=device)
        outputs.append([pair.update(*inputs(tokens)) for tokens in (60, 1, 5, 30, 1, WINDOW, 1, 1)])
        if not offloading:
            assert not copies.count
            kept, tally = pair, pair.tally
    assert copies.count
    assert tally == pair.tally
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stored_tokens(pair.layer.store), stored_tokens(kept.layer.store), rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu"])
def test_host_waits_before_it_lets_go_of_memory(device: str, copies: Copies) -> None:
    """A store that grows or changes rows: a kernel may still be reading in place what is let go of or written to."""
    pair, inputs = Pair(offloading=True), Inputs(device=device)
    pair.update(*inputs(40))
    wait, store = torch.accelerator.synchronize, pair.layer.store.bulk
    moves = (lambda: store.reserve(store.capacity + 1)), (lambda: store.select([1, 0])), (lambda: store.select([1]))
    for move, moved in zip(moves, (True, False, True), strict=True):
        wait.reset_mock()
        with mock.patch.object(store, "_allocate", side_effect=store._allocate) as allocate:
            move()
        assert allocate.called == moved
        wait.assert_called_once_with(store.device)


@pytest.mark.parametrize("device", ["cpu"])
def test_another_device_is_served_from_the_same_host_memory(device: str, copies: Copies) -> None:
    """A loaded cache whose model lies on several. Sent there anew, the bulk would be on its way on a stream of the
    device it comes from, and waited for on those of the device it is for."""
    pair, inputs = Pair(offloading=True), Inputs(device=device)
    filling = inputs(40)
    pair.reference.update(*filling, None)
    pair.driver(*filling, None, scaling=pair.scaling)
    before, sent = pair.layer.store.bulk, copies.last
    held = before.keys.data_ptr(), before.values.data_ptr()
    assert not sent.query()
    pair.layer.device = torch.device("meta")  # as if the file had been loaded for it
    torch.accelerator.synchronize.reset_mock()
    pair.update(*inputs(1))
    after = pair.layer.store.bulk
    assert after is not before
    assert copies.last is sent
    assert (after.keys.data_ptr(), after.values.data_ptr()) == held
    torch.accelerator.synchronize.assert_called_once_with(before.device)  # kernels that read it in place
    for tokens in (WINDOW, 30, 1):
        pair.update(*inputs(tokens))


def test_a_bulk_on_the_device_moves_along() -> None:
    pair, inputs = Pair(offloading=False), Inputs()
    pair.update(*inputs(40))
    held = pair.layer.store.bulk.keys.data_ptr()
    pair.layer.device = torch.device("meta")
    for tokens in (1, WINDOW, 30, 1):
        pair.update(*inputs(tokens))
    assert pair.layer.store.bulk.keys.data_ptr() != held


@pytest.mark.parametrize("index", [[1, 0, 2], [2, 0, 1], [0, 0, 2], [1, 1, 1], [2, 2, 0], [0, 2, 1]])
def test_rows_change_in_place(index: list[int]) -> None:
    """As many rows as before: in the same memory, whichever of them are read and written to."""
    like = torch.empty(3, 2, 0, 4)
    store = Bulk(like, like, offloading=False, residents=Residents(0), layer=0)
    lengths = [5, 9, 2]
    rows = [torch.randn(2, 1, 2, length, 4) for length in lengths]
    for row, (keys, values) in enumerate(rows):
        store.append(slice(row, row + 1), keys, values)
    before, capacity = (store.keys.data_ptr(), store.values.data_ptr()), store.capacity
    store.select(index)
    assert (store.keys.data_ptr(), store.values.data_ptr()) == before
    assert store.lengths == [lengths[source] for source in index]
    assert store.capacity == capacity
    for row, source in enumerate(index):
        found = store.read(slice(row, row + 1), slice(None), 0, lengths[source])
        assert torch.equal(torch.stack(found), rows[source])


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_and_bytes(device: str, copies: Copies) -> None:
    """Exact calls copy in blocks; adaptive calls only the heads they need; both are counted."""
    pair, inputs = Pair(offloading=True, threshold=0.05), Inputs(device=device)
    pair.update(*inputs(100))
    assert copies.count == 0
    pair.update(*inputs(WINDOW + 1))
    layer, per_token = pair.layer, 2 * 2 * (16 + 16) * 4  # rows, heads, dimensions, bytes
    assert copies.longest == 7
    assert copies.count == 2 * 2 * -(-(100 - SINKS - WINDOW) // 7)
    assert layer.counters.streamed_bytes == copies.bytes == (100 - SINKS - WINDOW) * per_token
    copies.bytes = expected = 0
    needed, before = set(), torch.zeros(2, dtype=torch.int64)
    for _ in range(8):
        pair.update(*inputs(1))
        read = 2 * 2 - int((pair.local_groups - before).sum())  # KV heads of both rows with a long-context head
        needed.add(read)
        expected += read * layer.store.bulk.lengths[0] * (16 + 16) * 4
        before = pair.local_groups.clone()
    assert layer.counters.pulled_bytes == copies.bytes == expected
    assert needed & {1, 2, 3}


# -- bytes --------------------------------------------------------------------------------------------------------


def small_cache(**options: Any) -> tuple[QAdACache, list[Pair]]:
    """A cache of two layers and what drives each."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config._attn_implementation = "sdpa"
    cache = QAdACache(config=config, moments="current", threshold=0.15, sink_tokens=3, local_tokens=11, **options)
    modules = [FakeAttention(config, groups=2, layer_idx=index) for index in range(2)]
    return cache, [Pair(layer=layer, module=module) for layer, module in zip(cache.layers, modules, strict=True)]


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
            if name not in ("shared", "bound_module", "following"):
                storages(item, seen)
    elif type(holder).__module__.startswith("qada_cache"):
        storages(vars(holder), seen)
    return seen


def block_bytes(tensor: Tensor) -> int:
    """What a tensor's storage takes, as torch pins memory."""
    size = tensor.untyped_storage().nbytes()
    return next(2**power for power in range(40) if 2**power >= size) if tensor.is_pinned() else size


def reachable_bytes(cache: QAdACache) -> int:
    return sum(map(block_bytes, storages(cache.layers).values()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("offloading", "budget"), [(False, 0), (True, 0), (True, 0.5)])
def test_stats_count_real_storages(
    offloading: bool, budget: float, device: str, copies: Copies, tmp_path: Path
) -> None:
    cache, pairs = small_cache(offloading=offloading, device_budget=budget)
    stats = cache.stats()
    assert (stats.device_bytes, stats.host_bytes) == (0, 0)

    def check(cache: QAdACache) -> None:
        stats = cache.stats()
        stores = [layer.store for layer in cache.layers]
        host = sum(block_bytes(tensor) for store in stores for tensor in (store.bulk.keys, store.bulk.values))
        assert host > 0
        assert stats.host_bytes == (host if offloading else 0)
        assert stats.device_bytes + stats.host_bytes == reachable_bytes(cache)

    inputs = Inputs(device=device)
    for tokens in (60, 1, 20, 1, WINDOW, 1):
        for pair in pairs:
            pair.update(*inputs(tokens))
        check(cache)
    assert (cache.stats().resident_bytes > 0) == (budget > 0)
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


def test_a_long_window_takes_memory_for_what_was_seen(tmp_path: Path) -> None:
    """Of sinks and window, those that there are; read in one call, in several, token by token and from a file."""
    model, text = tiny(), prompt(2700)[0]
    cache, per_token = QAdACache(model, local_tokens=10**7), 2 * 2 * 2 * 8 * 4  # of layers, keys and values, heads

    def check(cache: QAdACache) -> None:
        room = 16 + max(store.ROOM_TOKENS, bulk.GROWTH * cache.get_seq_length())
        assert cache.stats().device_bytes > per_token * cache.get_seq_length()
        assert cache.stats().device_bytes < per_token * room + 4096  # of moments

    logits, read = [], 0
    for tokens in (50, 1450, 1000, *[1] * 200):
        if tokens == 1000:
            cache.save(tmp_path / "cache.safetensors")
            cache = QAdACache.load(tmp_path / "cache.safetensors", model)
            check(cache)
        logits.append(forced(model, text[:, read : read + tokens], [tokens], cache))
        read += tokens
        check(cache)
    wanted = forced(model, text, [2700], DynamicCache(config=model.config))
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
def test_offloaded_device_bytes_do_not_grow(device: str, copies: Copies) -> None:
    sizes = []
    for tokens in (50, 1000):
        cache, pairs = small_cache(offloading=True)
        inputs = Inputs(device=device)
        for index, pair in enumerate(pairs):
            for count in (tokens, 1):
                pair.driver(*inputs(count), None, scaling=0.25)
            assert pair.layer.index == index
        sizes.append((cache.stats().device_bytes, cache.stats().host_bytes))
    (short_device, short_host), (long_device, long_host) = sizes
    assert short_device == long_device
    assert long_host > 10 * short_host


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_device_memory_does_not_grow() -> None:
    """What the allocator holds after prefill: the same for ten times the tokens."""
    held = []
    for tokens in (2_000, 20_000):
        cache, pairs = small_cache(offloading=True)
        inputs = Inputs(device="cuda")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        for pair in pairs:
            pair.driver(*inputs(tokens, 1), None, scaling=0.25)
            pair.driver(*inputs(1, 1), None, scaling=0.25)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        assert held[-1] >= cache.stats().device_bytes
        assert all(layer.store.bulk.keys.is_pinned() for layer in cache.layers)
    assert held[1] <= held[0] + 4096
