"""Checks of tensors before kernels take their addresses."""

from typing import Any

import torch
from torch import Tensor

from ..sketch import BLOCK, Sketch, order_dtype, segments_of
from .decode_call import DecodeCall, MisfitError


def check(call: DecodeCall) -> None:
    """Raise ValueError unless a kernel that goes by the query's sizes and dtype reads within all tensors of a call.

    Parts that are those of the layer's last call are known to be right. Each pass has rows of its own, checked when
    they were made; here they have to fit the layer.
    """
    query, rows, binding = call.query, call.rows, call.binding
    if not binding.is_of(call):
        binding.forget()
        if not _parts_fit(call):
            raise _misfit(call)
        binding.remember(call)
    if not (
        rows.number in (1, query.shape[0])
        and rows.columns <= call.near_keys.shape[2]
        and (rows.longest is None or rows.longest <= call.bulk_keys.shape[2])
        and rows.device == query.device
    ):
        raise _misfit(call)


def _misfit(call: DecodeCall) -> MisfitError:
    rows, kept = call.rows, () if call.sketch is None else call.sketch.tensors().values()
    parts = (part for part in call.parts() if isinstance(part, Tensor))
    return MisfitError((call.query, rows.local, rows.bulk_lengths, rows.decided, *parts, *kept))


def _parts_fit(call: DecodeCall) -> bool:
    query = call.query
    batch, heads, queries, dim = query.shape
    kv_heads, value_dim = call.near_keys.shape[1], call.near_values.shape[3]
    fits = queries == 1 and bool(kv_heads) and heads % kv_heads == 0 and call.near_keys.device == query.device
    for keys, values in ((call.near_keys, call.near_values), (call.bulk_keys, call.bulk_values)):
        fits = fits and keys.dtype == values.dtype == query.dtype
        fits = fits and keys.shape[:2] == (batch, kv_heads) and keys.shape[:3] == values.shape[:3]
        fits = fits and (keys.shape[3], values.shape[3]) == (dim, value_dim)
        fits = fits and keys.stride(3) == values.stride(3) == 1 and keys.device == values.device
    shapes: list[tuple[Tensor | None, Any]] = [
        *((mean, (torch.float32, (kv_heads, dim))) for mean in (call.mean, call.other_mean)),
        *((matrix, (torch.float32, (kv_heads, dim, dim))) for matrix in (call.covariance, call.other_covariance)),
        (call.count, (torch.int64, ())),
    ]
    for tensor, expected in shapes:
        if tensor is not None:
            fits = fits and (tensor.dtype, tuple(tensor.shape[1:])) == expected and len(tensor) in (1, batch)
            fits = fits and tensor[0].is_contiguous() and tensor.device == query.device
    group = heads // kv_heads if kv_heads else 0
    for tensor, expected in (
        (call.rule.table, (torch.bool, (kv_heads, group))),
        *((counted, (torch.int64, ())) for counted in (call.pulled, call.sketched)),
    ):
        if tensor is not None:
            fits = fits and (tensor.dtype, tuple(tensor.shape)) == expected and tensor.device == query.device
    return fits and (call.sketch is None or _sketch_fits(call.sketch, call))


def _sketch_fits(sketch: Sketch, call: DecodeCall) -> bool:
    """Whether the sketch fits the bulk, in the shapes, dtypes and layout that kernels expect at its addresses."""
    heads, dim, value_dim = tuple(call.bulk_keys.shape[:2]), call.query.shape[3], call.bulk_values.shape[3]
    capacity, words = sketch.scales.shape[2], sketch.codes.shape[2]
    segments = segments_of(capacity) if capacity else 0
    expected = {
        "codes": (torch.int32, (words, capacity)),
        "scales": (torch.uint8, (capacity,)),
        "units": (torch.float32, (segments,)),
        "centres": (torch.bfloat16, (segments, dim)),
        "order": (order_dtype(dim), (segments, dim)),
        "weights": (torch.bfloat16, (segments, dim)),
        "noise": (torch.float32, (dim,)),
        "variances": (torch.float32, (dim,)),
        "mean_value": (torch.float32, (value_dim,)),
        "slopes": (torch.int8, (value_dim, dim)),
        "slope_units": (torch.float32, (dim,)),
    }
    found = sketch.tensors()
    return (
        dim % BLOCK == 0
        and 0 < words <= dim // BLOCK
        and capacity >= call.bulk_keys.shape[2]
        and all(
            (tensor.dtype, tuple(tensor.shape)) == (dtype, heads + shape)
            and tensor.is_contiguous()
            and tensor.device == call.query.device
            for tensor, (dtype, shape) in ((found[name], expected[name]) for name in expected)
        )
    )
