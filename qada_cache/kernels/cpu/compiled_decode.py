"""One decode step of one layer on the CPU in one call of `attention.cpp`."""

import ctypes
import functools
import math
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from ...sketch import LAST_TOKENS, MIN_TOKENS, SEGMENT_TOKENS, selection
from ...sketch.coded import RecordLayout, Records
from .. import cpu
from ..border import OperandError, check_tensor, describe
from ..operands import Operands, Query, Rows, check, is_shared
from ..turn import attend_to_turn
from . import latent
from .addresses import CPU, View, find_view, view
from .building import check_size

GROUP_RULES = {"head": 0, "any": 1}
FLAGS = 32  # tensors of flags that are allocated at once: to allocate one takes as long as to decide
NEW = ("new_keys", "new_values")
MOMENTS = ("mean", "covariance", "log_tokens")
ALONE = 2**18  # work of fewer products is left to one thread, which is done before another one wakes
OF_ROWS = ("local", "pending", "decided", "bulk_lengths")


class RowViews(ctypes.Structure):
    """`Rows` of operands.py."""

    _fields_ = (*((name, View) for name in OF_ROWS), ("columns", ctypes.c_int64))


class MomentViews(ctypes.Structure):
    """`Moments` of operands.py."""

    _fields_ = tuple((name, View) for name in MOMENTS)


class Decode(ctypes.Structure):
    """`Query` and `Operands` of operands.py, rows and sketch included."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", *NEW, "out", "flags")),
        ("rows", RowViews),
        *((name, View) for name in ("near_keys", "near_values", "bulk_keys", "bulk_values", "log_bulk")),
        ("moments", MomentViews * 2),
        *((name, View) for name in ("codes", "scales", "slopes", "units", "noise", "variances", "mean_value")),
        *((name, View) for name in ("slope_units", "centres", "weights", "order")),
        *((name, ctypes.c_void_p) for name in ("errors", "sink_logits")),
        *((name, View) for name in ("records", "open_records", "record_weights")),
        *((name, ctypes.c_void_p) for name in ("bulk_read_bytes", "sketch_read_bytes")),
        *((name, ctypes.c_int64) for name in ("batch", "kv_heads", "split_tokens", "min_sketched")),
        *((name, ctypes.c_int64) for name in ("segment_tokens", "last_tokens", "alone")),
        ("sketch_bytes", ctypes.c_int64 * 3),
        *((name, ctypes.c_float) for name in ("scaling", "logit_threshold", "log_token_threshold")),
        *((name, ctypes.c_float) for name in ("log_unread_weight", "unreliable", "noise_share")),
        *((name, ctypes.c_int) for name in ("group_rule", "threads", "selects")),
        ("words", ctypes.c_int * 3),
    )


def supports(
    query: Tensor, bulk_keys: Tensor, bulk_values: Tensor, criterion: object, records: Records | None = None
) -> bool:
    """Whether `fused_decode` computes such calls (arguments as for `choice.choose_kernel`), its build included; or
    `fused_parts`, where values are channels of the keys, and more heads of one row share these."""
    if len(query) == 1 and is_shared(bulk_keys, bulk_values):
        query = query[:, : cpu.split_heads(query.shape[1])]
    grouped_queries = query.reshape(query.shape[0], bulk_keys.shape[1], -1, query.shape[3])
    sizes = query.shape[3], bulk_values.shape[3], grouped_queries.shape[2]
    shared, beside = is_shared(bulk_keys, bulk_values), records.tensor.shape[2] if records else 0
    return (
        criterion != "oracle"  # which needs every score
        and supports_sizes(query.dtype, *sizes, records.layout if records else None, shared=shared)
        and cpu.supports(grouped_queries, bulk_keys, bulk_keys if shared else bulk_values, beside)
        and _build(query.dtype, *sizes, records, shared) is not None
    )


def supports_sizes(
    dtype: torch.dtype, dim: int, value_dim: int, group: int, records: RecordLayout | None, *, shared: bool
) -> bool:
    """Whether there is a kernel for steps of such sizes, if the build succeeds. Records of latents are decoded."""
    decodes = shared and records is not None
    return cpu.supports_sizes(dtype, dim, value_dim, group) and (
        not decodes or latent.serves_sizes(dtype, dim, value_dim)
    )


def _build(
    dtype: torch.dtype, dim: int, value_dim: int, group: int, records: Records | None, shared: bool
) -> ctypes.CDLL | None:
    sizes = dtype, dim, value_dim, group, records.layout if records else None
    return cpu.build(*sizes, shared=True) if shared else cpu.build(*sizes)


def fused_decode(query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
    """Same contract as `decode_reference.decode_step`, for the calls that `supports` admits."""
    check(query, rows, layer, shares=len(layer.near_keys) == 1)
    if layer.bound is None:
        layer.bound = BoundStep(query, layer)
    return layer.bound.compute(query, rows)


def fused_turn(query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
    """As `fused_decode`, of several queries of one row: `[1, heads, queries, value_dim]`, and bool flags `[1, kv_heads,
    group, queries]`. A byte that several need counts once."""
    return attend_to_turn(fused_decode, query, rows, layer)


def fused_parts(query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
    """As `fused_decode`, of heads of one row that share one key, more than a kernel takes: as rows that share what one
    row holds. Each part of them decides and selects for itself; a byte that several need counts once."""
    heads = query.states.shape[1]
    return attend_to_turn(fused_decode, query, rows, layer, parts=heads // cpu.split_heads(heads))


class BoundStep:
    """The kernel, with those arguments that stay the same until storage changes."""

    def __init__(self, query: Query, layer: Operands) -> None:
        states, sketch, value_dim = query.states, layer.sketch, layer.near_values.shape[3]
        check_tensor("query", states, cpu.ELEMENTS, states.shape, CPU, packed=0)  # and all that was checked with it
        buffers = {name: getattr(layer, name) for name in ("near_keys", "near_values", "bulk_keys", "bulk_values")}
        views: dict[str, Tensor | None] = {"log_bulk": query.log_bulk}
        group = states.shape[1] // layer.kv_heads
        decode = self._decode = Decode(batch=states.shape[0], kv_heads=layer.kv_heads)
        decode.split_tokens, decode.min_sketched = cpu.THREAD_TOKENS, MIN_TOKENS
        decode.segment_tokens, decode.last_tokens, decode.alone = SEGMENT_TOKENS, LAST_TOKENS, ALONE
        decode.scaling, decode.logit_threshold = query.scaling, layer.logit_threshold
        decode.group_rule = GROUP_RULES[layer.group_rule]
        if layer.bulk_read_bytes is not None:
            decode.bulk_read_bytes = layer.bulk_read_bytes.data_ptr()
        if layer.sketch_read_bytes is not None:
            decode.sketch_read_bytes = layer.sketch_read_bytes.data_ptr()
        if sketch is not None:
            views |= {name: part for name, part in sketch.to_tensors().items() if name != "mean_squares"}
            self._errors = 0.5 * query.scaling**2 * sketch.layout.find_errors(states.device)
            decode.words, decode.sketch_bytes = sketch.layout.words, sketch.byte_counts
            decode.errors = self._errors.data_ptr()
            decode.selects = layer.token_threshold > 0
            decode.log_token_threshold = math.log(layer.token_threshold) if decode.selects else -math.inf
            decode.log_unread_weight = math.log(selection.UNREAD_WEIGHT)
            decode.unreliable, decode.noise_share = selection.UNRELIABLE, selection.NOISE_SHARE
        if (records := layer.records) is not None:
            views |= {"records": records.tensor, "open_records": records.open}
            views["record_weights"] = records.weights[None]
        for name, tensor in views.items():
            setattr(decode, name, view(tensor))
        if sketch is not None:  # the words' distance follows from this stride, which is any if there is one head
            decode.codes.head_stride = sketch.codes.shape[2] * sketch.codes.shape[3]
        near, shared = (layer.near_keys, layer.near_values), layer.shares_keys
        for name, tensor in buffers.items():  # the tokens of a head lie one after the other
            packed = 1 if shared and name.endswith("values") else 2
            setattr(decode, name, find_view(name, tensor, states.dtype, tensor.shape, packed=packed))
        self._log_bulk = decode.log_bulk  # a view of its fields
        self._moments = [
            self._place(getattr(held, name), part, 1 if name == "log_tokens" else layer.kv_heads)
            for held, moments in zip(decode.moments, query.moments, strict=False)
            for name, part in zip(MOMENTS, moments, strict=True)
        ]
        sizes = states.shape[3], value_dim, group
        kernels = _build(states.dtype, *sizes, records, shared)
        assert kernels is not None
        check_size(Decode, kernels.decode_size(), cpu.SOURCE)
        self._run: Callable[[], None] = functools.partial(kernels.fused_decode, ctypes.byref(decode))
        self._out = (*states.shape[:3], value_dim)
        self._flags = (FLAGS, states.shape[0], layer.kv_heads, group, 1)
        self._unused: list[Tensor] = []  # of so many calls
        stored = near[:1] if shared else near
        self._new = [(part.dtype, (len(states), layer.kv_heads, 1, part.shape[3])) for part in stored]

    @staticmethod
    def _place(held: View, part: Tensor, heads: int) -> View:
        """Set the strides of the view `held` for moments `[rows * heads, ...]`, of one row for all, or of each row."""
        held.head_stride = part.stride(0)
        held.row_stride = heads * held.head_stride if len(part) > heads else 0
        return held

    def compute(self, query: Query, rows: Rows) -> tuple[Tensor, Tensor]:
        """`fused_decode` for a query like the bound one, and any rows."""
        states, mass, decode = query.states.contiguous(), query.log_bulk, self._decode
        new = () if query.unstored is None else [part.contiguous() for part in query.unstored]
        for name, part, (dtype, shape) in zip(NEW, new, self._new, strict=False):
            if (part.dtype, part.shape, part.is_cpu) != (dtype, shape, True):
                raise OperandError(name, describe(part), f"{dtype} {list(shape)} on cpu")
        decode.new_keys, decode.new_values = [part.data_ptr() for part in new] or (None, None)
        if rows.derived is None:
            rows.derived = RowViews(**{name: view(getattr(rows, name)) for name in OF_ROWS}, columns=rows.columns)
        for held, part in zip(self._moments, chain(*query.moments), strict=True):
            held.data = part.data_ptr()
        out = states.new_empty(self._out)
        if not self._unused:
            self._unused += states.new_empty(self._flags, dtype=torch.bool).unbind()
        flags = self._unused.pop()
        if (sinks := query.sink_logits) is not None:
            sinks = sinks.float()  # kept until the call has ended
            decode.sink_logits = sinks.data_ptr()
        decode.query, decode.out, decode.flags = states.data_ptr(), out.data_ptr(), flags.data_ptr()
        decode.rows, decode.threads = rows.derived, torch.get_num_threads()
        self._log_bulk.data = None if mass is None else mass.data_ptr()
        self._run()
        return out, flags
