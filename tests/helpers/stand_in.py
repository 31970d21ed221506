"""The host as a stand-in for an accelerator: everything an offloaded bulk does, except pinning and streams.

Copies are made as late as possible: when code waits for them. So a read without a wait finds nan, and a write to the
source of a copy under way spoils the copy. `on_gpu` and `DEVICES` mark tests that need a CUDA device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from qada_cache.storage import bulk, transfers
from qada_cache.storage.transfers import AsyncCopy

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def on_gpu(test: Callable) -> Callable:
    """Marks a test that needs a CUDA device."""
    for mark in GPU:
        test = mark(test)
    return test


@contextmanager
def without_waiting() -> Iterator[None]:
    """Inside, an operation for which the host waits for the CUDA device raises RuntimeError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def strided(tokens: int, heads: int = 4) -> tuple[Tensor, Tensor]:
    """Keys and values bfloat16 `[1, heads, tokens, 64]` on the GPU, with the strides that models give them."""
    made = torch.randn(2, 1, tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
    return made[0].transpose(1, 2), made[1].transpose(1, 2)


class Late:
    """An event whose copy is made when it is waited for."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self.copy: Callable[[], None] | None = copy

    def synchronize(self) -> None:
        if self.copy is not None:
            copy, self.copy = self.copy, None
            copy()

    def query(self) -> bool:
        return self.copy is None


class LateCopy(AsyncCopy):
    """A copy to the device, which is made when the computation has to wait for it."""

    def wait(self) -> tuple[Tensor, ...]:
        self._event.synchronize()
        return self.tensors


def _nothing(tensor: Tensor) -> float:
    """The number that fills a tensor before its copy: nan, or 255 in records, whose scales are nan then."""
    return torch.nan if tensor.is_floating_point() else 255


class Copies:
    """Makes copies late, and counts those to the device: `count` copies, tokens of the `longest` one, and `bytes`.

    The next copy raises `fail`. With `eager`, copies are made at once.
    """

    def __init__(self) -> None:
        self.longest = self.bytes = self.count = 0
        self.fail: Exception | None = None
        self.eager = False
        self.last: Late | None = None  # copy to the host: they come in order, as on one stream

    def fetch(self, held: tuple[Tensor, ...], device: torch.device, *, after: Any) -> AsyncCopy:
        failure, self.fail = self.fail, None
        if failure is not None:
            raise failure
        assert all(tensor.is_contiguous() for tensor in held)
        self.count += 1
        self.longest = max(self.longest, held[0].shape[2])
        self.bytes += sum(tensor.nbytes for tensor in held)
        if device.type == "cuda":
            return transfers.fetch(held, device, after=after)
        there = tuple(torch.full_like(tensor, _nothing(tensor), device=device) for tensor in held)

        def copy() -> None:
            if after is not None:
                after.synchronize()
            for target, source in zip(there, held, strict=True):
                target.copy_(source)

        return LateCopy(there, self._late(copy))

    def send(self, copies: Iterable[tuple[Tensor, Tensor]], device: torch.device, copier: Any = None) -> Late:
        copies, before = list(copies), self.last
        assert copier is not None or all(target.is_contiguous() for target, _ in copies)

        def copy() -> None:
            if before is not None:
                before.synchronize()
            for target, source in copies:
                target.copy_(source)

        self.last = self._late(copy)
        return self.last

    def _late(self, copy: Callable[[], None]) -> Late:
        event = Late(copy)
        if self.eager:
            event.synchronize()
        return event


@contextmanager
def accelerator(device: str = "cpu") -> Iterator[Copies]:
    """Inside, caches on the CPU offload as on an accelerator. On another `device` copies are real, and only counted."""
    copies = Copies()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(bulk, "fetch", copies.fetch))
        # Torch decodes: the other kernels read an offloaded bulk without a copy.
        stack.enter_context(mock.patch.dict(os.environ, {"QADA_KERNELS": "torch"}))
        if device == "cpu":
            stack.enter_context(mock.patch.object(bulk, "send", copies.send))
            stack.enter_context(mock.patch.object(bulk, "wait_event", lambda event, device: event.synchronize()))
            stack.enter_context(mock.patch.object(bulk, "has_own_memory", return_value=True))
            stack.enter_context(mock.patch.object(torch.accelerator, "synchronize"))
        yield copies
