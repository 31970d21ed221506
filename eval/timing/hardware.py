"""What the machine can do at best: how fast it reads and copies, and how much memory a method took."""

import contextlib
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

SIZE = 1 << 30  # bytes that are read: more than any processor's cache


def wait(device: torch.device) -> None:
    """For what the device still has to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _best(work: Callable[[], object], device: torch.device, size: int) -> float:
    """Bytes a second, the best of several."""
    best = 0.0
    for _ in range(6):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        best = max(best, size / (time.perf_counter() - begin))
    return best


def speeds(device: torch.device) -> dict[str, float]:
    """In bytes a second: "read", by a plain reduction; and to an accelerator from pinned memory, "copy", and
    "zero_copy", by a kernel that reads the host's memory in place."""
    data = torch.ones(SIZE // 4, device=device)
    found = {"read": _best(data.sum, device, SIZE)}
    if device.type == "cuda":
        host = torch.ones(SIZE // 4, pin_memory=True)
        found["copy"] = _best(lambda: data.copy_(host, non_blocking=True), device, SIZE)
        with contextlib.suppress(ImportError):  # without Triton there is no kernel that could
            found["zero_copy"] = _zero_copy(host, data)
    return found


def _zero_copy(host: torch.Tensor, data: torch.Tensor) -> float:
    """Bytes a second that a decode step's kernel reads of a bulk in pinned memory, every head flagged."""
    from qada_cache.kernels.decode_call import DecodeCall
    from qada_cache.kernels.triton.decode import fused_decode

    dim, heads = 128, 8
    tokens = host.numel() * 2 // (2 * heads * dim)  # keys and values as half-precision numbers
    keys, values = host.view(torch.bfloat16).view(2, 1, heads, tokens, dim)
    near = torch.zeros(1, heads, 16, dim, dtype=torch.bfloat16, device=data.device)
    told = {
        "local": torch.ones(1, 16, dtype=torch.bool, device=data.device),
        "staged": torch.zeros(1, 16, dtype=torch.bool, device=data.device),
        "bulk_lengths": torch.tensor([tokens], device=data.device),
        "decided": torch.ones(1, dtype=torch.bool, device=data.device),
        "pulled": torch.zeros((), dtype=torch.int64, device=data.device),
        "query": torch.ones(1, 4 * heads, 1, dim, dtype=torch.bfloat16, device=data.device),
        "near_keys": near, "near_values": near, "bulk_keys": keys, "bulk_values": values,
        "scaling": 0.1, "threshold": 0.5, "criterion": "dense",
    }  # fmt: skip
    call = DecodeCall.of(**told)
    return _best(lambda: fused_decode(call), data.device, host.nbytes)


class Peak:
    """The most memory held since this was made, above what was held then: `device` and `host` in bytes.

    On the host it is the process's resident memory, which Linux lets us watch; elsewhere it stays 0.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._device, self._status = device, Path("/proc/self/status")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._held = torch.cuda.memory_allocated(device)
        self._watched = False
        with contextlib.suppress(OSError, ValueError):  # a system without these files, or that keeps them to itself
            Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew
            self._resident = self._highest()
            self._watched = True

    def _highest(self) -> int:
        (line,) = (line for line in self._status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    @property
    def device(self) -> int:
        """Bytes on an accelerator."""
        if self._device.type != "cuda":
            return 0
        return torch.cuda.max_memory_allocated(self._device) - self._held

    @property
    def host(self) -> int:
        """Bytes of the process."""
        return self._highest() - self._resident if self._watched else 0
