"""Addresses of tensors, for C++. This folder takes them here alone, where the tensors are checked. Only the decode step
takes its own: `operands.check` checks a step's operands once, and recognizes them in the next step."""

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
    """The view of a tensor `[rows, ...]` or `[rows, kv_heads, ...]`, checked as by `find_address`. A tensor of one row
    stands for all rows."""
    check_tensor(name, tensor, dtype, shape, CPU, packed)
    return view(tensor)


def view(tensor: Tensor | None) -> View:
    """The view of a tensor that has been checked already."""
    if tensor is None:
        return View()
    row = 0 if tensor.shape[0] == 1 else tensor.stride(0)
    return View(tensor.data_ptr(), row, tensor.stride(1) if tensor.dim() > 1 else 0)
