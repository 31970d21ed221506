"""Addresses of tensors, for C++: nothing else in this folder takes one, but for a decode step, whose operands are
checked once and known again (`operands.check`)."""

import ctypes
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..border import check_tensor

CPU = torch.device("cpu")


class View(ctypes.Structure):
    """Address and strides of a tensor's rows and heads, in elements; stride 0 if all share one."""

    _fields_ = (("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


def find_address(
    name: str,
    tensor: Tensor,
    dtypes: torch.dtype | Collection[torch.dtype],
    shape: Sequence[int],
    packed: int | None = None,
) -> int:
    """The address of a tensor on the CPU; OperandError as by `check_tensor`."""
    check_tensor(name, tensor, dtypes, shape, CPU, packed)
    return tensor.data_ptr()


def find_view(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], packed: int) -> View:
    """Likewise, of `[rows, ...]` or `[rows, kv_heads, ...]`; one row stands for all."""
    check_tensor(name, tensor, dtype, shape, CPU, packed)
    return view(tensor)


def view(tensor: Tensor | None) -> View:
    """A view of a tensor that is known to be right."""
    if tensor is None:
        return View()
    row = 0 if tensor.shape[0] == 1 else tensor.stride(0)
    return View(tensor.data_ptr(), row, tensor.stride(1) if tensor.dim() > 1 else 0)
