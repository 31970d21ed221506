"""C++ kernels that run out of memory, at any of their allocations: an error in Python, and the next call is right."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from decode_scene import Scene, step_of
from test_compiled import SCALING, check, tensors
from test_selected_tokens import BULK
from torch import Tensor

from qada_cache.kernels import cpu
from qada_cache.kernels.cpu import building, compiled_decode

pytestmark = [needs_compiler, pytest.mark.usefixtures("short_rows")]

ALLOCATOR = """
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
static std::atomic<int64_t> left{1ll << 60};
extern "C" void fail_after(int64_t allocations) { left = allocations; }
void* operator new(std::size_t size) {
    if (left-- <= 0) throw std::bad_alloc();
    if (void* found = std::malloc(size)) return found;
    throw std::bad_alloc();
}
void* operator new[](std::size_t size) { return operator new(size); }  // the library's own would not count
"""


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The header of an allocator that fails, one for all tests, so that a kernel is built once for any number of
    threads."""
    path = tmp_path_factory.mktemp("allocator") / "allocator.h"
    path.write_text(ALLOCATOR)
    return path


@pytest.fixture(params=[1, 3], ids="{} threads".format)
def fail_after(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, header: Path
) -> Callable[[ctypes.CDLL, int], None]:
    """Kernels are built with an allocator that fails after so many allocations."""
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-include", str(header), "-Wl,-Bsymbolic"))
    for name in ("build", "build_partial"):
        monkeypatch.setattr(cpu, name, functools.cache(getattr(cpu, name).__wrapped__))
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(compiled_decode, "ALONE", 0)

    def set_limit(kernels: ctypes.CDLL, allocations: int) -> None:
        kernels.fail_after.argtypes, kernels.fail_after.restype = [ctypes.c_int64], None
        kernels.fail_after(allocations)

    return set_limit


def test_a_decode_step(fail_after: Callable[[ctypes.CDLL, int], None]) -> None:
    """A step over sketched and whole bulks, with pending tokens, raises if any allocation fails, and then counts no
    bytes."""
    scene = Scene(bulk=BULK[Scene], group=2, bits=1.5)
    decision = {"group_rule": "head", "threshold": scene.threshold("head")}
    flags, threshold = scene.flags(criterion="gaussian", **decision), scene.token_threshold()
    selected = scene.selected(flags, threshold)
    needed = scene.forget_unneeded(flags, selected)
    call = step_of(**scene.step_arguments("cpu", threshold, **decision))
    layer = call[2]
    kernels = cpu.build(torch.float32, scene.dim, scene.dim, scene.group)
    assert kernels is not None
    for allocations in range(1000):
        fail_after(kernels, allocations)
        try:
            out, found = compiled_decode.fused_decode(*call)
            break
        except MemoryError:
            counted = layer.bulk_read_bytes.item(), layer.sketch_read_bytes.item()
            assert counted == (0, 0)
    assert allocations > 20
    assert torch.equal(found, flags)
    scene.check(out, flags, selected)
    assert layer.bulk_read_bytes.item() == needed
    assert layer.sketch_read_bytes.item() == scene.sketch_read_bytes(selected, flags)


def test_partial_attention(fail_after: Callable[[ctypes.CDLL, int], None]) -> None:
    query, key, value = tensors(32, 32, 2, 1100, torch.float32)
    kernel = cpu.build_partial(torch.float32, 32, 32, 2)
    assert kernel is not None

    def attend(allocations: int) -> tuple[Tensor, Tensor] | None:
        fail_after(kernel, allocations)
        return cpu.compiled_partial_attention(query, key, value, scaling=SCALING)

    for allocations in (0, 1):
        with pytest.raises(MemoryError, match="no memory"):
            attend(allocations)
    found = attend(2)
    assert found is not None
    check(found, query, key, value, torch.ones(1, 1, 2, 1100, dtype=torch.bool))


def test_threads_that_end_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's end frees the memory that its helper threads keep between steps, as in a server with a thread for each
    request."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    scene = Scene(bulk=[(20_000, 0)], short=(), kv_heads=8, group=16, dim=16, bits=1)
    call = step_of(**scene.step_arguments("cpu", 1e-30, criterion="dense"))
    used = []
    for _ in range(40):
        thread = threading.Thread(target=compiled_decode.fused_decode, args=call)
        thread.start()
        thread.join()
        used.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    assert used[-1] - used[19] < 10e6
