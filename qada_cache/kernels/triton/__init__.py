"""Triton kernels for GPUs: one decode step of one layer in two or three, without a word between host and device.

`local_kernel` computes local attention and decides, `bulk_kernel` reads the bulk of KV heads that need it, in splits,
of which the last one puts the parts together. With a sketch, `local_kernel` also prepares queries for each segment, and
`estimate_kernel` estimates all scores of the bulk. Instead of `bulk_kernel`, `selected_kernel` then reads the selected
tokens, sums the estimates of the others, and adds the expected value of unread tokens. Bulks of records take the same
three, whether or not tokens are selected.

The launches depend on shapes alone: flags, lengths and selections stay on the device, programs of local heads return at
once, and a CUDA graph can hold all of it. The bulk may be pinned host memory, read in place over the bus. A byte that
no head needs is never moved, and a needed one once, as the query heads of a group are packed.

It has been run on an H100 and an H200, under Triton's interpreter, and compiled for other GPUs. `sizing.py` says into
what pieces the work is cut.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...sketch import LAST_TOKENS, MIN_TOKENS, SEGMENT_TOKENS, selection
from ...sketch.coded import find_block
from ..operands import Operands, Query, Rows, check
from . import sizing
from .estimate_kernels import count_rows, estimate_kernel
from .given import Given
from .kernels import bulk_kernel, local_kernel
from .launching import Launch, Launches, RowStrides, Steps, find_stride
from .scratch import Scratch
from .sketch_kernels import selected_kernel

NEVER = 2**31 - 1  # tokens of a bulk from which on tokens are selected


class Changing(NamedTuple):
    """The arguments of a step's kernels that change from step to step."""

    states: Any
    local: Any  # this and the next three are of `Rows`
    pending: Any
    lengths: Any
    decided: Any
    log_bulk: Any
    flags: Any
    out: Any
    sinks: Any
    marks: Any
    s_local: Any  # this and the next four are from row to row
    s_pending: Any
    s_length: Any
    s_decided: Any
    s_mass: Any
    s_marks: Any
    columns: Any


def fused_decode(query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
    """Same contract as `decode_reference.decode_step`, for the calls that `choice.explain_unsupported` admits.

    Everything but the bulk buffers lies on the query's device. The last dimension of the
    buffers is contiguous. Each row of the layer may be that of several queries side by side, as in `turn.py`. Nothing
    waits for the device. A captured graph can be replayed as long as the tensors stay where they are, so until the bulk
    grows; lengths, masks and `log_bulk` may be written to in place.
    """
    check(query, rows, layer, shares=True)
    if layer.bound is None:
        layer.bound = BoundLaunches(query, layer)
    return layer.bound.compute(query, rows, layer)


class BoundLaunches:
    """The launches of a layer's kernels, with sizes, numbers and tensors that stay the same until storage changes."""

    _given: Given | None = None

    def __init__(self, query: Query, layer: Operands) -> None:
        sketch, records, states, scaling = layer.sketch, layer.records, query.states, query.scaling
        (batch, heads, _, dim), (kv_heads, capacity) = states.shape, layer.bulk_keys.shape[1:3]
        sizes, selects = sizing.find_sizes(query, layer), layer.token_threshold > 0
        group, value_dim = sizes["G"], sizes["V"]
        self._turn = batch // len(layer.near_keys)  # rows of the query that share what one row holds
        queries = triton.next_power_of_2(group)
        scan = min(sizing.SCAN_TOKENS, sizing.SCAN_SCORES // queries)
        if records is not None:
            assert sketch is not None
            capacity = sketch.scales.shape[2]  # which is of all tokens
        elif capacity < MIN_TOKENS:
            sketch = None  # there is no room for a bulk that has one
        self._sketched = sketch is not None
        chooses, turns = selects and sketch is not None, records is not None and not layer.decodes
        selecting = sizing.find_record_sizes(layer, states.dtype, sizes)
        estimating = sizing.find_estimate_sizes(queries)
        groups, device = batch * kv_heads, states.device
        splits, most_splits = min(triton.cdiv(capacity, sizing.SPLIT_TOKENS), sizing.MAX_SPLITS), sizing.MAX_SPLITS
        if chooses:
            at_least, most_splits = sizing.SELECTED_TOKENS, sizing.SELECTED_SPLITS
            splits = sizing.count_splits(capacity, at_least, most_splits, groups, device, selecting)
        self._splits, at_least = splits, sizing.ESTIMATE_TOKENS
        self._sums = sums = sizing.count_splits(capacity, at_least, sizing.MAX_SPLITS, groups, device, estimating)
        at_once = sizing.find_prepared_sizes(queries, sizes)
        near = sizing.find_near_sizes(sketch is not None, states.dtype, sizes)
        columns = layer.near_keys.shape[2]
        self._blocks = self._near_programs = triton.cdiv(columns, near["BLOCK_N"])
        near["BLOCK_C"] = sizing.NEAR_COLUMNS
        near["BLOCK_B"] = max(sizing.NEAR_COLUMNS // near["BLOCK_N"], triton.next_power_of_2(self._blocks))
        self._grid = kv_heads, batch
        self._steps = Steps()
        # Of each group, how many blocks are done: 0 between steps, which scratch that others use could not say.
        self._arrived = torch.zeros(batch * kv_heads, dtype=torch.int32, device=states.device)
        # Tensors like those that a step makes: a likeness takes two thirds of the time of a shape. These expand one
        # number, as memory for a turn's queries in every layer would be much.
        self._out = states.new_empty(1).expand(batch, heads, 1, value_dim)
        self._flags = states.new_empty(1, dtype=torch.bool).expand(batch, kv_heads, group, 1)
        parts = {"parts": (torch.float32, batch * heads * (1 + splits) * value_dim)}
        parts |= {"lse": (torch.float32, batch * heads * (1 + splits)), "done": (torch.int32, batch * kv_heads)}
        segments, words, sketch_bytes = 0, {"FOURS": 0, "TWOS": 0, "ONES": 0, "ROWS": 0}, (0, 0, 0)
        self._room, self._sketch_strides, self._record_rooms, self._errors = 0, (0, 0, 0), (0, 0), None
        near_parts = batch * heads * 2 * self._blocks
        parts |= {"near": (torch.float32, near_parts * value_dim), "near_lse": (torch.float32, near_parts)}
        if sketch is not None:
            layout, segments, sketch_bytes = sketch.layout, sketch.units.shape[2], sketch.byte_counts
            count = count_rows(layout.coded, 2 if turns else 1)
            words = dict(zip(words, (*layout.words, count), strict=True))
            self._errors, sketch_room = layout.find_errors(states.device), sketch.scales.shape[2]
            self._near_programs += triton.cdiv(segments, at_once["PREPARED"]) + group
            self._sketch_strides = layout.count * sketch_room, sketch_room, segments
            # Of whole blocks, and as many for every split.
            self._room = splits * triton.cdiv(triton.cdiv(capacity, scan), splits) * scan
            parts |= {
                "tokens": (torch.int64, batch * kv_heads),  # what `local_kernel` leaves for the choice
                "prepared": (torch.int32, batch * kv_heads * segments * count * queries),
                "along": (torch.float32, batch * heads * value_dim),
                "estimates": (torch.float32, batch * heads * self._room),
                "sums": (torch.float32, batch * heads * 4 * sums),
                "index": (torch.int32, batch * kv_heads * self._room),
                "unread": (torch.float32, batch * heads * 2 * splits),
            }
        if records is not None:
            if turns:
                parts["turned"] = torch.int32, batch * heads * (dim + 1)
            parts["unpacked"] = torch.int32, batch * kv_heads * splits * selecting["UNPACKED"]
            self._record_rooms = records.tensor.shape[2], records.open.shape[2]
        self._scratch = Scratch(**parts)
        self._near_strides = *layer.near_keys.stride()[:3], *layer.near_values.stride()[:3]
        self._bulk_strides = *layer.bulk_keys.stride()[:3], *layer.bulk_values.stride()[:3]
        self._scaling, self._log_threshold = scaling, math.log(layer.token_threshold) if selects else 0.0
        self._numbers = (
            1 + splits, scaling, layer.logit_threshold, 2 * selection.UNRELIABLE / scaling**2, selection.NOISE_SHARE,
            MIN_TOKENS if selects else NEVER, segments,
        )  # fmt: skip
        channels = dim if layer.shares_keys else dim + value_dim
        token_bytes = channels * layer.bulk_keys.element_size()
        segment_sizes = {"SEGMENT": SEGMENT_TOKENS, "LAST": LAST_TOKENS, "BLOCK_Q": queries} | words
        merging = {"PARTS": sizing.PART_BYTES // torch.float32.itemsize, "MERGE_STAGES": sizing.MERGE_STAGES}
        splitting = {"BLOCK_P": triton.next_power_of_2(most_splits)} | merging
        merging_near = merging | {"PARTS": sizing.NEAR_PART_BYTES // torch.float32.itemsize}
        self._local = Launches(**{
            "GROUP_RULE": layer.group_rule, "TOKEN_BYTES": token_bytes, "TURNED": find_block(dim),
            "MIN_TOKENS": MIN_TOKENS, "num_warps": sizing.count_warps(sizes),
            **dict(zip(("SKETCH_TOKEN_BYTES", "SEGMENT_BYTES", "HEAD_BYTES"), sketch_bytes, strict=True)),
            **segment_sizes, **at_once, **sizes, **merging_near, **near,
        })  # fmt: skip
        self._estimate = Launches(G=group, **estimating, **segment_sizes)
        most = sizing.MOST_REGISTERS if sizing.count_warps(sizes) > 4 else None
        self._bulk = Launches(BLOCK_Q=queries, maxnreg=most, **splitting, **sizes)
        self._selected = Launches(**{
            "BLOCK_S": scan, "RUN": sizing.find_run(scan, layer), "SCAN_STAGES": sizing.SCAN_STAGES,
            "BLOCK_E": triton.next_power_of_2(sizing.MAX_SPLITS), "TOKEN_BYTES": token_bytes, **splitting,
            "MIN_TOKENS": MIN_TOKENS, "TURNED": find_block(value_dim) if turns else 0,  # turned together
            "num_stages": sizing.SELECTED_STAGES,
            **selecting, **segment_sizes, **sizes,
        })  # fmt: skip

    def compute(self, query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
        """`fused_decode` for a query like the bound one, and any rows."""
        states, log_bulk, sinks, marks = query.states.contiguous(), query.log_bulk, query.sink_logits, layer.marks
        assert log_bulk is not None
        shared = self._scratch.find(states.device)
        given, kept = self._given, self._scratch.keeps(shared)
        if given is None or given.shared is not shared:
            self._steps.forget()
            given = Given.find(shared, layer, layer.sketch if self._sketched else None, self._arrived, self._errors)
            self._given = given if kept else None
        if (of_rows := rows.derived) is None:
            rows.derived = of_rows = RowStrides.find(rows, states.shape[0])
        likeness: Any = {"memory_format": torch.contiguous_format}
        out, flags = torch.empty_like(self._out, **likeness), torch.empty_like(self._flags, **likeness)
        at, at_bulk = states.data_ptr(), log_bulk.data_ptr()
        at_sinks = None if sinks is None else sinks.data_ptr()
        at_marks, s_marks = (None, None) if marks is None else (marks.data_ptr(), marks.stride(1))
        numbers = *of_rows.strides, find_stride(log_bulk, states.shape[0]), s_marks, rows.columns
        # What may differ between steps of what Triton compiles for: strides of 1, marks, multiples of 16.
        aligned = at % 16 == 0, at_bulk % 16 == 0, None if at_sinks is None else at_sinks % 16 == 0
        variant = of_rows.variant, marks is None, aligned
        self._steps.launch(
            functools.partial(self._list_launches, given),
            (states, *of_rows.tensors, log_bulk, flags, out, sinks, marks, *numbers),
            (at, *of_rows.addresses, at_bulk, flags.data_ptr(), out.data_ptr(), at_sinks, at_marks, *numbers),
            variant=variant,
            kind=variant,
            note=kept,
        )
        return out, flags

    def _list_launches(self, given: Given, *changing: Any) -> list[Launch]:
        """The step's launches with these arguments, those of `Changing`."""
        step = Changing(*changing)
        launches: list[Launch] = [(
            self._local, local_kernel, (*self._grid, self._near_programs), (
                step.states, *given.near, step.local, step.pending, step.lengths, step.decided, step.log_bulk,
                *given.near_parts, step.flags, step.out, *given.queries, step.sinks, step.marks, *self._near_strides,
                step.s_local, step.s_pending, step.s_length, step.s_decided, step.s_mass, step.s_marks, step.columns,
                self._blocks, self._turn, *self._numbers,
            ),
        )]  # fmt: skip
        if self._sketched:
            launches.append((
                self._estimate, estimate_kernel, (self._sums, *self._grid), (
                    *given.codes, step.lengths, *given.estimates, step.s_length, *self._sketch_strides, self._room,
                    self._turn,
                ),
            ))  # fmt: skip
            launches.append((
                self._selected, selected_kernel, (self._splits, *self._grid), (
                    step.states, *given.tokens, step.lengths, *given.counted, step.flags, *given.selected, step.out,
                    given.done, step.marks, *self._bulk_strides, step.s_length, *self._sketch_strides, step.s_marks,
                    self._room, *self._record_rooms, self._sums, self._turn, self._scaling, self._log_threshold,
                    selection.UNREAD_WEIGHT,
                ),
            ))  # fmt: skip
        elif self._splits:
            launches.append((
                self._bulk, bulk_kernel, (self._splits, *self._grid), (
                    step.states, *given.bulk, step.lengths, step.flags, *given.merged, step.out, given.done,
                    *self._bulk_strides, step.s_length, self._turn, self._scaling,
                ),
            ))  # fmt: skip
        return launches
