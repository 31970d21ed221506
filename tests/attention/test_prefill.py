"""The device memory that a prefill takes besides the model's own keys and values.

On the CPU living tensors are counted; tests marked `gpu` ask the allocator.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from harness import SINKS, WINDOW, Inputs, new_layer
from models import SMALL, tiny
from scenarios import left_padded
from stand_in import accelerator, on_gpu, strided
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from qada_cache import QAdACache, kernels
from qada_cache.attention import joined
from qada_cache.attention.exact import attend_exactly
from qada_cache.kernels.operands import Query
from qada_cache.key_moments import running
from qada_cache.state.layer import QAdALayer
from qada_cache.storage import bulk, staging, transfers
from qada_cache.storage.bulk import Bulk
from qada_cache.versions import pass_cache

TOKENS = 3000
TOKEN_BYTES = 2 * (16 + 16) * 4  # heads, dimensions, bytes


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that was made under it."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.bytes = max(self.bytes, *made, 0)
        return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("operators", [True, False])
def test_no_tensor_of_a_long_turn_is_of_queries_times_keys(
    operators: bool, attention: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of as many tokens as the cache holds, by torch's operators and without: twice as many, twice the bytes.

    Masks as transformers makes them are of queries times keys.
    """
    if not operators:
        monkeypatch.setattr(kernels, "find_operator", lambda *_: None)
        monkeypatch.setattr(kernels, "QUERY_BLOCK", 32)
        monkeypatch.setattr(kernels, "MAX_BLOCK_NUMBERS", 1 << 12)
    model, largest = tiny(vocab_size=8, num_hidden_layers=1), []
    model.set_attn_implementation(attention)
    for tokens in (160, 320):
        ids = torch.arange(4 * tokens).view(2, -1) % 8
        mask = torch.ones_like(ids)
        mask[0, : 9 * padded] = 0
        cache = QAdACache(model, moments="current", **SMALL)
        with torch.no_grad(), accelerator():
            model(ids[:, :tokens], attention_mask=mask[:, :tokens], **pass_cache(cache))
            with Largest() as made:
                model(ids[:, tokens:], attention_mask=mask, **pass_cache(cache))
        largest.append(made.bytes)
    assert largest[1] <= 2 * largest[0]


class Live(TorchDispatchMode):
    """The most bytes that tensors made under it held at once, by storage; the bulk's host memory is left out."""

    def __init__(self, host: set[int]) -> None:
        super().__init__()
        self.host, self.users, self.bytes, self.peak = host, {}, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.host:
                self._add(leaf, given)
        return out

    def _add(self, tensor: Tensor, given: set[int]) -> None:
        address, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if address in given and address not in self.users:
            return  # made before
        if address not in self.users:
            self.users[address] = 0
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
        self.users[address] += 1
        weakref.finalize(tensor, self._drop, address, size)

    def _drop(self, address: int, size: int) -> None:
        self.users[address] -= 1
        if not self.users[address]:
            del self.users[address]
            self.bytes -= size


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses of the bulk's storages, which count as the host's. Blocks of prompts and of reads are 64 tokens."""
    seen: set[int] = set()
    allocate = Bulk._allocate

    def spy(store: Bulk, *args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes():
            made = allocate(store, *args, **kwargs)
        seen.add(made.untyped_storage().data_ptr())
        return made

    monkeypatch.setattr(Bulk, "_allocate", spy)
    monkeypatch.setattr(running, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(bulk, "STREAM_TOKENS", 64)
    return seen


PADDING = {
    "none": None,
    "left": left_padded([TOKENS, 2000, 2900, 50], TOKENS),
    "holes": torch.rand(4, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.9,
}


@pytest.mark.parametrize("padding", PADDING)
def test_prefill_makes_no_second_copy_of_a_layer(padding: str, host: set[int]) -> None:
    """Views of the model's keys go to the host; only of a row with holes in it, there is a copy, one row at a time."""
    keys, values, _ = Inputs()(TOKENS, 4)
    valid = PADDING[padding]
    whole_layer, row = 4 * TOKENS * TOKEN_BYTES, TOKENS * TOKEN_BYTES
    with accelerator() as copies:
        copies.eager = True  # what waits for its copy is bounded elsewhere
        layer = new_layer(keys, values, token_threshold=0.0)  # without a sketch, which is of all tokens
        with Live(host) as live:
            layer.store.absorb(keys, values, valid)
        assert sum(layer.store.bulk.lengths) > 0.6 * 4 * TOKENS
    assert live.peak < (1.2 * row if padding == "holes" else 0.05 * whole_layer)


def test_chunks_stream_a_bulk_that_is_larger_than_the_device(host: set[int]) -> None:
    """A chunk of a long prompt holds itself, and three blocks of one head, whatever is cached already."""
    keys, values, _ = Inputs()(TOKENS)
    peaks = []
    for stored in (500, 500, TOKENS):  # the first time, torch's operators are tried
        with accelerator() as copies:
            copies.eager = True
            layer = new_layer(keys, values, token_threshold=0.0)
            layer.store.absorb(keys[:, :, :stored], values[:, :, :stored], None)
            chunk = Inputs(1)(WINDOW + 1)
            with Live(host) as live:
                attend_exactly(layer, layer.store, Query(chunk[2], scaling=0.25), *chunk[:2])
                layer.store.absorb(*chunk[:2], None)
            assert copies.longest == 64
            assert layer.counters.streamed_bytes == copies.bytes == 2 * (stored - SINKS - WINDOW) * TOKEN_BYTES
        peaks.append(live.peak)
    assert peaks[1] == peaks[2] < 60_000 < 2 * TOKENS * TOKEN_BYTES / 20


def test_what_lies_on_the_device_is_not_copied() -> None:
    keys, values, _ = Inputs()(60)
    outputs = []
    for budget in (0, 1.0):
        with accelerator() as copies:
            layer = new_layer(keys, values, device_budget=budget)
            layer.store.absorb(keys, values, None)
            chunk = Inputs(1)(WINDOW + 1)
            outputs.append(attend_exactly(layer, layer.store, Query(chunk[2], scaling=0.25), *chunk[:2]))
            whole = 2 * (60 - SINKS - WINDOW) * TOKEN_BYTES
            assert (layer.counters.streamed_bytes, copies.bytes) == (whole, 0 if budget else whole)
    assert torch.equal(*outputs)


# -- what only a GPU can show -------------------------------------------------------------------------------------


def peak_of(run: Any) -> int:
    """Bytes allocated on the GPU at most while `run()` ran, beyond those before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@on_gpu
def test_prefill_peak_does_not_grow_with_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's keys and values are under way while the next one computes, however many layers there are."""
    monkeypatch.setattr(transfers, "IN_FLIGHT_BYTES", 0)
    tokens, peaks = 100_000, []
    for layers in (2, 8):
        model = tiny(num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8, head_dim=64).cuda()
        ids = torch.randint(1, 90, (1, tokens), device="cuda")

        def run(model: PreTrainedModel = model, ids: Tensor = ids) -> None:
            with torch.no_grad():
                cache = QAdACache(model, moments="current")
                model(ids, **pass_cache(cache), logits_to_keep=1)
                assert cache.stats().host_bytes > len(cache.layers) * tokens * 2 * 8 * 64 * 4

        run()  # kernels are loaded
        peaks.append(peak_of(run))
    assert peaks[1] - peaks[0] < 0.5 * tokens * 2 * 8 * 64 * 4


@on_gpu
def test_chunk_peak_does_not_grow_with_the_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096 * 4 * (64 + 64) * 2)  # tokens of four heads, in bfloat16
    monkeypatch.setattr(joined, "JOINED_BYTES", 0)  # as of a long bulk
    peaks = []
    for stored in (20_000, 400_000):
        keys, values = strided(stored)
        layer = new_layer(keys, values)
        layer.store.absorb(keys, values, None)
        del keys, values
        chunk = strided(1000)
        query = torch.randn(1, 8, 1000, 64, device="cuda", dtype=torch.bfloat16)

        def run(layer: QAdALayer = layer, chunk: Any = chunk, query: Tensor = query) -> None:
            attend_exactly(layer, layer.store, Query(query, scaling=0.125), *chunk)

        run()
        peaks.append(peak_of(run))
    assert peaks[1] <= peaks[0] + 4096 * 2 * 64 * 2  # a block more, where the allocator learns late what is free
