"""An offloaded bulk gives the same answers as one on the device.

Without an accelerator the offloaded path is forced on the CPU: copies to read, blocks to stream. The tests marked
`gpu` take the real one.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from harness import SINKS, WINDOW, Inputs
from pair import Pair, stored_tokens
from scenarios import SCENARIOS, play
from stand_in import DEVICES, Copies
from torch.utils._python_dispatch import TorchDispatchMode

from qada_cache.storage.bulk import Bulk
from qada_cache.storage.placement import Placement


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
    moves = (
        (lambda: store.reserve(store.capacity + 1)),
        (lambda: store.select_rows([1, 0])),
        (lambda: store.select_rows([1])),
    )
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
    """A selection of as many rows as before stays in the same memory, whichever rows are read and written to."""
    like = torch.empty(3, 2, 0, 4)
    store = Bulk(like, like, offloading=False, placement=Placement(0), layer=0)
    lengths = [5, 9, 2]
    rows = [torch.randn(2, 1, 2, length, 4) for length in lengths]
    for row, (keys, values) in enumerate(rows):
        store.append(slice(row, row + 1), keys, values)
    before, capacity = (store.keys.data_ptr(), store.values.data_ptr()), store.capacity
    store.select_rows(index)
    assert (store.keys.data_ptr(), store.values.data_ptr()) == before
    assert store.lengths == [lengths[source] for source in index]
    assert store.capacity == capacity
    for row, source in enumerate(index):
        found = store.read(slice(row, row + 1), slice(None), 0, lengths[source])
        assert torch.equal(torch.stack(found), rows[source])


@pytest.mark.parametrize("seed", range(5))
def test_rows_copy_what_they_do_not_share(seed: int) -> None:
    """Each row says what it said wherever rows move, grow, and are cut. Once rows come from one, no token that it had
    then is copied again, unless a cut came between."""
    made, like = torch.Generator().manual_seed(seed), torch.empty(3, 1, 0, 2)
    store = Bulk(like, like, offloading=False, placement=Placement(0), layer=0)

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=made))

    told = [torch.empty(1, 0, 2)] * 3
    for _ in range(200):
        act = draw(3)
        if act == 0:
            for row in range(3):
                new = torch.randn(1, draw(4), 2, generator=made)
                told[row] = torch.cat([told[row], new], dim=1)
                store.append(slice(row, row + 1), new[None], -new[None])
        elif act == 1 and not draw(4):
            told = [tokens[:, : max(0, tokens.shape[1] - draw(9))] for tokens in told]
            store.truncate([tokens.shape[1] for tokens in told])
        else:
            index = [draw(3) for _ in range(3)]
            told = [told[row] for row in index]
            store.select_rows(index)
        for row, tokens in enumerate(told):
            keys, values = store.read(slice(row, row + 1), slice(None), 0, tokens.shape[1])
            assert torch.equal(keys[0], tokens)
            assert torch.equal(values[0], -tokens)
    store.select_rows([1, 1, 1])
    for row in range(3):
        store.append(slice(row, row + 1), *torch.randn(2, 1, 1, 7, 2, generator=made))
    for index, tokens in (([0, 0, 1], 2 * 7), ([1, 0, 2], 0), ([2, 1, 0], 2 * 7), ([0, 0, 0], 2 * 7)):
        with Copied() as copied:
            store.select_rows(index)
        assert copied.numbers <= 2 * 2 * 2 * tokens  # keys and values of 2 dims, and copies of rows that change, too


class Copied(TorchDispatchMode):
    """Inside, `numbers` counts those that are copied."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name in ("aten::copy_", "aten::clone"):
            self.numbers += args[-1].numel()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_and_bytes(device: str, copies: Copies) -> None:
    """Exact calls copy in blocks, on CUDA devices of all heads; adaptive calls only the heads they need; both are
    counted."""
    pair, inputs = Pair(offloading=True, threshold=0.05), Inputs(device=device)
    pair.update(*inputs(100))
    assert copies.count == 0
    pair.update(*inputs(WINDOW + 1))
    layer, per_token = pair.layer, 2 * 2 * (16 + 16) * 4  # rows, heads, dimensions, bytes
    whole, blocks = (100 - SINKS - WINDOW) * per_token, 2 * 2 * -(-(100 - SINKS - WINDOW) // 7)
    assert layer.counters.streamed_bytes == whole
    by_head = device == "cpu"  # else blocks come through `Staging`, which the spy does not see
    assert (copies.longest, copies.count, copies.bytes) == ((7, blocks, whole) if by_head else (0, 0, 0))
    copies.bytes = expected = 0
    needed, before = set(), torch.zeros(2, dtype=torch.int64)
    for _ in range(8):
        pair.update(*inputs(1))
        read = 2 * 2 - int((pair.local_groups - before).sum())  # KV heads of both rows with a long-context head
        needed.add(read)
        expected += read * layer.store.bulk.lengths[0] * (16 + 16) * 4
        before = pair.local_groups.clone()
    assert layer.counters.bulk_read_bytes == copies.bytes == expected
    assert needed & {1, 2, 3}
