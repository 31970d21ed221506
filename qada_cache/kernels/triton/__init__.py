"""Triton kernels for GPUs: one decode step of one layer in three or four, without a word between host and device.

`local_kernel` computes local attention and decides, `bulk_kernel` reads the bulk of KV heads that need it, in splits,
`merge_kernel` puts the parts together. With a sketch, `local_kernel` also prepares queries for each segment, and
`estimate_kernel` estimates all scores of the bulk. Instead of `bulk_kernel`, `selected_kernel` then reads the selected
tokens and sums the estimates of the others, and `merge_kernel` adds the expected value of unread tokens. Bulks of
records take the same four, whether or not tokens are selected.

The launches depend on shapes alone: flags, lengths and selections stay on the device, programs of local heads return at
once, and a CUDA graph can hold all of it. The bulk may be pinned host memory, read in place over the bus. A byte that
no head needs is never moved, and a needed one once, as the query heads of a group are packed.

It has been run under Triton's interpreter and compiled for CUDA, not run on a GPU: block sizes and splits are first
guesses.
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
from .kernels import bulk_kernel, local_kernel, merge_kernel
from .sketch_kernels import selected_kernel

SPLIT_TOKENS = (
    256  # a split of a bulk has at least about this many tokens, as its result must be written and read again
)
MAX_SPLITS = 128  # one flagged KV head alone should still occupy most of a GPU; blocks of splits have room for all,
# as one that followed the capacity would be compiled anew when the bulk grows
SCAN_TOKENS = 128  # among which a program chooses at once; a power of two, as:
SCAN_SCORES = 2048  # of so many estimates at most: with more, registers spill
ESTIMATE_HEADS = 8  # query heads that are prepared, and whose scores are estimated, at once
ESTIMATES = 1024  # scores that are
UNPACKED_BYTES = 4096  # of records in the registers of a program, a byte a value
RECORD_SCORES = 1024  # of tokens whose records are read at once
TURN_TOKENS = 256  # whose scores are, at most; a power of two that divides the tokens of a segment
SLOPE_COLUMNS = 32  # of what values gain along a query, at once
BLOCK_BYTES = 16384  # of keys and values in flight for each stage of the pipeline of a program
# Terms of 8 bits each that attention's weights are rounded to where records hold the values, by the dtype of outputs.
TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
# Registers of a thread. Told how many it may take, the assembler spills none for the sake of more programs at once.
SELECTED_REGISTERS = 128  # for four programs at once, as shared memory admits
ESTIMATE_REGISTERS = 96
RECORD_REGISTERS = {4: 168, 8: 128}  # by warps, for three or two
MOST_REGISTERS = 255  # where fewer would spill, or programs are few
NEVER = 2**31 - 1  # tokens of a bulk from which on tokens are selected
SELECTED_STAGES = 5  # half of them fetch indices: as many keys and values are in flight as in the default 3


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
        nothing: dict[str, Any] = dict.fromkeys(("KEY_BITS", "VALUE_BITS", "RECORD", "UNIT", "TERMS", "BLOCK_R"), 0)
        registers = MOST_REGISTERS if many else SELECTED_REGISTERS
        # Of float32, with any number, registers spill.
        return nothing | {"num_warps": 4, "maxnreg": registers if dtype.itemsize == 2 else None}
    layout, values = records.layout, max(sizes["BLOCK_D"], sizes["BLOCK_V"])
    # Planes of one bit begin at whole words, as all then do, or at whole bytes.
    unit = WORD_BITS if layout.dim % WORD_BITS == layout.value_dim % WORD_BITS == 0 else 8
    found = {"KEY_BITS": layout.key_bits, "VALUE_BITS": layout.value_bits, "RECORD": layout.size, "UNIT": unit}
    warps = _count_warps(sizes)
    found |= {"TERMS": TERMS[dtype], "num_warps": warps, "maxnreg": RECORD_REGISTERS[warps]}
    if many or TERMS[dtype] > 1 or (layout.key_bits > 4 and (warps > 4 or sizes["G"] == 1)):
        found["maxnreg"] = MOST_REGISTERS
    return found | {"BLOCK_R": max(16, min(32, UNPACKED_BYTES // values, RECORD_SCORES // sizes["BLOCK_G"]))}


def _find_estimate_sizes(queries: int) -> dict[str, int]:
    """The tokens whose scores `estimate_kernel` estimates at once, and the registers that it takes: for five programs
    at once, if it takes all heads at once."""
    heads = min(queries, ESTIMATE_HEADS)
    registers = ESTIMATE_REGISTERS if heads == queries else MOST_REGISTERS
    return {"TURN": min(SEGMENT_TOKENS, TURN_TOKENS, ESTIMATES // heads), "maxnreg": registers}


def fused_decode(query: Query, rows: Rows, layer: Operands) -> tuple[Tensor, Tensor]:
    """Same contract as `decode_reference.decode_step`, for the calls that `choice.explain_unsupported` admits.

    Everything but the bulk buffers, and heads that lie elsewhere, lies on the query's device. The last dimension of the
    buffers is contiguous. Nothing waits for the device. A captured graph can be replayed as long as the tensors stay
    where they are, so until the bulk grows; lengths, masks and `log_bulk` may be written to in place.
    """
    check(query, rows, layer)
    assert query.log_bulk is not None
    sketch, records, scaling = layer.sketch, layer.records, query.scaling
    bulk_keys, bulk_values = layer.bulk_keys, layer.bulk_values
    batch, heads, _, dim = query.states.shape
    kv_heads, value_dim = bulk_keys.shape[1], bulk_values.shape[3]
    group = heads // kv_heads
    capacity, record_tensor, record_weights, record_room, turned_values = bulk_keys.shape[2], None, None, 0, 0
    if records is not None:
        assert sketch is not None
        capacity = sketch.scales.shape[2]  # which is of all tokens
        record_tensor, record_weights, record_room = records.tensor, records.weights, records.tensor.shape[2]
        turned_values = find_block(value_dim)  # channels that are rotated together
    splits = min(triton.cdiv(capacity, SPLIT_TOKENS), MAX_SPLITS)
    states = query.states.contiguous()
    out = states.new_empty(batch, heads, 1, value_dim)
    flags = states.new_empty(batch, kv_heads, group, 1, dtype=torch.bool)
    parts = states.new_empty(batch, heads, 1 + splits, value_dim, dtype=torch.float32)
    lse = states.new_empty(batch, heads, 1 + splits, dtype=torch.float32)

    token_bytes = dim * bulk_keys.element_size() + value_dim * bulk_values.element_size()
    sizes = {"G": group, "BLOCK_G": _pad(group), "D": dim, "BLOCK_D": _pad(dim), "V": value_dim}
    sizes["BLOCK_V"] = _pad(value_dim)
    if records is not None:
        sizes["BLOCK_D"] = max(32, sizes["BLOCK_D"])  # as products of 8-bit integers take
    in_flight = BLOCK_BYTES // ((sizes["BLOCK_D"] + sizes["BLOCK_V"]) * states.element_size())
    sizes["BLOCK_N"] = 64 if in_flight >= 64 else 32 if in_flight >= 32 else 16
    local, pending, bulk_lengths, decided, log_bulk = (  # a shared row has stride 0
        t.expand(batch, *t.shape[1:])
        for t in (rows.local, rows.pending, rows.bulk_lengths, rows.decided, query.log_bulk)
    )
    if records is None and capacity < MIN_TOKENS:
        sketch = None  # there is no room for a bulk that has one
    # What `local_kernel` leaves for the choice: the number of tokens in each bulk, and queries as codes meet them.
    noises = [getattr(sketch, name, None) for name in ("noise", "variances")]
    coding = [getattr(sketch, name, None) for name in ("centres", "order", "weights")]
    values_of_unread = [getattr(sketch, name, None) for name in ("mean_value", "slopes", "slope_units")]
    tokens = prepared = turned = errors = sums = unread = None
    segments, words, queries, rows_of_words = 0, (0, 0, 0), triton.next_power_of_2(group), 0
    sketch_bytes = (0, 0, 0)
    if sketch is not None:
        layout, segments, sketch_bytes = sketch.layout, sketch.units.shape[2], sketch.byte_counts
        words, errors, sketch_room = layout.words, layout.find_errors(states.device), sketch.scales.shape[2]
        # Of whole blocks, and as many for every split.
        scan = min(SCAN_TOKENS, SCAN_SCORES // queries)
        room = splits * triton.cdiv(triton.cdiv(capacity, scan), splits) * scan
        estimates = states.new_empty(batch, heads, room, dtype=torch.float32)
        if records is not None:
            turned = states.new_empty(batch, heads, dim + 1, dtype=torch.int32)
        tokens = bulk_lengths.new_empty(batch, kv_heads)
        rows_of_words = count_rows(layout.coded, 1 if records is None else 2)
        prepared = states.new_empty(batch, kv_heads, segments, rows_of_words, queries, dtype=torch.int32)
        index = states.new_empty(batch, kv_heads, room, dtype=torch.int32)
        sums = states.new_empty(batch, heads, 4, splits, dtype=torch.float32)
        unread = states.new_empty(batch, heads, 2, splits, dtype=torch.float32)
    segment_sizes = {"SEGMENT": SEGMENT_TOKENS, "LAST": LAST_TOKENS, "ROWS": rows_of_words, "BLOCK_Q": queries}
    segment_sizes["BLOCK_H"] = min(queries, ESTIMATE_HEADS)
    segment_sizes |= dict(zip(("FOURS", "TWOS", "ONES"), words, strict=True))
    bulk_strides = (*bulk_keys.stride()[:3], *bulk_values.stride()[:3], bulk_lengths.stride(0))
    with torch.cuda.device_of(states):  # Triton launches on the current device
        local_kernel[(kv_heads, batch, 1 + segments)](
            states, layer.near_keys, layer.near_values, local, pending, bulk_lengths, decided, log_bulk,
            parts, lse, flags, layer.bulk_read_bytes if sketch is None else None,
            None if sketch is None else layer.sketch_read_bytes, layer.resident_pointers,
            layer.resident_hit_bytes, tokens, *noises, prepared, turned, errors, *coding, record_weights,
            *layer.near_keys.stride()[:3], *layer.near_values.stride()[:3], local.stride(0), pending.stride(0),
            bulk_lengths.stride(0), decided.stride(0), log_bulk.stride(0), rows.columns, 1 + splits, scaling,
            layer.logit_threshold, 2 * selection.UNRELIABLE / scaling**2, selection.NOISE_SHARE,
            MIN_TOKENS if layer.token_threshold > 0 else NEVER, segments,
            GROUP_RULE=layer.group_rule, TOKEN_BYTES=token_bytes, TURNED=find_block(dim), MIN_TOKENS=MIN_TOKENS,
            **dict(zip(("SKETCH_TOKEN_BYTES", "SEGMENT_BYTES", "HEAD_BYTES"), sketch_bytes, strict=True)),
            **segment_sizes, **sizes, num_warps=_count_warps(sizes), maxnreg=MOST_REGISTERS,
        )  # fmt: skip
        if sketch is not None:
            estimate_kernel[(splits, kv_heads, batch)](
                prepared, sketch.codes, sketch.scales, sketch.units, bulk_lengths, tokens, estimates, sums,
                bulk_lengths.stride(0), layout.count * sketch_room, sketch_room, segments, room,
                G=group, **_find_estimate_sizes(queries), **segment_sizes,
            )  # fmt: skip
            selected_kernel[(splits, kv_heads, batch)](
                states, turned, prepared, sketch.codes, sketch.scales, sketch.units, bulk_keys, bulk_values,
                record_tensor, layer.resident_pointers, bulk_lengths, tokens, flags, estimates, sums,
                index, parts, lse, unread, layer.bulk_read_bytes, layer.resident_hit_bytes, *bulk_strides,
                layout.count * sketch_room, sketch_room, segments, room,
                record_room, scaling, math.log(layer.token_threshold or 1.0),
                BLOCK_S=scan, BLOCK_P=triton.next_power_of_2(MAX_SPLITS),
                TOKEN_BYTES=token_bytes, MIN_TOKENS=MIN_TOKENS, TURNED=turned_values, **segment_sizes,
                **_find_record_sizes(records, states.dtype, sizes), **sizes, num_stages=SELECTED_STAGES,
            )  # fmt: skip
        elif splits:
            bulk_kernel[(splits, kv_heads, batch)](
                states, bulk_keys, bulk_values, layer.resident_pointers, bulk_lengths, flags, parts, lse, *bulk_strides,
                scaling, **sizes,
            )  # fmt: skip
        merge_kernel[(batch * heads,)](
            parts, lse, flags, unread, sums, states, *values_of_unread, out, 1 + splits, scaling,
            selection.UNREAD_WEIGHT,
            G=group, D=dim, BLOCK_C=SLOPE_COLUMNS, V=value_dim, BLOCK_V=sizes["BLOCK_V"],
            BLOCK_P=triton.next_power_of_2(1 + MAX_SPLITS), BLOCK_N=16, TURNED=turned_values,
        )  # fmt: skip
    return out, flags
