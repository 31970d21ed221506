"""Keys and values that records say: `coded.decode_keys` and `decode_values`, in one launch. Names are as in
`kernels.py`."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import sketch as definition
from ...sketch import Layout, coded
from ...sketch.codec import Sketch
from ...sketch.coded import RecordLayout
from .blocks import WORD_BITS, rotate
from .coding import find_sizes, round_to_bfloat16
from .direct import at_device
from .launching import Launches
from .record_kernels import SCALES
from .recording import load_segment, predict_keys

NUMBERS = 1024  # of keys, and of values, that a program decodes at once: twice as many take registers of two programs
RUN = 64  # tokens that a program decodes; a power of two that divides the tokens of a segment
# Numbers that follow the tokens or where they lie: nothing is compiled anew for them.
UNSPECIALIZED = [
    "s_row", "s_head", "first_row", "first_head", "heads", "first", "tokens", "segments", "s_segment", "s_tokens",
]  # fmt: skip


@triton.jit
def load_plane(
    p_tokens, m_tokens, COUNT: tl.constexpr, FROM: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The bits of `COUNT` codes of `BITS` bits that lie in a plane of `PLANE` bits, int8 [tokens, BLOCK]. The planes
    begin at byte `FROM` of the records that `p_tokens` point to, and are read in units of `UNIT` bits."""
    VALUES: tl.constexpr = UNIT // PLANE  # noqa: N806 - a compile-time constant
    DONE: tl.constexpr = BITS & ~(2 * PLANE - 1)  # bits in larger planes  # noqa: N806 - a compile-time constant
    o_unit = tl.arange(0, BLOCK // VALUES)
    p_block = p_tokens[:, None] + (FROM + COUNT * DONE // 8) * 8 // UNIT
    b_units = tl.load(p_block + o_unit[None, :], mask=m_tokens[:, None] & (o_unit < COUNT // VALUES)[None, :], other=0)
    for level in tl.static_range(5):  # by halves, all of which stay with the thread that has the whole
        if UNIT >> level > PLANE:
            b_halves = tl.join(b_units, b_units >> (UNIT >> (level + 1)))
            b_units = b_halves.reshape(b_halves.shape[0], b_halves.shape[1] * 2)
    return ((b_units & (2**PLANE - 1)) << DONE).to(tl.int8)


@triton.jit
def load_values(
    p_units, b_scale, m_tokens, FROM: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, TURNED: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `COUNT` numbers of each record whose planes begin at byte `FROM`, turned back: float32 [tokens, BLOCK]."""
    tl.static_assert(BITS < 8)
    b_codes = tl.zeros([m_tokens.shape[0], BLOCK], tl.int32)
    for plane in tl.static_range(3):
        if BITS & (4 >> plane):
            b_codes += load_plane(p_units, m_tokens, COUNT, FROM, BITS, 4 >> plane, UNIT, BLOCK).to(tl.int32)
    b_odd = (2 * b_codes - (2**BITS - 1)).to(tl.float32)
    m_values = m_tokens[:, None] & (tl.arange(0, BLOCK) < COUNT)[None, :]
    return rotate(tl.where(m_values, b_scale[:, None] * b_odd, 0.0), TURNED)


@triton.jit
def store_tokens(p_tokens, b_values, o_tokens, m_tokens, COUNT: tl.constexpr):
    """Write [tokens, channels] in the dtype of `p_tokens`."""
    o_dim = tl.arange(0, b_values.shape[1])
    if p_tokens.dtype.element_ty == tl.bfloat16:
        b_values = round_to_bfloat16(b_values)
    p_block = p_tokens + o_tokens.to(tl.int64)[:, None] * COUNT + o_dim[None, :]
    tl.store(p_block, b_values.to(p_tokens.dtype.element_ty), mask=m_tokens[:, None] & (o_dim < COUNT)[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def decode_kernel(
    p_records, p_query_weights, p_codes, p_scales, p_units, p_centres, p_order, p_weights, p_keys, p_values,
    s_row, s_head, first_row, first_head, heads, first, tokens, segments, s_segment, s_tokens,
    SEGMENT: tl.constexpr, FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, RECORD: tl.constexpr, UNIT: tl.constexpr,
    TURNED_D: tl.constexpr, TURNED_V: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Keys [rows, heads, tokens, D] and values (V) of `tokens` records, `RECORD` bytes apart, of a bulk's
    tokens from `first` on; one program a (run of tokens, KV head, row). The sketch has `heads` heads, of which those
    from `first_head` on are meant, and of its rows those from `first_row` on. Strides of `p_records` are in words."""
    i_run, i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = (first // RUN + i_run) * RUN  # runs do not reach into another segment
    i_group = (first_row + i_row) * heads + first_head + i_head
    at = i_group * s_segment + tl.minimum(start // SEGMENT, segments - 1)
    b_centre, b_places, b_weights = load_segment(p_centres + at * D, p_order + at * D, p_weights + at * D, D, BLOCK_D)
    unit, o_dim = tl.load(p_units + at), tl.arange(0, BLOCK_D)
    b_query_weights = tl.load(p_query_weights + (first_head + i_head) * D + o_dim, mask=o_dim < D, other=1.0)
    p_codes += i_group * (FOURS + TWOS + ONES) * s_tokens
    p_scales += i_group * s_tokens
    before = (i_row * tl.num_programs(1) + i_head) * tokens
    p_words = p_records.to(tl.pointer_type(tl.int32)) + i_row * s_row + i_head * s_head
    for place in range(0, RUN, BLOCK_N):
        o_bulk = start + place + tl.arange(0, BLOCK_N)
        m_tokens = (o_bulk >= first) & (o_bulk < first + tokens)
        o_tokens = o_bulk - first
        p_tokens = p_words + o_tokens.to(tl.int64) * (RECORD // 4)
        p_planes = p_tokens if UNIT == WORD_BITS else p_tokens.to(tl.pointer_type(tl.uint8))
        b_scales = tl.load(p_tokens, mask=m_tokens, other=0)
        b_predicted = predict_keys(
            p_codes, p_scales, unit, b_centre, b_places, b_weights, o_bulk, m_tokens, s_tokens,
            FOURS, TWOS, ONES, BLOCK_D,
        )  # fmt: skip
        b_scale = (b_scales << 16).to(tl.float32, bitcast=True)
        b_keys = load_values(p_planes, b_scale, m_tokens, SCALES, KEY_BITS, UNIT, TURNED_D, D, BLOCK_D)
        b_keys = b_predicted + tl.div_rn(b_keys, b_query_weights[None, :].broadcast_to(b_keys.shape))
        store_tokens(p_keys + before * D, b_keys, o_tokens, m_tokens, D)
        b_scale = (b_scales & -65536).to(tl.float32, bitcast=True)
        b_values = load_values(
            p_planes, b_scale, m_tokens, SCALES + D * KEY_BITS // 8, VALUE_BITS, UNIT, TURNED_V, V, BLOCK_V
        )
        store_tokens(p_values + before * V, b_values, o_tokens, m_tokens, V)


@functools.cache
def _bind_decoding(layout: Layout, records: RecordLayout, segment: int, distance: int) -> Launches:
    """For records so many bytes apart."""
    wide, wide_values = (triton.next_power_of_2(size) for size in (records.dim, records.value_dim))
    sizes = find_sizes(layout, segment) | {"UNIT": records.unit}
    sizes |= {"KEY_BITS": records.key_bits, "VALUE_BITS": records.value_bits, "RECORD": distance}
    sizes |= {"TURNED_D": coded.find_block(records.dim), "TURNED_V": coded.find_block(records.value_dim)}
    sizes |= {"D": records.dim, "BLOCK_D": wide, "V": records.value_dim, "BLOCK_V": wide_values}
    run = min(RUN, segment)
    return Launches(**sizes, BLOCK_N=min(NUMBERS // max(wide, wide_values), run), RUN=run, num_warps=4)


def decode_tokens(
    records: Tensor, sketch: Sketch, rows: slice, heads: slice, weights: Tensor, layout: RecordLayout,
    like: tuple[Tensor, Tensor], *, first: int, segments: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys `[rows, heads, tokens, dim]` and values (`value_dim`) in the dtypes of `like`, of `records` uint8 `[rows,
    heads, tokens, size]` of a bulk's tokens from `first` on, whose bytes lie side by side, at whole words.

    Args:
        sketch: of the bulk, contiguous tensors `[batch, kv_heads, ...]`, of which `rows` and `heads` are meant.
        weights: `m`, float32 `[kv_heads, dim]`, contiguous.
        layout: of the records.
        segments: of the bulk, the last of which may be longer.
    """
    shape, tokens = records.shape[:3], records.shape[2]
    keys, values = (
        torch.empty(*shape, size, dtype=each.dtype, device=records.device)
        for size, each in zip((layout.dim, layout.value_dim), like, strict=True)
    )
    launches = _bind_decoding(sketch.layout, layout, definition.SEGMENT_TOKENS, records.stride(2))
    run = min(RUN, definition.SEGMENT_TOKENS)
    strides = [stride // 4 for stride in records.stride()[:2]]
    (first_row, *_), (first_head, *_) = rows.indices(len(sketch.scales)), heads.indices(sketch.scales.shape[1])
    places = first_row, first_head, sketch.scales.shape[1], first, tokens, segments
    variant = keys.dtype, values.dtype, records.device, records.data_ptr() % 16 == 0
    with at_device(records.device):
        launches.launch(
            decode_kernel, (triton.cdiv(first % run + tokens, run), shape[1], shape[0]), variant,
            records, weights, sketch.codes, sketch.scales, sketch.units, sketch.centres, sketch.order, sketch.weights,
            keys, values, *strides, *places, sketch.units.shape[2], sketch.scales.shape[2],
        )  # fmt: skip
    return keys, values
