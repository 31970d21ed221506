"""One decode step of one layer on the CPU in one call of `attention.cpp`, decisions included."""

import ctypes
import functools
import math

import torch
from torch import Tensor

from ...sketch import MIN_TOKENS, SEGMENT_TOKENS, Sketch, codec, selection
from ..rules import check_operands, decision_rules
from . import compiled

CRITERIA = {"local": 0, "dense": 1, "static": 2, "gaussian": 3}
GROUP_RULES = {"head": 0, "any": 1}


class Decode(ctypes.Structure):
    """`Decode` of attention.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "near_keys", "near_values", "bulk_keys", "bulk_values")),
        *((name, ctypes.c_void_p) for name in ("local", "staged", "decided", "table", "bulk_lengths", "count")),
        *((name, ctypes.c_void_p) for name in ("mean", "covariance", "other_mean", "other_covariance")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "slopes", "units", "mean_squares")),
        *((name, ctypes.c_void_p) for name in ("mean_value", "slope_units", "rotation", "centres", "weights")),
        *((name, ctypes.c_void_p) for name in ("out", "flags", "pulled", "sketched")),
        *((name, ctypes.c_int64) for name in ("batch", "kv_heads", "columns", "split_tokens")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("near_key", "near_value") for axis in ("batch", "head")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("bulk_key", "bulk_value") for axis in ("batch", "head")),
        *((name, ctypes.c_int64) for name in ("sketch_tokens", "sketch_segments", "min_sketched", "segment_tokens")),
        *((f"{name}_row", ctypes.c_int64) for name in ("local", "staged", "decided", "length", "count")),
        *((f"{name}_row", ctypes.c_int64) for name in ("mean", "covariance", "other_mean", "other_covariance")),
        *((name, ctypes.c_float) for name in ("scaling", "limit", "log_token_threshold", "log_unread_weight")),
        *((name, ctypes.c_float) for name in ("spread", "unreliable")),
        *((name, ctypes.c_int) for name in ("criterion", "group_rule", "pool_staged", "threads", "bits")),
    )


def obstacle(query: Tensor, bulk_keys: Tensor, bulk_values: Tensor, criterion: object) -> str | None:
    """Why this module cannot compute this call, None if it can (arguments as for `choice.obstacle`)."""
    group, dim, value_dim = query.shape[1] // bulk_keys.shape[1], query.shape[3], bulk_values.shape[3]
    if query.device.type != "cpu" or query.dtype not in compiled.ELEMENTS:
        return f"there is no kernel for {query.dtype} on {query.device.type}"
    if not (
        query.dtype == bulk_keys.dtype == bulk_values.dtype and bulk_keys.device == bulk_values.device == query.device
    ):
        return "query, keys and values differ in dtype or device"
    if bulk_keys.shape[2] < compiled.MIN_TOKENS or group > compiled.MAX_QUERIES or dim % 8 or value_dim % 8:
        return "the kernel is not made for these sizes"
    if criterion == "oracle":
        return "criterion='oracle' needs every score"
    return None if compiled.build(query.dtype, dim, value_dim, group) else "it cannot be built"


def fused_decode(
    query: Tensor,
    near_keys: Tensor,
    near_values: Tensor,
    bulk_keys: Tensor,
    bulk_values: Tensor,
    *,
    local: Tensor,
    staged: Tensor,
    bulk_lengths: Tensor,
    decided: Tensor,
    scaling: float,
    threshold: float,
    group_rule: str = "head",
    criterion: str | Tensor = "gaussian",
    mean: Tensor | None = None,
    covariance: Tensor | None = None,
    count: Tensor | None = None,
    pool_staged: bool = False,
    other_mean: Tensor | None = None,
    other_covariance: Tensor | None = None,
    pulled: Tensor | None = None,
    sketch: Sketch | None = None,
    token_threshold: float = 0.0,
    sketched: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same contract as `decode_reference.fused_decode`, for the calls that have no `obstacle`."""
    batch, heads, _, dim = query.shape
    kv_heads, columns, value_dim = near_keys.shape[1], near_keys.shape[2], near_values.shape[3]
    group = heads // kv_heads
    check_operands(
        query,
        near=(near_keys, near_values),
        bulk=(bulk_keys, bulk_values),
        moments=(mean, covariance),
        other_moments=(other_mean, other_covariance),
        masks=(local, staged),
        rows=(bulk_lengths, count, decided),
        sketch=sketch,
    )
    if not all(map(compiled.rows_contiguous, (near_keys, near_values, bulk_keys, bulk_values))):
        raise ValueError("the tokens of a head do not lie one after the other")
    kernels = compiled.build(query.dtype, dim, value_dim, group)
    assert kernels is not None
    query = query.contiguous()
    out = torch.empty(batch, heads, 1, value_dim, dtype=torch.float32, device=query.device)
    flags = torch.empty(batch, kv_heads, group, dtype=torch.bool, device=query.device)
    pulled = torch.zeros((), dtype=torch.int64, device=query.device) if pulled is None else pulled
    kind, table, rule, limit = decision_rules(criterion, group_rule, threshold)
    table = None if table is None else table.contiguous()

    kept: dict[str, Tensor] = {} if sketch is None else sketch.tensors()
    rotation, log_threshold, spread, unreliable, bits, room = None, 0.0, 0.0, 0.0, 0, (0, 0)
    if sketch is not None:
        rotation, log_threshold, bits = _transposed_rotation(dim), math.log(token_threshold), sketch.bits
        spread, unreliable = codec.spread_of(bits) * scaling**2, selection.UNRELIABLE[bits]
        room = sketch.codes.shape[2], sketch.units.shape[2]

    def row(tensor: Tensor | None) -> int:
        """How many elements apart the rows of a tensor are that may have one for all."""
        return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)

    pointers = (
        *(query, near_keys, near_values, bulk_keys, bulk_values, local, staged, decided, table),
        *(bulk_lengths, count, mean, covariance, other_mean, other_covariance),
        *(kept.get(name) for name in ("codes", "scales", "slopes", "units", "mean_squares", "mean_value")),
        *(kept.get("slope_units"), rotation, kept.get("centres"), kept.get("weights"), out, flags, pulled, sketched),
    )
    call = Decode(
        *(None if tensor is None else tensor.data_ptr() for tensor in pointers),
        *(batch, kv_heads, columns, compiled.SPLIT_TOKENS),
        *(stride for buffer in (near_keys, near_values, bulk_keys, bulk_values) for stride in buffer.stride()[:2]),
        *(*room, MIN_TOKENS, SEGMENT_TOKENS),
        *(row(tensor) for tensor in (local, staged, decided, bulk_lengths, count)),
        *(row(tensor) for tensor in (mean, covariance, other_mean, other_covariance)),
        *(scaling, limit, log_threshold, math.log(selection.UNREAD_WEIGHT), spread, unreliable),
        *(CRITERIA[kind], GROUP_RULES[rule], pool_staged, torch.get_num_threads(), bits),
    )
    kernels.fused_decode(ctypes.byref(call))
    return out.to(query.dtype), flags


@functools.cache
@torch.inference_mode(False)  # it is used outside of it as well
def _transposed_rotation(dim: int) -> Tensor:
    return codec.rotation(dim, torch.device("cpu")).mT.contiguous()
