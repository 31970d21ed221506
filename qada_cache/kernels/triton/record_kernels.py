"""Functions of the Triton kernels for records (`../../sketch/coded.py`); names as in `kernels.py`.

A score is what the sketch's codes say of it and a product with what they leave, both of queries rounded twice, 16 bits
in all. Values are summed as they are rotated: `merge_heads` turns the sum back.

A program reads records in rounds. A lane takes eight values from all their planes and writes them, as matrix products
take them, to memory of the program's own, which stays in the cache. Planes have them in another order than channels,
which queries and sums take instead of them: `find_channels`, `order_values`. Records on the other side of a bus come
there first, each in one piece, as every piece is a transaction.
"""

import triton
import triton.language as tl

from ...sketch import coded
from .blocks import FINER, WORD_BITS, dot, rotate, round_queries, take_high, take_low, weigh

SCALES = tl.constexpr(2 * coded.SCALE.itemsize)  # bytes of a record before its planes: one word holds both
TAKEN = tl.constexpr(8)  # values that a lane takes at once: a byte of a plane of one bit, a word of one of four


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
def find_channels(BLOCK_D: tl.constexpr):
    """The channel at each place of keys, in the order of `store_keys`."""
    o_place = tl.arange(0, BLOCK_D)
    o_byte = o_place % (BLOCK_D // 2)
    return o_byte // 4 * 8 + o_byte % 4 * 2 + o_place // (BLOCK_D // 2)


@triton.jit
def order_values(b_values):
    """Values [rows, BLOCK_V] in the order of channels, from those in the order of `store_values`."""
    ROWS: tl.constexpr = b_values.shape[0]  # noqa: N806 - a compile-time constant
    BLOCK_V: tl.constexpr = b_values.shape[1]  # noqa: N806 - a compile-time constant
    b_apart = b_values.reshape(ROWS, 4, BLOCK_V // TAKEN, 2)
    return tl.permute(b_apart, (0, 2, 3, 1)).reshape(ROWS, BLOCK_V)


@triton.jit
def load_turned(p_turned, i_group, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The queries that `store_turned` wrote, as returned by `round_queries`, in the order of `find_channels`."""
    o_head, o_dim = tl.arange(0, BLOCK_G), find_channels(BLOCK_D)
    m_head = o_head < G
    p_turned += (i_group * G + o_head) * (D + 1)
    m_block = m_head[:, None] & (o_dim < D)[None, :]
    b_both = tl.load(p_turned[:, None] + o_dim[None, :], mask=m_block, other=0)
    b_unit = tl.load(p_turned + D, mask=m_head, other=0).to(tl.float32, bitcast=True)
    return b_both, b_unit


@triton.jit
def load_eights(
    p_tokens, m_tokens, COUNT: tl.constexpr, FROM: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The bits of `COUNT` codes of `BITS` bits that lie in a plane of `PLANE` bits, eight codes in each int32 of
    [tokens, BLOCK // 8]. The planes begin at byte `FROM` of the records that `p_tokens` point to, at whole
    units of `UNIT` bits."""
    DONE: tl.constexpr = BITS & ~(2 * PLANE - 1)  # bits in larger planes  # noqa: N806 - a compile-time constant
    o_eight = tl.arange(0, BLOCK // TAKEN)
    m_eights = m_tokens[:, None] & (o_eight < COUNT // TAKEN)[None, :]
    p_eights = p_tokens[:, None] + (FROM + COUNT * DONE // 8) + (o_eight * PLANE)[None, :]
    if UNIT == WORD_BITS and PLANE == 4:
        return tl.load(p_eights.to(tl.pointer_type(tl.int32)), mask=m_eights, other=0)
    if UNIT == WORD_BITS and PLANE == 2:
        return tl.load(p_eights.to(tl.pointer_type(tl.uint16)), mask=m_eights, other=0).to(tl.int32)
    b_eights = tl.load(p_eights, mask=m_eights, other=0).to(tl.int32)
    for byte in tl.static_range(1, PLANE):
        b_eights |= tl.load(p_eights + byte, mask=m_eights, other=0).to(tl.int32) << (8 * byte)
    return b_eights


@triton.jit
def load_planes(
    p_tokens, m_tokens, COUNT: tl.constexpr, FROM: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The planes of 4, 2 and 1 bits by `load_eights`; zeros for planes that `BITS` does not have."""
    b_fours = tl.zeros([p_tokens.shape[0], BLOCK // TAKEN], tl.int32)
    b_twos, b_ones = b_fours, b_fours
    if BITS & 4:
        b_fours = load_eights(p_tokens, m_tokens, COUNT, FROM, BITS, 4, UNIT, BLOCK)
    if BITS & 2:
        b_twos = load_eights(p_tokens, m_tokens, COUNT, FROM, BITS, 2, UNIT, BLOCK)
    if BITS & 1:
        b_ones = load_eights(p_tokens, m_tokens, COUNT, FROM, BITS, 1, UNIT, BLOCK)
    return b_fours, b_twos, b_ones


@triton.jit
def spread(b_eights, PLANE: tl.constexpr):
    """Every other one of eight values of `PLANE` bits, the first one included, in the lowest bits of a word's bytes."""
    if PLANE == 4:
        return b_eights & 0x0F0F0F0F
    if PLANE == 2:
        b_halves = (b_eights | (b_eights << 8)) & 0x00330033
        return (b_halves | (b_halves << 4)) & 0x03030303
    return ((b_eights & 0x55) * 0x41041) & 0x01010101  # copies by 6, 12 and 18 bits: they carry no further than a bit


@triton.jit
def store_keys(p_unpacked, b_fours, b_twos, b_ones, BITS: tl.constexpr):
    """Write codes of keys, of `load_planes`, as bytes, four in each word of `p_unpacked` [tokens, BLOCK_D // 4]: of
    each eight those with even numbers, and behind them, of all, the others."""
    o_token, o_eight = tl.arange(0, b_fours.shape[0]), tl.arange(0, b_fours.shape[1])
    p_block = p_unpacked + o_token[:, None] * (2 * b_fours.shape[1]) + o_eight[None, :]
    for odd in tl.static_range(2):
        b_codes = tl.zeros(b_fours.shape, tl.int32)
        if BITS & 4:
            b_codes |= spread(b_fours >> (4 * odd), 4)
        if BITS & 2:
            b_codes |= spread(b_twos >> (2 * odd), 2) << (BITS & 4)
        if BITS & 1:
            b_codes |= spread(b_ones >> odd, 1) << (BITS & 6)
        tl.store(p_block + odd * b_fours.shape[1], b_codes)


@triton.jit
def store_values(p_unpacked, b_fours, b_twos, b_ones, BITS: tl.constexpr):
    """Write halves of the odd integers of values as bfloat16, two in each word of `p_unpacked` [tokens, BLOCK_V // 2]:
    of each eight the first and the fifth, of all, behind them the second and the sixth, and so on."""
    FIRST: tl.constexpr = 128.0 + (2**BITS - 1) / 2  # noqa: N806 - a compile-time constant
    o_token, o_eight = tl.arange(0, b_fours.shape[0]), tl.arange(0, b_fours.shape[1])
    p_block = p_unpacked + o_token[:, None] * (4 * b_fours.shape[1]) + o_eight[None, :]
    b_twos |= b_twos << 8  # the fifth value is now 16 bits from the first
    b_ones |= b_ones << 12
    for pair in tl.static_range(4):
        b_pair = tl.zeros(b_fours.shape, tl.int32)
        if BITS & 4:
            b_pair |= (b_fours >> (4 * pair)) & 0x000F000F
        if BITS & 2:
            b_pair |= ((b_twos >> (2 * pair)) & 0x00030003) << (BITS & 4)
        if BITS & 1:
            b_pair |= ((b_ones >> pair) & 0x00010001) << (BITS & 6)
        # As a float32, whose upper half is the bfloat16: an integer below 128 behind the first bits of 128 is a sum.
        b_first = ((b_pair << 16) | 0x43000000).to(tl.float32, bitcast=True) - FIRST
        b_second = ((b_pair & -65536) | 0x43000000).to(tl.float32, bitcast=True) - FIRST
        b_first = (b_first.to(tl.int32, bitcast=True) >> 16) & 65535
        b_second = b_second.to(tl.int32, bitcast=True) & -65536
        tl.store(p_block + pair * b_fours.shape[1], b_first | b_second)


@triton.jit
def copy_records(p_copies, p_tokens, m_tokens, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy whole records, `STRIDE` bytes each, in words, of which `BLOCK` are enough, to `p_copies`."""
    o_token, o_word = tl.arange(0, p_tokens.shape[0]), tl.arange(0, BLOCK)
    m_words = m_tokens[:, None] & (o_word < STRIDE // 4)[None, :]
    b_words = tl.load(p_tokens.to(tl.pointer_type(tl.int32))[:, None] + o_word[None, :], mask=m_words, other=0)
    tl.store(p_copies + o_token[:, None] * (STRIDE // 4) + o_word[None, :], b_words, mask=m_words)


@triton.jit
def attend_records(
    b_max, b_sum, p_turned, p_records, p_open, p_index, p_scores, p_flags, p_unpacked, i_group, room, closed, count,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, STRIDE: tl.constexpr, COPY: tl.constexpr, UNIT: tl.constexpr,
    TERMS: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `attend`, of the `count` tokens `p_index` in the head's records, whose values stay rotated: those of `closed`
    tokens in `p_records`, the next ones in `p_open`, `STRIDE` bytes apart. `p_scores` has what the sketch says of
    scores, of query heads `room` apart. Weights are rounded to `TERMS` times 8 bits.

    `p_unpacked` is the program's own: words for `BLOCK_N` tokens' keys, values, and records, if these are first copied
    in blocks of `COPY` words."""
    tl.static_assert(KEY_BITS < 8 and VALUE_BITS < 8)
    VALUES: tl.constexpr = SCALES + D * KEY_BITS // 8  # noqa: N806 - a compile-time constant
    o_head = tl.arange(0, BLOCK_G)
    o_group = i_group * G + o_head
    m_flags = tl.load(p_flags + o_group, mask=o_head < G, other=0) != 0
    b_both, b_unit = load_turned(p_turned, i_group, G, BLOCK_G, D, BLOCK_D)
    b_high, b_low = take_high(b_both), take_low(b_both)
    b_offset = tl.sum(b_high.to(tl.float32) + b_low.to(tl.float32) * (1.0 / FINER), axis=1) * (2**KEY_BITS - 1)
    b_out = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    o_block, o_dim, o_value = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    p_other = p_unpacked + BLOCK_N * (BLOCK_D // 4)
    p_copies = p_other + BLOCK_N * (BLOCK_V // 2)
    p_codes = p_unpacked.to(tl.pointer_type(tl.int8)) + o_block[:, None] * BLOCK_D + o_dim[None, :]
    p_values = p_other.to(tl.pointer_type(tl.bfloat16)) + o_block[:, None] * BLOCK_V + o_value[None, :]
    for start in tl.range(0, count, BLOCK_N, num_stages=1):  # a pipeline would read ahead of what is written
        m_tokens = start + o_block < count
        o_tokens = tl.load(p_index + start + o_block, mask=m_tokens, other=0).to(tl.int64)
        m_scores = m_flags[:, None] & m_tokens[None, :]
        b_scores = tl.load(p_scores + o_group[:, None] * room + o_tokens[None, :], mask=m_scores, other=0.0)
        m_closed = o_tokens < closed
        p_tokens = tl.where(m_closed, p_records, p_open) + tl.where(m_closed, o_tokens, o_tokens - closed) * STRIDE
        if COPY:
            copy_records(p_copies, p_tokens, m_tokens, STRIDE, COPY)
            tl.debug_barrier()  # threads read what others have written
            p_tokens = p_copies.to(tl.pointer_type(tl.uint8)) + o_block * STRIDE
        b_scales = tl.load(p_tokens.to(tl.pointer_type(tl.int32)), mask=m_tokens, other=0)
        # All is on its way before anything is written.
        b_fours, b_twos, b_ones = load_planes(p_tokens, m_tokens, D, SCALES, KEY_BITS, UNIT, BLOCK_D)
        b_four, b_two, b_one = load_planes(p_tokens, m_tokens, V, VALUES, VALUE_BITS, UNIT, BLOCK_V)
        store_keys(p_unpacked, b_fours, b_twos, b_ones, KEY_BITS)
        store_values(p_other, b_four, b_two, b_one, VALUE_BITS)
        tl.debug_barrier()  # likewise
        b_codes = tl.trans(tl.load(p_codes))
        b_values = tl.load(p_values)
        b_products = tl.dot(b_high, b_codes, out_dtype=tl.int32)
        b_lows = tl.dot(b_low, b_codes, out_dtype=tl.int32)
        b_along = 2.0 * (b_products.to(tl.float32) + b_lows.to(tl.float32) * (1.0 / FINER)) - b_offset[:, None]
        b_scores += (b_scales << 16).to(tl.float32, bitcast=True)[None, :] * (b_unit[:, None] * b_along)
        b_max, b_sum, b_decay, b_left = weigh(b_scores, m_tokens[None, :], b_max, b_sum)
        b_left *= 2.0 * (b_scales & -65536).to(tl.float32, bitcast=True)[None, :]
        b_out *= b_decay[:, None]
        for _ in tl.static_range(TERMS):
            b_term = b_left.to(tl.bfloat16)
            b_left -= b_term.to(tl.float32)
            b_out += dot(b_term, b_values)
        tl.debug_barrier()  # before others write there again
    return b_max, b_sum, order_values(b_out)
