"""Records of tokens that the sketch has coded: `coded.code_tokens`, in one launch. Names are as in `kernels.py`."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import sketch as definition
from ...sketch import Layout, coded
from ...sketch.codec import Sketch
from ...sketch.coded import RecordLayout
from .blocks import BLOCK, rotate
from .coding import TINY, UNSPECIALIZED, align, by_bits, find_shifts, find_sizes, find_words, round_to_bfloat16
from .direct import at_device
from .launching import Launches
from .record_kernels import SCALES

MOST_REST = tl.constexpr(max(coded.ALIGNMENT, *coded.STRIDES.values()))  # bytes behind a record
NUMBERS = 2048  # of keys, and of values, that a program codes at once


@triton.jit
def load_segment(p_centres, p_order, p_weights, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A segment's centre, the place of each channel in its order, and weights by place; each [BLOCK_D]."""
    o_dim = tl.arange(0, BLOCK_D)
    m_dim = o_dim < D
    b_centre = tl.load(p_centres + o_dim, mask=m_dim, other=0.0).to(tl.float32)
    b_order = tl.load(p_order + o_dim, mask=m_dim, other=0).to(tl.int32)
    b_places = tl.sort((tl.where(m_dim, b_order, o_dim) << 16) | o_dim) & 0xFFFF  # those of no key stay behind
    return b_centre, b_places, tl.load(p_weights + o_dim, mask=m_dim, other=1.0).to(tl.float32)


@triton.jit
def unpack_keys(
    p_codes, p_scales, unit, b_weights, o_tokens, m_tokens, s_tokens,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sketch's estimates of keys of one segment, less the centre, in the segment's order: [tokens, BLOCK_D]."""
    o_dim = tl.arange(0, BLOCK_D)
    b_most = by_bits(o_dim, 15, 3, 1, 0, FOURS, TWOS, ONES)[None, :]
    p_block = p_codes + find_words(o_dim, FOURS, TWOS, ONES)[None, :] * s_tokens + o_tokens[:, None]
    b_codes = tl.load(p_block, mask=m_tokens[:, None] & (b_most > 0), other=0)
    b_odd = 2 * ((b_codes >> find_shifts(o_dim, FOURS, TWOS, ONES)[None, :]) & b_most) - b_most
    b_scale = tl.load(p_scales + o_tokens, mask=m_tokens, other=0).to(tl.float32) * unit
    b_weighed = rotate(b_scale[:, None] * b_odd.to(tl.float32), BLOCK)
    return tl.div_rn(b_weighed, b_weights[None, :].broadcast_to(b_weighed.shape))


@triton.jit
def predict_keys(
    p_codes, p_scales, unit, b_centre, b_places, b_weights, o_tokens, m_tokens, s_tokens,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sketch's estimates of keys of one segment, as `coded.estimate_keys`: [tokens, BLOCK_D]."""
    b_weighed = unpack_keys(
        p_codes, p_scales, unit, b_weights, o_tokens, m_tokens, s_tokens, FOURS, TWOS, ONES, BLOCK_D
    )  # fmt: skip
    return tl.gather(b_weighed, b_places[None, :].broadcast_to(b_weighed.shape), 1) + b_centre[None, :]


@triton.jit
def store_plane(
    p_records, b_code, o_tokens, m_tokens, FROM: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr,
    RECORD: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Store the plane of `PLANE` bits of codes [tokens, channels], if `BITS` has this plane."""
    TOKENS: tl.constexpr = b_code.shape[0]  # noqa: N806 - a compile-time constant
    BYTES: tl.constexpr = b_code.shape[1] * PLANE // 8  # noqa: N806 - a compile-time constant
    VALUES: tl.constexpr = 8 // PLANE  # of a byte  # noqa: N806 - a compile-time constant
    DONE: tl.constexpr = BITS & ~(2 * PLANE - 1)  # bits in larger planes  # noqa: N806 - a compile-time constant
    if BITS & PLANE:
        b_part = ((b_code >> DONE) & (2**PLANE - 1)).reshape(TOKENS, BYTES, VALUES)
        b_bytes = tl.sum(b_part << (tl.arange(0, VALUES) * PLANE)[None, None, :], axis=2)
        o_byte = tl.arange(0, BYTES)
        p_block = p_records + o_tokens[:, None] * RECORD + (o_byte + (FROM + COUNT * DONE // 8))[None, :]
        tl.store(p_block, b_bytes.to(tl.uint8), mask=m_tokens[:, None] & (o_byte < COUNT * PLANE // 8)[None, :])


@triton.jit
def store_planes(
    p_records, b_values, o_tokens, m_tokens, FROM: tl.constexpr, BITS: tl.constexpr, RECORD: tl.constexpr,
    TURNED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """`coded.quantize_evenly` and `pack_planes` of [tokens, channels], of which there are `COUNT`: writes planes from
    byte `FROM` of the records on, and returns the scales."""
    b_turned = rotate(b_values, TURNED)
    b_scale = round_to_bfloat16(tl.max(tl.abs(b_turned), axis=1) * (1.0 / 2**BITS))
    b_step = (2 * tl.maximum(b_scale, TINY))[:, None].broadcast_to(b_turned.shape)
    b_code = tl.floor(tl.div_rn(b_turned, b_step)) + 2 ** (BITS - 1)
    b_code = tl.minimum(tl.maximum(b_code, 0.0), 2.0**BITS - 1).to(tl.int32)
    store_plane(p_records, b_code, o_tokens, m_tokens, FROM, BITS, 8, RECORD, COUNT)
    store_plane(p_records, b_code, o_tokens, m_tokens, FROM, BITS, 4, RECORD, COUNT)
    store_plane(p_records, b_code, o_tokens, m_tokens, FROM, BITS, 2, RECORD, COUNT)
    store_plane(p_records, b_code, o_tokens, m_tokens, FROM, BITS, 1, RECORD, COUNT)
    return b_scale


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "s_value_row", "s_value_head", "s_value_token"])
def record_kernel(
    p_keys, p_values, p_query_weights, p_codes, p_scales, p_units, p_centres, p_order, p_weights, p_records, p_words,
    s_row, s_head, s_token, s_value_row, s_value_head, s_value_token, first_row, first, tokens, s_segment, s_tokens,
    SEGMENT: tl.constexpr, FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, RECORD: tl.constexpr,
    TURNED_D: tl.constexpr, TURNED_V: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Records [rows, heads, tokens, RECORD] of `tokens` tokens of whole segments, or of the last one, the sketch's from
    `first` on; one program a (block of tokens, KV head, row). `p_words` is the same memory in words; others as for
    `code_kernel`."""
    KEY_BYTES: tl.constexpr = D * KEY_BITS // 8  # noqa: N806 - a compile-time constant
    END: tl.constexpr = SCALES + KEY_BYTES + V * VALUE_BITS // 8  # noqa: N806 - a compile-time constant
    i_block, i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_segment = first + tl.minimum(i_block * BLOCK_N // SEGMENT, tl.maximum(tokens // SEGMENT, 1) - 1)
    i_group = (first_row + i_row) * tl.num_programs(1) + i_head
    o_tokens = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_tokens = o_tokens < tokens
    at = i_group * s_segment + i_segment
    b_centre, b_places, b_weights = load_segment(p_centres + at * D, p_order + at * D, p_weights + at * D, D, BLOCK_D)
    b_keys = predict_keys(
        p_codes + i_group * (FOURS + TWOS + ONES) * s_tokens + first * SEGMENT,
        p_scales + i_group * s_tokens + first * SEGMENT, tl.load(p_units + at),
        b_centre, b_places, b_weights, o_tokens, m_tokens, s_tokens, FOURS, TWOS, ONES, BLOCK_D,
    )  # fmt: skip
    o_dim, o_value = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    m_block = m_tokens[:, None] & (o_dim < D)[None, :]
    p_keys += (i_row * s_row + i_head * s_head) * BLOCK
    p_block = p_keys + (o_tokens.to(tl.int64) * s_token * BLOCK)[:, None] + o_dim[None, :]
    b_keys = tl.load(p_block, mask=m_block, other=0.0).to(tl.float32) - b_keys
    b_keys *= tl.load(p_query_weights + i_head * D + o_dim, mask=o_dim < D, other=0.0)[None, :]
    p_values += (i_row * s_value_row + i_head * s_value_head) * BLOCK
    p_block = p_values + (o_tokens.to(tl.int64) * s_value_token * BLOCK)[:, None] + o_value[None, :]
    b_values = tl.load(p_block, mask=m_tokens[:, None] & (o_value < V)[None, :], other=0.0).to(tl.float32)

    before = (i_row * tl.num_programs(1) + i_head) * tokens
    p_records += before * RECORD
    b_keys = tl.where(m_block, b_keys, 0.0)
    b_scale = store_planes(p_records, b_keys, o_tokens, m_tokens, SCALES, KEY_BITS, RECORD, TURNED_D, D)
    b_other = store_planes(p_records, b_values, o_tokens, m_tokens, SCALES + KEY_BYTES, VALUE_BITS, RECORD, TURNED_V, V)
    b_word = ((b_scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | b_other.to(tl.int32, bitcast=True)
    tl.store(p_words + (before + o_tokens) * (RECORD // 4), b_word, mask=m_tokens)
    if RECORD > END:
        o_rest = tl.arange(0, MOST_REST) + END
        b_rest = tl.zeros([BLOCK_N, MOST_REST], tl.uint8)
        p_block = p_records + o_tokens[:, None] * RECORD + o_rest[None, :]
        tl.store(p_block, b_rest, mask=m_tokens[:, None] & (o_rest < RECORD)[None, :])


@functools.cache
def _bind_recording(layout: Layout, records: RecordLayout, stride: int, segment: int) -> tuple[Launches, int]:
    """And how many tokens a program codes."""
    wide, wide_values = (triton.next_power_of_2(size) for size in (records.dim, records.value_dim))
    sizes = find_sizes(layout, segment)
    sizes |= {"KEY_BITS": records.key_bits, "VALUE_BITS": records.value_bits, "RECORD": stride}
    sizes |= {"TURNED_D": coded.find_block(records.dim), "TURNED_V": coded.find_block(records.value_dim)}
    sizes |= {"D": records.dim, "BLOCK_D": wide, "V": records.value_dim, "BLOCK_V": wide_values}
    at_once = min(NUMBERS // max(wide, wide_values), segment)
    return Launches(**sizes, BLOCK_N=at_once, num_warps=4), at_once


def code_records(
    sketch: Sketch, rows: slice, first: int, keys: Tensor, values: Tensor, weights: Tensor, layout: RecordLayout
) -> Tensor:
    """`coded.code_tokens`: records uint8 `[rows, kv_heads, tokens, stride]` of whole segments, or of a bulk's last one,
    `keys` `[rows, kv_heads, tokens, dim]` and `values` (`value_dim`), that the sketch has from its rows' segment
    `first` on. `weights` are `m`, float32 `[kv_heads, dim]`, contiguous. As for `coding.code_segments` otherwise."""
    (keys, key_blocks), (values, value_blocks) = align(keys), align(values)
    batch, heads, tokens = keys.shape[:3]
    stride = layout.find_stride(keys.device)
    launches, at_once = _bind_recording(sketch.layout, layout, stride, definition.SEGMENT_TOKENS)
    words = torch.empty(batch, heads, tokens, stride // 4, dtype=torch.int32, device=keys.device)
    records = words.view(torch.uint8)
    places = rows.indices(len(sketch.scales))[0], first, tokens, sketch.units.shape[2], sketch.scales.shape[2]
    with at_device(keys.device):
        launches.launch(
            record_kernel, (triton.cdiv(tokens, at_once), heads, batch), (keys.dtype, values.dtype, keys.device),
            keys, values, weights, sketch.codes, sketch.scales, sketch.units, sketch.centres, sketch.order,
            sketch.weights, records, words, *key_blocks, *value_blocks, *places,
        )  # fmt: skip
    return records
