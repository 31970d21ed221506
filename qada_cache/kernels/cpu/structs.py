"""The arguments of `fused_decode` of attention.cpp, field by field as in decide.h."""

import ctypes

from torch import Tensor

CRITERIA = {"local": 0, "dense": 1, "static": 2, "gaussian": 3}
GROUP_RULES = {"head": 0, "any": 1}


class View(ctypes.Structure):
    """Address and strides of a tensor's rows and heads, in elements; stride 0 if all share one."""

    _fields_ = (("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


def view(tensor: Tensor | None) -> View:
    """A view of `[rows, ...]` or `[rows, kv_heads, ...]`; one row stands for all."""
    if tensor is None:
        return View()
    row = 0 if tensor.shape[0] == 1 else tensor.stride(0)
    return View(tensor.data_ptr(), row, tensor.stride(1) if tensor.dim() > 1 else 0)


class Rows(ctypes.Structure):
    """`Rows` of decode_call.py."""

    _fields_ = (
        *((name, View) for name in ("local", "staged", "decided", "bulk_lengths")),
        ("columns", ctypes.c_int64),
    )


class Decode(ctypes.Structure):
    """`DecodeCall` of decode_call.py, its rule and sketch included."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "out", "flags")),
        ("rows", Rows),
        *((name, View) for name in ("near_keys", "near_values", "bulk_keys", "bulk_values", "table")),
        *((name, View) for name in ("mean", "covariance", "other_mean", "other_covariance", "count")),
        *((name, View) for name in ("codes", "scales", "slopes", "units", "noise", "variances", "mean_value")),
        *((name, View) for name in ("slope_units", "centres", "weights", "order")),
        *((name, ctypes.c_void_p) for name in ("errors", "pulled", "sketched")),
        *((name, ctypes.c_int64) for name in ("batch", "kv_heads", "split_tokens", "min_sketched", "segment_tokens")),
        *((name, ctypes.c_float) for name in ("scaling", "limit", "log_token_threshold", "log_unread_weight")),
        *((name, ctypes.c_float) for name in ("unreliable", "noise_share")),
        *((name, ctypes.c_int) for name in ("criterion", "group_rule", "pool_staged", "threads")),
        ("words", ctypes.c_int * 3),
    )
