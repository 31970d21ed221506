"""Checks of tensors whose addresses are passed to kernels, which do not check anything themselves."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor


class OperandError(ValueError):
    """A tensor that a kernel would misread, or read out of bounds."""

    def __init__(self, name: str, found: Any, wanted: str) -> None:
        super().__init__(f"the kernel cannot read these tensors as those of one layer: {name} is {found}, not {wanted}")


def describe(tensor: Tensor) -> str:
    """A tensor's dtype, shape and device, for an error message, and its strides if it is not contiguous."""
    strides = "" if tensor.is_contiguous() else f" of strides {list(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{strides} on {tensor.device}"


def check_tensor(
    name: str,
    tensor: Tensor,
    dtypes: torch.dtype | Collection[torch.dtype],
    shape: Sequence[int],
    device: torch.device,
    packed: int | None = None,
) -> None:
    """Raise OperandError unless a tensor has one of these `dtypes`, this shape and this device, and its last `packed`
    dimensions are contiguous; None: all dimensions."""
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    fits = tensor.dtype in allowed and tuple(tensor.shape) == tuple(shape) and tensor.device == device
    if fits and (tensor.is_contiguous() if packed is None else is_packed(tensor, packed)):
        return
    layout = "contiguous" if packed is None else f"the last {packed} dimensions contiguous"
    raise OperandError(name, describe(tensor), f"{' or '.join(map(str, allowed))} {list(shape)} on {device}, {layout}")


def is_packed(tensor: Tensor, dimensions: int) -> bool:
    """Whether the last `dimensions` of a tensor are contiguous; those of an empty tensor are."""
    packed_stride = 1
    if not tensor.numel():
        return True
    for size, stride in zip(tensor.shape[: -dimensions - 1 : -1], tensor.stride()[: -dimensions - 1 : -1], strict=True):
        if size != 1 and stride != packed_stride:
            return False
        packed_stride *= size
    return True
