"""Which implementation copies tokens of all heads at once: Triton's kernel on a GPU, once tried there; else torch, head
by head where the host's memory takes part."""

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..said_once import warn_once
from .choice import AUTO_DEVICES, explain_unsupported
from .reference import CompileAhead, find_fault

logger = logging.getLogger(__name__)

Pairs = Sequence[tuple[Tensor, Tensor]]  # target and source each, `[rows, heads, tokens, dim]`
Copier = Callable[[Pairs, torch.device], None]  # `triton.copying.copy_tokens`
# The kernel copies up to so many bytes of a head from or to the host's memory: to start a copy for each head takes the
# host longer than the bus. The device's copy engines copy more, while its processors compute.
HOST_BYTES = 1 << 19


def find_copier(pairs: Pairs, device: torch.device, kernels: str) -> Copier | None:
    """The function that copies these pairs in one launch on the current stream, on the device or between it and the
    host's memory; None if torch has to copy them. `kernels` is one of `choice.KINDS`."""
    if kernels == "torch" or device.type not in AUTO_DEVICES:
        return None
    for pair in pairs:
        for part in pair:
            if part.device != device and (_count_head_bytes(part) > HOST_BYTES or not part.is_pinned()):
                return None
    like = pairs[0][0]
    if not _is_served(device):
        return None
    from .triton.copying import can_copy, copy_tokens

    return copy_tokens if can_copy(pairs) and _agrees(device, like.dtype, like.shape[3]) else None


def _count_head_bytes(part: Tensor) -> int:
    return part.shape[2] * part.shape[3] * part.element_size()


@functools.cache
def _is_served(device: torch.device) -> bool:
    like = torch.empty(1, 1, 1, 1, dtype=torch.float32, device=device)
    return explain_unsupported(like, like, like, None) is None  # decoding tokens needs the same, and warns of it


@functools.cache
def _agrees(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether Triton's kernel copies such tokens correctly on this device. If it runs there and does not, a warning
    says so. The trial waits for the device."""
    from .triton.copying import copy_tokens
    from .triton.launching import compile_ahead

    if (fault := find_copying_fault(copy_tokens, device, dtype, dim, compile_ahead)) is None:
        return True
    warn_once(logger, f"tokens are copied on {device} by torch's operations, not by Triton's kernel: {fault}")
    return False


def find_copying_fault(
    copier: Copier, device: torch.device, dtype: torch.dtype, dim: int, compile_ahead: CompileAhead | None = None
) -> str | None:
    """The fault of a copier of tokens of `dim` numbers on this device, as `reference.find_fault` says it, which has
    `compile_ahead`. It copies random tokens to the host and back."""
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randint(128, (2, 70, 3, dim), generator=generator, dtype=torch.int64, device="cpu")
    tokens = numbers.to(dtype).transpose(1, 2)
    expected = torch.zeros(2, 3, 100, dim, dtype=dtype, device="cpu")
    expected[:, :, 30:] = tokens

    def compute() -> tuple[Tensor, ...]:
        sent, pinned = tokens.to(device), device.type == "cuda"
        host = torch.zeros(expected.shape, dtype=dtype, device="cpu", pin_memory=pinned)
        received, copy = torch.zeros_like(sent), torch.zeros_like(sent)
        copier([(host[:, :, 30:], sent)], device)
        copier([(received[:, :, :9], host[:, :, 30:39]), (received[:, :, 9:], host[:, :, 39:])], device)
        copier([(copy, received)], device)
        copied = copy.cpu()  # it also waits until the kernel has written `host`
        return host.clone(), copied

    return find_fault(compute, (expected, tokens), compile_ahead=compile_ahead)
