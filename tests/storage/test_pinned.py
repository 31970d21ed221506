"""Pinned memory of any size: what is registered, used again and freed, by stand-ins for CUDA's functions; on a GPU."""

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from models import SMALL, generate, prompt, tiny
from stand_in import accelerator, on_gpu

from qada_cache import QAdACache
from qada_cache.serving import memory
from qada_cache.storage import pinned
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.placement import Placement
from qada_cache.versions import pass_cache

CUDA, PAGE = torch.device("cuda", 0), mmap.PAGESIZE
HEADS, DIM = 4, 8
TOKENS = 131_072


class Registered:
    """Stands in for CUDA's registration of pinned memory, and records its calls."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.there: dict[int, int] = {}
        self.waited: list[torch.device] = []

    def register(self, address: int, size: int, device: torch.device) -> None:
        assert device == CUDA
        assert address % PAGE == size % PAGE == 0
        self.sizes.append(size)
        self.there[address] = size

    def unregister(self, address: int) -> None:
        assert self.waited, "copies may be under way"
        ctypes.c_char.from_address(address).value = b"x"  # it is mapped still
        del self.there[address]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registered]:
    registered = Registered()
    monkeypatch.setattr(pinned, "_held", {})
    monkeypatch.setattr(pinned, "_retired", [])
    monkeypatch.setattr(pinned, "_idle", [])
    monkeypatch.setattr(pinned, "_devices", set())
    monkeypatch.setattr(pinned, "_register", registered.register)
    monkeypatch.setattr(pinned, "_unregister", registered.unregister)
    monkeypatch.setattr(pinned, "_synchronize", registered.waited.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    yield registered
    gc.collect()


def make_bulks(layers: int) -> list[Bulk]:
    """Offloaded ones of a CUDA device that is not there."""
    like = torch.empty(1, HEADS, 0, DIM, device="meta", dtype=torch.bfloat16)
    bulks = [Bulk(like, like, offloading=True, placement=Placement(0), layer=layer) for layer in range(layers)]
    for bulk in bulks:
        bulk.device = CUDA
    return bulks


def test_memory_is_used_again_or_freed(cuda: Registered) -> None:
    one = pinned.make((3, 1000), torch.float32, CUDA)
    assert one.shape == (3, 1000)
    assert cuda.sizes == [3 * PAGE]
    assert pinned.count_bytes(one) == 3 * PAGE
    one.fill_(7)
    address, part = one.data_ptr(), one[2]
    del one
    assert not pinned._retired  # a part of it is there
    assert part.unique().tolist() == [7]
    del part
    assert cuda.there == {address: 3 * PAGE}
    assert not cuda.waited
    again = pinned.make((2 * PAGE + 1,), torch.uint8, CUDA)  # nearly as large
    assert again.data_ptr() == address
    assert cuda.waited == [CUDA]
    assert len(cuda.sizes) == 1
    del again
    other, pinned_there = torch.device("cuda", 1), cuda.there
    pinned.serve(other)
    cuda.waited.clear()
    larger = pinned.make((4 * PAGE,), torch.uint8, CUDA)
    assert set(cuda.waited) == {CUDA, other}
    assert pinned_there == {larger.data_ptr(): 4 * PAGE}


def test_values_without_channels_are_not_pinned(cuda: Registered, caplog: pytest.LogCaptureFixture) -> None:
    """As those of latents, which lie in the keys."""
    like = torch.empty(1, HEADS, 0, DIM, device="meta", dtype=torch.bfloat16)
    bulk = Bulk(like, like[..., :0], offloading=True, placement=Placement(0), layer=0)
    bulk.device = CUDA
    bulk.reserve(1000)
    assert len(cuda.sizes) == 1
    assert not caplog.text


def test_much_larger_memory_is_not_used_again(cuda: Registered) -> None:
    """It would stay pinned for a fraction of what it holds."""
    pinned.make((9 * PAGE,), torch.uint8, CUDA)
    small = pinned.make((5 * PAGE,), torch.uint8, CUDA)
    assert cuda.there == {small.data_ptr(): 5 * PAGE}


def test_devices_are_waited_for_once(cuda: Registered) -> None:
    """However many layers take the memory of a cache that is gone."""
    layers = [pinned.make((PAGE,), torch.uint8, CUDA) for _ in range(5)]
    del layers
    layers = [pinned.make((PAGE,), torch.uint8, CUDA) for _ in range(5)]
    assert len(cuda.waited) == 1
    assert len(cuda.sizes) == len({layer.data_ptr() for layer in layers}) == 5


def test_an_interruption_of_the_wait_frees_nothing(cuda: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices may still use what was waited for, and CUDA knows it by its address."""

    def interrupt(_: torch.device) -> None:
        raise KeyboardInterrupt

    address = pinned.make((PAGE,), torch.uint8, CUDA).data_ptr()
    with monkeypatch.context() as patch:
        patch.setattr(pinned, "_synchronize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pinned.make((9 * PAGE,), torch.uint8, CUDA)
    assert cuda.there == {address: PAGE}
    assert pinned.make((PAGE,), torch.uint8, CUDA).data_ptr() == address


def test_memory_that_cuda_does_not_let_go_is_kept(cuda: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise RuntimeError("CUDA does not let go")

    address = pinned.make((PAGE,), torch.uint8, CUDA).data_ptr()
    with monkeypatch.context() as patch:
        patch.setattr(pinned, "_unregister", refuse)
        with pytest.raises(RuntimeError, match="let go"):
            pinned.make((9 * PAGE,), torch.uint8, CUDA)
    assert pinned.make((PAGE,), torch.uint8, CUDA).data_ptr() == address


def test_memory_that_cuda_refuses(cuda: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is kept; a bulk then takes memory that is not pinned, and says so."""

    def refuse(*_: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pinned, "_register", refuse)
    with pytest.raises(RuntimeError, match="out of memory"):
        pinned.make((PAGE,), torch.uint8, CUDA)
    assert not pinned._held
    assert not pinned._retired


class Kept:
    """Stands in for kept conversations: three of 2 pinned pages each."""

    def __init__(self) -> None:
        self.caches = [pinned.make((2 * PAGE,), torch.uint8, CUDA) for _ in range(3)]

    def forget_one(self) -> bool:
        self.caches.pop()
        return True

    def count_host_bytes(self) -> int:
        return sum(map(pinned.count_bytes, self.caches))


@pytest.mark.parametrize(("needed", "freed", "dropped"), [(2, 0, 0), (6, 4, 0), (8, 6, 1), (12, 10, 3), (13, 4, 0)])
def test_serving_frees_what_dropped_caches_have_pinned(
    needed: int, freed: int, dropped: int, cuda: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a request needs it: that of a cache of 4 pages which is gone, then that of one conversation after the other. A
    process may have 12 pages here."""
    kept = Kept()
    pinned.make((4 * PAGE,), torch.uint8, CUDA)
    monkeypatch.setattr(memory, "find_memory_left", lambda: 12 * PAGE - sum(cuda.there.values()))
    refused = pytest.raises(MemoryError) if needed > 12 else contextlib.nullcontext()
    with refused, memory.reserve_memory(1, needed * PAGE, kept):
        pass
    assert sum(cuda.there.values()) == (10 - freed) * PAGE
    assert len(kept.caches) == 3 - dropped


@pytest.mark.parametrize(("chunk", "told", "most"), [
    (TOKENS, False, 1.1), (8192, True, 1.1), (8192, False, 4.0), (128, False, 5.0),
])  # fmt: skip
def test_bytes_that_a_prompt_has_pinned(chunk: int, told: bool, most: float, cuda: Registered) -> None:
    """A prompt pins at most this multiple of the bytes that it holds: read at once, in chunks whose number is known or
    unknown, and token by token."""
    bulks = make_bulks(8)
    for bulk in bulks:
        bulk.expected = TOKENS if told else 0
    for tokens in range(chunk, TOKENS + 1, chunk):
        for bulk in bulks:
            bulk.reserve(tokens)
            assert bulk.capacity >= tokens
    held = len(bulks) * 2 * HEADS * TOKENS * DIM * 2
    assert held <= sum(cuda.sizes) <= most * held
    in_use = sum(bulk.nbytes for bulk in bulks)
    assert in_use == sum(pinned._held.values()) <= 1.8 * held


def test_generate_tells_how_long_its_prompt_is() -> None:
    """In chunks, so that the first one has room for all of it; later ones, and other texts, tell nothing."""
    with accelerator():
        model = tiny()
        cache = QAdACache(model, moments="current", **SMALL)
        with mock.patch.object(Bulk, "_rebuild", autospec=True, side_effect=Bulk._rebuild) as moved:
            generate(model, prompt(900)[0], cache, tokens=2, prefill_chunk_size=100)
        assert moved.call_count == len(cache.layers)
        assert all(900 <= layer.store.bulk.capacity <= 1.1 * 900 + 64 for layer in cache.layers)
        with torch.no_grad():
            model(prompt(50)[0], **pass_cache(cache))
        assert cache.layers[0].store.bulk.expected == 0


@on_gpu
def test_cuda_takes_it() -> None:
    """Copies do not wait, kernels read it in place, and it can be let go of meanwhile."""
    made = pinned.make((1 << 20,), torch.float32, torch.device("cuda", torch.cuda.current_device()))
    assert made.is_pinned()
    made.copy_(torch.arange(1 << 20))
    there = made.to("cuda", non_blocking=True)
    del made
    again = pinned.make((1 << 20,), torch.float32, there.device)
    again.zero_()
    assert torch.equal(there.cpu(), torch.arange(1 << 20).float())


def test_a_refusal_is_not_left_to_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would raise it there once more."""
    raised: list[str] = []

    def launch(*_: Any, **__: Any) -> None:
        raised.append("launch")
        raise RuntimeError("CUDA error: out of memory")

    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaHostUnregister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(torch, "ones", launch)
    monkeypatch.setattr(pinned, "_devices", {torch.device("cuda")})
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    for refuse, given in ((pinned._register, (0, 1, CUDA)), (pinned._unregister, (0,))):
        with pytest.raises(RuntimeError, match=r"CUDA (refuses|does not let go)"):
            refuse(*given)
    assert raised == ["launch"] * 2
