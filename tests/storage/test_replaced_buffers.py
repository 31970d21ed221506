"""If steps are replays of a graph of all layers, buffers that it reads keep their addresses for long."""

import pytest
import torch

from qada_cache.sketch import count_closed
from qada_cache.storage import TokenStore, row_tensors
from qada_cache.storage.coded_bulk import CodedBulk
from qada_cache.storage.placement import Placement

DIM, DECODED, LAYERS = 16, 1000, 5


def list_addresses(store: TokenStore) -> list[int]:
    """The addresses of all tensors that a plan reads."""
    bulk, sketch = store.bulk, store.bulk.sketch
    tensors = [store.near_keys, store.near_values, *bulk.tensors, *bulk.beside]
    if sketch is not None and sketch.in_use:
        tensors += sketch.tensors.to_tensors().values()
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("prompt", [600, 1500, 2900, 4000])
@torch.inference_mode()
def test_buffers_are_replaced_once_a_doubling(bits: int, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers replace their buffers at once, though each has its own share of room. When a sketch comes into use,
    so that another graph is needed anyway, other buffers are replaced, too."""
    monkeypatch.setattr(row_tensors, "REPLAYING", ("cpu",))
    keys, values = torch.randn(2, 1, 1, prompt + DECODED, DIM, generator=torch.Generator().manual_seed(0))
    sizes = {"sinks": 16, "window": 112, "bulk_bits": bits, "offloading": False}
    stores = [TokenStore(keys, values, placement=Placement(0), layer=layer, **sizes) for layer in range(LAYERS)]
    for store in stores:
        store.keep_sketch(1.5, None, select=True, kernels="torch")
        store.absorb(keys[:, :, :prompt], values[:, :, :prompt], None)
    known = [(store.version, list_addresses(store)) for store in stores]
    replaced, first, in_use = [], stores[0].bulk.lengths[0], 0
    for token in range(prompt, prompt + DECODED):
        for store in stores:
            store.append(keys[:, :, token : token + 1], values[:, :, token : token + 1], None)
        found = [(store.version, list_addresses(store)) for store in stores]
        if found != known:
            replaced.append(stores[0].bulk.lengths[0])
            in_use += [version[3] for version, _ in found] != [version[3] for version, _ in known]
        known = found
    doublings = (stores[0].bulk.lengths[0] / first) // 2 + 1  # of which one may be under way
    assert len(replaced) - in_use <= doublings, replaced
    bulk = stores[0].bulk
    if isinstance(bulk, CodedBulk):
        assert bulk.beside[0].shape[2] <= 1024
        assert bulk.stored[0] == count_closed(bulk.lengths[0])
    assert bulk.capacity <= 1024 + 1.3 * bulk.stored[0]
