"""What the Triton kernels do with records, `../../sketch/coded.py`; names as in `kernels.py`.

A score is what the sketch's codes say of it and a product with what they leave, both of queries rounded twice, 16 bits
in all. Values are summed as they are rotated: `merge_heads` turns the sum back.
"""

import triton
import triton.language as tl

from ...sketch import coded
from .blocks import FINER, WORD_BITS, dot, rotate, round_queries, take_high, take_low, weigh

SCALES = tl.constexpr(2 * coded.SCALE.itemsize)  # bytes of a record before its planes: one word holds both


@triton.jit
def count_segments(length, SEGMENT: tl.constexpr, LAST: tl.constexpr):
    """`sketch.count_segments`."""
    return tl.maximum((length + SEGMENT - LAST) // SEGMENT, 1)


@triton.jit
def store_turned(
    p_turned, p_query, p_weights, i_group, scaling,
    TURNED: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a group's queries as records meet them, `scaling * R (q / m)`, where `load_turned` finds them. `p_weights`
    are `m` of its head."""
    o_head, o_dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_head, m_dim = o_head < G, o_dim < D
    o_group = i_group * G + o_head
    p_query += o_group[:, None] * D + o_dim[None, :]
    b_query = tl.load(p_query, mask=m_head[:, None] & m_dim[None, :], other=0.0).to(tl.float32)
    b_weights = tl.load(p_weights + o_dim, mask=m_dim, other=1.0)
    b_both, b_unit = round_queries(rotate(b_query / b_weights[None, :], TURNED), True)
    p_turned += o_group * (D + 1)
    m_block = m_head[:, None] & m_dim[None, :]
    tl.store(p_turned[:, None] + o_dim[None, :], b_both, mask=m_block)
    tl.store(p_turned + D, (b_unit * scaling).to(tl.int32, bitcast=True), mask=m_head)


@triton.jit
def load_turned(p_turned, i_group, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """What `store_turned` has left, as of `round_queries`."""
    o_head, o_dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_head = o_head < G
    p_turned += (i_group * G + o_head) * (D + 1)
    m_block = m_head[:, None] & (o_dim < D)[None, :]
    b_both = tl.load(p_turned[:, None] + o_dim[None, :], mask=m_block, other=0)
    b_unit = tl.load(p_turned + D, mask=m_head, other=0).to(tl.float32, bitcast=True)
    return b_both, b_unit


@triton.jit
def load_plane(
    p_tokens, m_tokens, COUNT: tl.constexpr, FROM: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What a plane of `PLANE` bits says of `COUNT` codes of `BITS` bits, int8 [tokens, BLOCK]. Planes of these begin at
    byte `FROM` of the records that `p_tokens` point to, and are read in units of `UNIT` bits, as these are."""
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
def attend_records(
    b_max, b_sum, b_out, p_turned, p_records, p_open, p_index, p_scores, p_flags, i_group, room, closed, count,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, RECORD: tl.constexpr, UNIT: tl.constexpr, TERMS: tl.constexpr,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `attend`, of the `count` tokens `p_index` in the head's records, whose values stay rotated: those of `closed`
    tokens in `p_records`, the next ones in `p_open`. `p_scores` has what the sketch says of scores, of query heads
    `room` apart. Weights are rounded to `TERMS` times 8 bits."""
    tl.static_assert(KEY_BITS < 8 and VALUE_BITS < 8)
    o_head = tl.arange(0, BLOCK_G)
    o_group = i_group * G + o_head
    m_flags = tl.load(p_flags + o_group, mask=o_head < G, other=0) != 0
    b_both, b_unit = load_turned(p_turned, i_group, G, BLOCK_G, D, BLOCK_D)
    b_high, b_low = take_high(b_both), take_low(b_both)
    b_offset = tl.sum(b_high.to(tl.float32) + b_low.to(tl.float32) * (1.0 / FINER), axis=1) * (2**KEY_BITS - 1)
    for start in range(0, count, BLOCK_N):
        o_place = start + tl.arange(0, BLOCK_N)
        m_tokens = o_place < count
        o_tokens = tl.load(p_index + o_place, mask=m_tokens, other=0).to(tl.int64)
        m_closed = o_tokens < closed
        p_tokens = tl.where(m_closed, p_records, p_open) + tl.where(m_closed, o_tokens, o_tokens - closed) * RECORD
        p_words = p_tokens.to(tl.pointer_type(tl.int32))
        p_units = p_words if UNIT == WORD_BITS else p_tokens
        b_scales = tl.load(p_words, mask=m_tokens, other=0)
        b_products = tl.zeros([BLOCK_G, BLOCK_N], tl.int32)
        b_lows = tl.zeros([BLOCK_G, BLOCK_N], tl.int32)
        for plane in tl.static_range(3):
            if KEY_BITS & (4 >> plane):
                b_codes = load_plane(p_units, m_tokens, D, SCALES, KEY_BITS, 4 >> plane, UNIT, BLOCK_D)
                b_products += tl.dot(b_high, tl.trans(b_codes), out_dtype=tl.int32)
                b_lows += tl.dot(b_low, tl.trans(b_codes), out_dtype=tl.int32)
        b_along = 2.0 * (b_products.to(tl.float32) + b_lows.to(tl.float32) * (1.0 / FINER)) - b_offset[:, None]
        m_scores = m_flags[:, None] & m_tokens[None, :]
        b_scores = tl.load(p_scores + o_group[:, None] * room + o_tokens[None, :], mask=m_scores, other=0.0)
        b_scores += (b_scales << 16).to(tl.float32, bitcast=True)[None, :] * (b_unit[:, None] * b_along)
        b_max, b_sum, b_decay, b_left = weigh(b_scores, m_tokens[None, :], b_max, b_sum)
        b_left *= 2.0 * (b_scales & -65536).to(tl.float32, bitcast=True)[None, :]
        b_rest = b_left
        b_out *= b_decay[:, None]
        for plane in tl.static_range(3):
            if VALUE_BITS & (4 >> plane):
                b_codes = load_plane(
                    p_units, m_tokens, V, SCALES + D * KEY_BITS // 8, VALUE_BITS, 4 >> plane, UNIT, BLOCK_V
                ).to(tl.float32).to(tl.bfloat16)  # fmt: skip
                b_rest = b_left
                for _ in tl.static_range(TERMS):
                    b_term = b_rest.to(tl.bfloat16)
                    b_rest -= b_term.to(tl.float32)
                    b_out += dot(b_term, b_codes)
        b_out -= (tl.sum(b_left - b_rest, axis=1) * ((2**VALUE_BITS - 1) / 2))[:, None]
    return b_max, b_sum, b_out
