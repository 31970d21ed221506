"""Triton kernels for GPUs: one decode step of one layer in two or three, without a word between host and device.

`local_kernel` computes local attention and decides, `bulk_kernel` reads the bulk of KV heads that need it, in splits,
of which the last one puts the parts together. With a sketch, `local_kernel` also prepares queries for each segment, and
`estimate_kernel` estimates all scores of the bulk. Instead of `bulk_kernel`, `selected_kernel` then reads the selected
tokens, sums the estimates of the others, and adds the expected value of unread tokens. Bulks of records take the same
three, whether or not tokens are selected.

The launches depend on shapes alone: flags, lengths and selections stay on the device, programs of local heads return at
once, and a CUDA graph can hold all of it. The bulk may be pinned host memory, read in place over the bus. A byte that
no head needs is never moved, and a needed one once, as the query heads of a group are packed.

It has been run on an H100 and an H200, under Triton's interpreter, and compiled for other GPUs. Numbers below are for
all of them, and are read when a layer's storage is new to it: who tries others sets them here before.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ...sketch import LAST_TOKENS, MIN_TOKENS, SEGMENT_TOKENS, WORD_BITS, selection
from ...sketch.coded import Records, find_block
from ..operands import Operands, Query, Rows, check
from .estimate_kernels import count_rows, estimate_kernel
from .given import Given
from .kernels import bulk_kernel, local_kernel
from .launching import Launches, RowStrides, find_stride
from .scratch import Scratch
from .sketch_kernels import selected_kernel

# A split of a bulk has at least about so many tokens, as its result must be written and read again. One flagged KV head
# alone should still occupy most of a GPU. Blocks of splits have room for all: such as followed the capacity would be
# compiled anew when the bulk grows.
SPLIT_TOKENS, MAX_SPLITS = 256, 128
# Where tokens are selected, few of a split are read: to begin and to end take most of a program's time. So there are
# no more programs than a device runs at once, if these are `FEWEST_SPLITS` of a bulk.
SELECTED_TOKENS, SELECTED_SPLITS, FEWEST_SPLITS = 512, 64, 8
REGISTERS, MOST_CORES = 65536, 132  # of a multiprocessor, by which programs run at once; of an H100
SCAN_TOKENS = 256  # among which a program chooses at once; a power of two, as:
SCAN_SCORES = 1024  # of so many estimates at most: with more, registers spill
SCAN_RUN = 32  # tokens of a scan that lie side by side; a power of two
SCAN_STAGES = 3  # of the pipeline that fetches estimates, none in large groups, where registers would spill
PART_BYTES = 8192  # of parts, float32, that are added at once
MERGE_STAGES = 5  # of the pipeline that fetches them
ESTIMATE_HEADS = 8  # query heads that are prepared, and whose scores are estimated, at once
ESTIMATES = 1024  # scores that are
ESTIMATE_TOKENS = 512  # of a split of estimates, at least about
PREPARED_LINES = 16  # queries that are prepared at once, of a head and a segment each; a power of two
RECORD_SCORES = 1024  # of tokens whose records are read at once
COPIED = ("cpu",)  # devices whose records come over a bus, by whole ones
TURN_TOKENS = 256  # whose scores are, at most; a power of two that divides the tokens of a segment
BLOCK_BYTES = 16384  # of keys and values in flight for each stage of the pipeline of a program
NEAR_BYTES = 32768  # likewise, of the near buffer, where programs are few
NEAR_TOKENS = 32  # of it at most, where a sketch makes them many
NEAR_COLUMNS = 512  # that a buffer has at most by default: of any number of them kernels are the same
# Terms of 8 bits each that attention's weights are rounded to where records hold the values, by the dtype of outputs.
TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
# Registers of a thread. Told how many it may take, the assembler spills none for the sake of more programs at once.
SELECTED_REGISTERS = 128  # for four programs at once, as shared memory admits
NEAR_REGISTERS = 128  # likewise, where a sketch makes programs many
ESTIMATE_REGISTERS = 96
RECORD_REGISTERS = {4: 168, 8: 128}  # by warps, for three or two
MOST_REGISTERS = 255  # where fewer would spill, or programs are few
RECORD_SIZES = "KEY_BITS", "VALUE_BITS", "RECORD", "COPY", "UNPACKED", "UNIT", "TERMS", "BLOCK_R"
NEVER = 2**31 - 1  # tokens of a bulk from which on tokens are selected
SELECTED_STAGES = 5  # half of them fetch indices: as many keys and values are in flight as in the default 3


def _split(capacity: int, at_least: int, at_most: int, groups: int, device: torch.device, compiled: dict) -> int:
    """Into how many splits of `at_least` tokens a bulk is cut: `at_most`, and so many that the programs of all `groups`
    run at once."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MOST_CORES
    resident = REGISTERS // (32 * compiled.get("num_warps", 4) * (compiled["maxnreg"] or MOST_REGISTERS))
    at_once = max(FEWEST_SPLITS, resident * cores // groups)
    return min(triton.cdiv(capacity, at_least), at_most, at_once)


def _pad(size: int) -> int:
    """The block that holds `size` rows or columns of a matrix product."""
    return max(16, triton.next_power_of_2(size))


def _count_warps(sizes: dict[str, int]) -> int:
    """Of a program that keeps whole values, for which wide ones take too many registers."""
    return 4 if max(sizes["BLOCK_D"], sizes["BLOCK_V"]) < 256 else 8


def _find_record_sizes(records: Records | None, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, Any]:
    """What `selected_kernel` is to know of records, and how many warps and registers it takes."""
    many = sizes["BLOCK_G"] > 16
    if records is None:
        nothing: dict[str, Any] = dict.fromkeys(RECORD_SIZES, 0)
        registers = MOST_REGISTERS if many or sizes["G"] == 1 or _count_warps(sizes) > 4 else SELECTED_REGISTERS
        # Of float32, with any number, registers spill.
        return nothing | {"num_warps": 4, "maxnreg": registers if dtype.itemsize == 2 else None}
    layout, tensor = records.layout, records.tensor
    # Planes of one bit begin at whole words, as all then do, or at whole bytes.
    unit = WORD_BITS if layout.dim % WORD_BITS == layout.value_dim % WORD_BITS == 0 else 8
    found = {"KEY_BITS": layout.key_bits, "VALUE_BITS": layout.value_bits, "RECORD": tensor.shape[3], "UNIT": unit}
    warps = _count_warps(sizes)
    found |= {"TERMS": TERMS[dtype], "num_warps": warps, "maxnreg": RECORD_REGISTERS[warps]}
    copied = tensor.shape[3] // 4 if tensor.device.type in COPIED else 0
    if many or TERMS[dtype] > 1 or layout.dim < sizes["BLOCK_D"] or copied:
        found["maxnreg"] = MOST_REGISTERS
    tokens = max(16, min(64, RECORD_SCORES // sizes["BLOCK_G"]))
    found |= {"COPY": triton.next_power_of_2(copied), "BLOCK_R": tokens}
    return found | {"UNPACKED": tokens * (sizes["BLOCK_D"] // 4 + sizes["BLOCK_V"] // 2 + copied)}


def _find_sizes(query: Query, layer: Operands) -> dict[str, int]:
    """Of heads and blocks, for all kernels that read tokens."""
    dim, value_dim = query.states.shape[3], layer.near_values.shape[3]
    group = query.states.shape[1] // layer.kv_heads
    sizes = {"G": group, "BLOCK_G": _pad(group), "D": dim, "BLOCK_D": _pad(dim), "V": value_dim}
    sizes["BLOCK_V"] = _pad(value_dim)
    if layer.records is not None:
        sizes["BLOCK_D"] = max(32, sizes["BLOCK_D"])  # as products of 8-bit integers take
    return sizes | {"BLOCK_N": _find_block(sizes, BLOCK_BYTES // query.states.element_size())}


def _find_block(sizes: dict[str, int], most: int) -> int:
    """Tokens that are read at once, of `most` numbers in keys and values."""
    return max(16, min(64, 2 ** int(math.log2(most // (sizes["BLOCK_D"] + sizes["BLOCK_V"])))))


def _find_near_sizes(sketched: bool, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, int]:
    """The tokens of the near buffer that `local_kernel` reads at once, and the registers that it takes."""
    few, block = dtype.itemsize == 2 and sizes["BLOCK_G"] <= 16, sizes["BLOCK_N"]
    if sketched:
        tight = few and sizes["G"] > 1 and sizes["D"] == sizes["BLOCK_D"]  # masks take some
        return {"BLOCK_N": min(NEAR_TOKENS, block), "maxnreg": NEAR_REGISTERS if tight else MOST_REGISTERS}
    return {"BLOCK_N": _find_block(sizes, NEAR_BYTES // dtype.itemsize) if few else block, "maxnreg": MOST_REGISTERS}


def _find_estimate_sizes(queries: int) -> dict[str, int]:
    """The tokens whose scores `estimate_kernel` estimates at once, and the registers that it takes: for five programs
    at once, if it takes all heads at once."""
    heads = min(queries, ESTIMATE_HEADS)
    registers = ESTIMATE_REGISTERS if heads == queries else MOST_REGISTERS
    return {"TURN": min(SEGMENT_TOKENS, TURN_TOKENS, ESTIMATES // heads), "maxnreg": registers}


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
    """What stays as it is until storage changes: sizes, numbers and tensors of a layer's kernels."""

    _given: Given | None = None

    def __init__(self, query: Query, layer: Operands) -> None:
        sketch, records, states, scaling = layer.sketch, layer.records, query.states, query.scaling
        (batch, heads, _, dim), (kv_heads, capacity) = states.shape, layer.bulk_keys.shape[1:3]
        sizes, selects = _find_sizes(query, layer), layer.token_threshold > 0
        group, value_dim = sizes["G"], sizes["V"]
        self._turn = batch // len(layer.near_keys)  # rows of the query that share what one row holds
        queries = triton.next_power_of_2(group)
        scan = min(SCAN_TOKENS, SCAN_SCORES // queries)
        if records is not None:
            assert sketch is not None
            capacity = sketch.scales.shape[2]  # which is of all tokens
        elif capacity < MIN_TOKENS:
            sketch = None  # there is no room for a bulk that has one
        self._sketched = sketch is not None
        chooses = selects and sketch is not None
        selecting, estimating = _find_record_sizes(records, states.dtype, sizes), _find_estimate_sizes(queries)
        splits = min(triton.cdiv(capacity, SPLIT_TOKENS), MAX_SPLITS)
        of_device = batch * kv_heads, states.device
        if chooses:
            splits = _split(capacity, SELECTED_TOKENS, SELECTED_SPLITS, *of_device, selecting)
        self._splits = splits
        self._sums = sums = _split(capacity, ESTIMATE_TOKENS, MAX_SPLITS, *of_device, estimating)
        at_once = {"BLOCK_H": min(queries, ESTIMATE_HEADS)}
        at_once["PREPARED"] = max(1, PREPARED_LINES // at_once["BLOCK_H"])
        near = _find_near_sizes(sketch is not None, states.dtype, sizes)
        columns = layer.near_keys.shape[2]
        self._blocks = self._near_programs = triton.cdiv(columns, near["BLOCK_N"])
        near["BLOCK_C"] = max(NEAR_COLUMNS, triton.next_power_of_2(columns))
        self._grid = kv_heads, batch
        # Of each group, how many blocks are done: 0 between steps, which scratch that others use could not say.
        self._arrived = torch.zeros(batch * kv_heads, dtype=torch.int32, device=states.device)
        self._out, self._flags = (batch, heads, 1, value_dim), (batch, kv_heads, group, 1)
        parts = {"parts": (torch.float32, batch * heads * (1 + splits) * value_dim)}
        parts |= {"lse": (torch.float32, batch * heads * (1 + splits)), "done": (torch.int32, batch * kv_heads)}
        segments, words, sketch_bytes = 0, {"FOURS": 0, "TWOS": 0, "ONES": 0, "ROWS": 0}, (0, 0, 0)
        self._room, self._sketch_strides, self._record_rooms, self._errors = 0, (0, 0, 0), (0, 0), None
        near_parts = batch * heads * 2 * self._blocks
        parts |= {"near": (torch.float32, near_parts * value_dim), "near_lse": (torch.float32, near_parts)}
        if sketch is not None:
            layout, segments, sketch_bytes = sketch.layout, sketch.units.shape[2], sketch.byte_counts
            count = count_rows(layout.coded, 1 if records is None else 2)
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
        token_bytes = dim * layer.bulk_keys.element_size() + value_dim * layer.bulk_values.element_size()
        segment_sizes = {"SEGMENT": SEGMENT_TOKENS, "LAST": LAST_TOKENS, "BLOCK_Q": queries} | words
        merging = {"PARTS": PART_BYTES // torch.float32.itemsize, "MERGE_STAGES": MERGE_STAGES}
        splitting = {"BLOCK_P": triton.next_power_of_2(SELECTED_SPLITS if chooses else MAX_SPLITS)} | merging
        self._local = Launches(**{
            "GROUP_RULE": layer.group_rule, "TOKEN_BYTES": token_bytes, "TURNED": find_block(dim),
            "MIN_TOKENS": MIN_TOKENS, "num_warps": _count_warps(sizes),
            **dict(zip(("SKETCH_TOKEN_BYTES", "SEGMENT_BYTES", "HEAD_BYTES"), sketch_bytes, strict=True)),
            **segment_sizes, **at_once, **sizes, **merging, **near,
        })  # fmt: skip
        self._estimate = Launches(G=group, BLOCK_H=at_once["BLOCK_H"], **estimating, **segment_sizes)
        most = MOST_REGISTERS if _count_warps(sizes) > 4 else None
        self._bulk = Launches(BLOCK_Q=queries, maxnreg=most, **splitting, **sizes)
        self._selected = Launches(**{
            "BLOCK_S": scan, "RUN": min(SCAN_RUN, scan), "SCAN_STAGES": SCAN_STAGES if queries <= 16 else 1,
            "BLOCK_E": triton.next_power_of_2(MAX_SPLITS), "TOKEN_BYTES": token_bytes, **splitting,
            "MIN_TOKENS": MIN_TOKENS, "TURNED": 0 if records is None else find_block(value_dim),  # turned together
            "num_stages": SELECTED_STAGES,
            **selecting, **segment_sizes, **sizes,
        })  # fmt: skip

    def compute(self, query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
        """`fused_decode` for another query and other rows than those that were bound."""
        states, log_bulk = query.states.contiguous(), query.log_bulk
        assert log_bulk is not None
        out, flags = states.new_empty(self._out), states.new_empty(self._flags, dtype=torch.bool)
        shared = self._scratch.find(states.device)
        given = self._given
        if given is None or given.shared is not shared:
            sketch = layer.sketch if self._sketched else None
            given = Given.find(shared, layer, sketch, self._arrived, self._errors)
            self._given = given if self._scratch.keeps(shared) else None
        if rows.derived is None:
            rows.derived = RowStrides.find(rows, states.shape[0])
        of_rows: RowStrides = rows.derived
        lengths, s_length, s_mass = rows.bulk_lengths, of_rows.strides[2], find_stride(log_bulk, states.shape[0])
        marks, s_marks = layer.marks, None if layer.marks is None else layer.marks.stride(1)
        # What may differ between steps of what Triton compiles for: strides of 1, marks, multiples of 16.
        aligned = states.data_ptr() % 16 == 0, log_bulk.data_ptr() % 16 == 0
        variant = of_rows.variant, marks is None, aligned
        with torch.cuda.device_of(states):  # Triton launches on the current device
            self._local.launch(
                local_kernel, (*self._grid, self._near_programs), variant,
                states, *given.near, *of_rows.tensors, log_bulk, *given.near_parts, flags, out, *given.queries, marks,
                *self._near_strides, *of_rows.strides, s_mass, s_marks, rows.columns, self._blocks, self._turn,
                *self._numbers,
            )  # fmt: skip
            if self._sketched:
                self._estimate.launch(
                    estimate_kernel, (self._sums, *self._grid), variant,
                    *given.codes, lengths, *given.estimates, s_length, *self._sketch_strides, self._room, self._turn,
                )  # fmt: skip
                self._selected.launch(
                    selected_kernel, (self._splits, *self._grid), variant,
                    states, *given.tokens, lengths, *given.counted, flags, *given.selected, out, given.done, marks,
                    *self._bulk_strides, s_length, *self._sketch_strides, s_marks, self._room, *self._record_rooms,
                    self._sums, self._turn, self._scaling, self._log_threshold, selection.UNREAD_WEIGHT,
                )  # fmt: skip
            elif self._splits:
                self._bulk.launch(
                    bulk_kernel, (self._splits, *self._grid), variant,
                    states, layer.bulk_keys, layer.bulk_values, lengths, flags, *given.merged, out, given.done,
                    *self._bulk_strides, s_length, self._turn, self._scaling,
                )  # fmt: skip
        return out, flags
