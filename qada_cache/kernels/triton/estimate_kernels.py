"""Triton's kernels for estimates of all scores by a sketch's codes; names as in `kernels.py`.

Queries are weighed, rotated and rounded once for each segment, by `prepare_segments`. A lane of `estimate_kernel` then
has whole tokens to itself: a word holds four values of eight bits or less, side by side after a shift and a mask, and
one instruction multiplies them with those of a query. `score_kernels.py` does so again, with queries of 16 bits, of the
tokens alone whose records are read.
"""

import triton
import triton.language as tl

from .blocks import BLOCK, MIN_PEAK, MOST_HALF, MOST_RISE, WORD_BITS, dot_bytes, rotate, round_queries
from .record_kernels import count_segments

LANES = tl.constexpr(128)  # of a program of four warps
UNROLLED = tl.constexpr(8)  # words of a key: of more, the assembler loads all ahead, and spills
SLOPE_COLUMNS = tl.constexpr(16)  # of pairs of what values gain along a query, at once
MOST_UNROLLED = tl.constexpr(256)  # channels of keys: likewise
# Rows of a prepared segment, a word for each query head: integers, of four channels a row, and the sum of products'
# offsets; then what the head's query says of the centre, half the variance of an error, and the step of products, each
# for a scale of 1, and the greatest scale that counts in that variance; then, where records are read, what the
# integers leave, in as many rows as they take.
NUMBERS = tl.constexpr(4)


def count_rows(coded: int, terms: int) -> int:
    """The rows of a prepared segment, for `coded` channels and queries rounded in `terms` terms."""
    return terms * (coded // 4 + 1) + NUMBERS.value


@triton.jit
def prepare_segments(
    p_prepared, p_query, p_errors, p_noise, p_centres, p_order, p_weights, i_group, i_held, i_first, segments,
    s_segment, first, scaling,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr,
    G: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, PREPARED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a group's queries as the codes of segments meet them, in rows of `BLOCK_Q` words: see `NUMBERS`. It
    takes `BLOCK_H` query heads from the `first` on, and `PREPARED` segments of `segments` from the `i_first` on: so
    many at once that to wait for one takes no longer than for all."""
    FIRST_TWO: tl.constexpr = WORD_BITS // 4 * FOURS  # noqa: N806 - a compile-time constant
    FIRST_ONE: tl.constexpr = FIRST_TWO + WORD_BITS // 2 * TWOS  # noqa: N806 - a compile-time constant
    CODED: tl.constexpr = FIRST_ONE + WORD_BITS * ONES  # noqa: N806 - a compile-time constant
    PLANES: tl.constexpr = CODED // 4  # noqa: N806 - a compile-time constant
    o_line, o_dim = tl.arange(0, PREPARED * BLOCK_H), tl.arange(0, BLOCK_D)  # a line is a head's of a segment
    o_head, o_segment = first + o_line % BLOCK_H, i_first + o_line // BLOCK_H
    m_segment, m_dim = o_segment < segments, o_dim < D
    m_line = m_segment & (o_head < G)
    m_own, m_query = m_segment[:, None] & m_dim[None, :], m_line[:, None] & m_dim[None, :]
    p_query += (i_group * G + o_head)[:, None] * D
    o_own = (i_held * s_segment + o_segment)[:, None] * D + o_dim[None, :]
    b_order = tl.load(p_order + o_own, mask=m_own, other=0).to(tl.int32)
    b_weights = tl.load(p_weights + o_own, mask=m_own, other=1.0).to(tl.float32)
    b_centre = tl.load(p_centres + o_own, mask=m_own, other=0.0).to(tl.float32)
    b_errors = tl.load(p_errors + o_dim, mask=m_dim, other=0.0)
    b_query = tl.load(p_query + o_dim[None, :], mask=m_query, other=0.0).to(tl.float32)
    b_middle = tl.sum(b_query * b_centre, axis=1) * scaling
    b_noise = tl.load(p_noise + i_held * D + o_dim, mask=m_dim, other=0.0)
    b_mean = tl.sum(b_query * b_query * b_noise[None, :], axis=1) * (0.5 * scaling * scaling)
    b_query = tl.load(p_query + b_order, mask=m_query, other=0.0).to(tl.float32)
    b_weighed = b_query / b_weights
    b_spread = tl.sum(b_weighed * b_weighed * b_errors[None, :], axis=1) * (0.5 * scaling * scaling)
    b_widest = tl.sqrt(tl.maximum(b_mean * MOST_RISE, MOST_HALF) / tl.maximum(b_spread, MIN_PEAK))
    b_rotated = rotate(tl.where((o_dim < CODED)[None, :], b_weighed, 0.0), BLOCK)
    b_both, b_unit = round_queries(b_rotated, TERMS == 2)
    b_most = tl.where(o_dim < FIRST_TWO, 15, tl.where(o_dim < FIRST_ONE, 3, 1))[None, :]  # of the codes they meet

    p_prepared += (i_group * s_segment + o_segment) * (ROWS * BLOCK_Q) + o_head
    o_row = tl.arange(0, BLOCK_D // 4)
    m_row = m_segment[:, None] & (o_row < PLANES)[None, :]
    for term in tl.static_range(TERMS):
        p_term = p_prepared + term * (PLANES + 1 + NUMBERS) * BLOCK_Q
        b_integers = (b_both << (24 - 8 * term)) >> 24  # of the byte, with its sign
        p_rows = p_term[:, None] + (o_row * BLOCK_Q)[None, :]
        tl.store(p_rows, pack_bytes(b_integers), mask=m_row)
        tl.store(p_term + PLANES * BLOCK_Q, tl.sum(b_integers * b_most, axis=1), mask=m_segment)
    p_numbers = p_prepared + (PLANES + 1) * BLOCK_Q
    tl.store(p_numbers, b_middle.to(tl.int32, bitcast=True), mask=m_segment)
    tl.store(p_numbers + BLOCK_Q, b_spread.to(tl.int32, bitcast=True), mask=m_segment)
    tl.store(p_numbers + 2 * BLOCK_Q, (b_unit * scaling).to(tl.int32, bitcast=True), mask=m_segment)
    tl.store(p_numbers + 3 * BLOCK_Q, b_widest.to(tl.int32, bitcast=True), mask=m_segment)


@triton.jit
def add_along(b_sum, p_query, p_slopes, p_units, start, D: tl.constexpr, V: tl.constexpr):
    """`b_sum` [BLOCK_V, columns] and what values gain along as many pairs of a query's channels, from `start` on."""
    o_value, o_dim = tl.arange(0, b_sum.shape[0]), start + tl.arange(0, b_sum.shape[1])
    m_dim = o_dim < D // 2
    b_pairs = tl.load(p_slopes + o_dim[None, :], mask=(o_value < V)[:, None] & m_dim[None, :], other=0)
    for half in tl.static_range(2):
        o_channel = half * (D // 2) + o_dim
        b_query = tl.load(p_query + o_channel, mask=m_dim, other=0.0).to(tl.float32)
        b_query *= tl.load(p_units + o_channel, mask=m_dim, other=0.0)
        b_slopes = (b_pairs.to(tl.int32) << 28 - 4 * half) >> 28  # of the four bits, with their sign
        b_sum += b_slopes.to(tl.float32) * b_query[None, :]
    return b_sum


@triton.jit
def store_along(
    p_along, p_query, p_slopes, p_units, i_group, i_held, i_head,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write what values gain along the `i_head`-th query, `slopes (slope_units q)`: `p_along` [query heads, V]."""
    o_value = tl.arange(0, BLOCK_V)
    p_slopes += i_held * V * (D // 2) + o_value[:, None] * (D // 2)
    p_units += i_held * D
    i_query = i_group * G + i_head
    b_sum = tl.zeros([BLOCK_V, SLOPE_COLUMNS], tl.float32)
    p_query += i_query * D
    if D > MOST_UNROLLED:
        for start in range(0, D // 2, SLOPE_COLUMNS):
            b_sum = add_along(b_sum, p_query, p_slopes, p_units, start, D, V)
    else:
        for start in tl.static_range(0, D // 2, SLOPE_COLUMNS):
            b_sum = add_along(b_sum, p_query, p_slopes, p_units, start, D, V)
    tl.store(p_along + i_query * V + o_value, tl.sum(b_sum, axis=1), mask=o_value < V)


@triton.jit
def pack_bytes(b_integers):
    """Words [rows, channels / 4] of the lowest bytes of integers [rows, channels], the first one lowest."""
    ROWS: tl.constexpr = b_integers.shape[0]  # noqa: N806 - a compile-time constant
    WORDS: tl.constexpr = b_integers.shape[1] // 4  # noqa: N806 - a compile-time constant
    o_byte = tl.arange(0, 4)[None, None, :]
    return tl.sum((b_integers & 255).reshape(ROWS, WORDS, 4) << 8 * o_byte, axis=2)


@triton.jit
def add_word(
    b_sum, p_codes, p_rows, room, o_tokens, m_tokens, word, BITS: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Add the products of the codes of one word to `b_sum`, as `add_products`."""
    MASK: tl.constexpr = 0x01010101 * (2**BITS - 1)  # noqa: N806 - a compile-time constant
    b_codes = tl.load(p_codes + word * room + o_tokens, mask=m_tokens, other=0)
    for plane in tl.static_range(8 // BITS):
        b_bytes = ((b_codes >> plane * BITS) & MASK)[None, :]
        b_sum = dot_bytes(b_sum, b_bytes, tl.load(p_rows + (word * (8 // BITS) + plane) * BLOCK_Q))
    return b_sum


@triton.jit
def add_products(
    b_sum, p_codes, p_rows, room, o_tokens, m_tokens, WORDS: tl.constexpr, BITS: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """`b_sum` and the products of prepared queries with `WORDS` words of `BITS` a value of these tokens, `room` apart.
    Pointers `p_rows` are to the first of the words' rows."""
    if WORDS > UNROLLED:
        for word in range(WORDS):
            b_sum = add_word(b_sum, p_codes, p_rows, room, o_tokens, m_tokens, word, BITS, BLOCK_Q)
    else:
        for word in tl.static_range(WORDS):
            b_sum = add_word(b_sum, p_codes, p_rows, room, o_tokens, m_tokens, word, BITS, BLOCK_Q)
    return b_sum


@triton.jit
def multiply_codes(
    p_codes, p_rows, room, o_tokens, m_tokens,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Products float32 [heads, tokens] of prepared queries with the odd integers of a head's tokens, whose words of 4-,
    2- and 1-bit values lie `room` tokens apart. Pointers `p_rows` [heads, tokens or 1] are to a term's first row."""
    b_sum = tl.zeros([p_rows.shape[0], o_tokens.shape[0]], tl.int32)
    b_sum = add_products(b_sum, p_codes, p_rows, room, o_tokens, m_tokens, FOURS, 4, BLOCK_Q)
    p_codes += FOURS * room
    p_rows += 2 * FOURS * BLOCK_Q
    b_sum = add_products(b_sum, p_codes, p_rows, room, o_tokens, m_tokens, TWOS, 2, BLOCK_Q)
    p_codes += TWOS * room
    p_rows += 4 * TWOS * BLOCK_Q
    b_sum = add_products(b_sum, p_codes, p_rows, room, o_tokens, m_tokens, ONES, 1, BLOCK_Q)
    return (2 * b_sum - tl.load(p_rows + 8 * ONES * BLOCK_Q)).to(tl.float32)


# Without what Triton knows of multiples of 16, a lane keeps its tokens from the first load to the last store.
@triton.jit(do_not_specialize=["s_codes", "s_head", "s_segment", "room"], do_not_specialize_on_alignment=["turn"])
def estimate_kernel(
    p_prepared, p_codes, p_scales, p_units, p_lengths, p_tokens, p_estimates, p_sums,
    s_length, s_codes, s_head, s_segment, room, turn,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr, ROWS: tl.constexpr,
    SEGMENT: tl.constexpr, LAST: tl.constexpr, BLOCK_T: tl.constexpr,
    G: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`codec.estimate_scores` of one split, and what is to be known of all of them; a (split, KV head, row).

    Programs take turns at `BLOCK_T` tokens, which lie in one segment, `BLOCK_H` query heads at once. The sketch has
    room for `s_head` tokens of a head in `s_codes` words, in `s_segment` segments; estimates of a query head are `room`
    floats apart from the next one's. A key has words of 4-, 2- and 1-bit values: `FOURS`, `TWOS` and `ONES`.

    `p_sums` `[query heads, 4, splits]` takes the log of the sum of exponentials of a split's estimates, their number,
    their mean, and the sum of their squares around it.
    """
    PLANES: tl.constexpr = 2 * FOURS + 4 * TWOS + 8 * ONES  # noqa: N806 - a compile-time constant
    ACROSS: tl.constexpr = min(BLOCK_T, LANES)  # noqa: N806 - a compile-time constant
    i_split, splits = tl.program_id(0), tl.num_programs(0)
    i_head, i_row = tl.program_id(1), tl.program_id(2)
    i_group = (i_row * tl.num_programs(1) + i_head).to(tl.int64)
    length = tl.load(p_lengths + i_row * s_length)
    if tl.load(p_tokens + i_group) <= 0:  # no estimate is asked for
        return
    segments = count_segments(length, SEGMENT, LAST)
    i_held = ((i_row // turn) * tl.num_programs(1) + i_head).to(tl.int64)
    p_codes += i_held * s_codes
    p_scales += i_held * s_head
    p_units += i_held * s_segment
    p_prepared += i_group * s_segment * (ROWS * BLOCK_Q)
    for first in range(0, G, BLOCK_H):
        o_head = first + tl.arange(0, BLOCK_H)
        m_head = o_head < G
        o_group = i_group * G + o_head
        # Lane by lane: the greatest estimate, below any score, and sums of exponentials, of distances from an estimate
        # among the first ones', and of their squares.
        b_max = tl.full([BLOCK_H, BLOCK_T], -1e30, tl.float32)
        b_sum = tl.zeros([BLOCK_H, BLOCK_T], tl.float32)
        b_off = tl.zeros([BLOCK_H, ACROSS], tl.float32)
        b_square = tl.zeros([BLOCK_H, ACROSS], tl.float32)
        b_origin = tl.zeros([BLOCK_H], tl.float32)
        seen = 0
        for start in range(i_split * BLOCK_T, length, splits * BLOCK_T):
            i_segment = tl.minimum(start // SEGMENT, segments - 1)
            o_tokens = start + tl.arange(0, BLOCK_T)
            m_tokens = o_tokens < length
            p_rows = p_prepared + i_segment * (ROWS * BLOCK_Q) + o_head
            b_products = multiply_codes(
                p_codes, p_rows[:, None], s_head, o_tokens, m_tokens, FOURS, TWOS, ONES, BLOCK_Q
            )  # fmt: skip
            p_rows += (PLANES + 1) * BLOCK_Q
            b_middle = tl.load(p_rows).to(tl.float32, bitcast=True)
            b_spread = tl.load(p_rows + BLOCK_Q).to(tl.float32, bitcast=True)[:, None]
            b_step = tl.load(p_rows + 2 * BLOCK_Q).to(tl.float32, bitcast=True)[:, None]
            b_widest = tl.load(p_rows + 3 * BLOCK_Q).to(tl.float32, bitcast=True)[:, None]
            b_scale = tl.load(p_scales + o_tokens, mask=m_tokens, other=0).to(tl.float32) * tl.load(p_units + i_segment)
            b_scale = b_scale[None, :]
            b_counted = tl.minimum(b_scale, b_widest)  # [BLOCK_H, BLOCK_T]
            b_scores = b_middle[:, None] + (b_scale * b_step) * b_products + (b_spread * b_counted) * b_counted
            o_block = o_group[:, None] * room + o_tokens[None, :]
            m_block = m_head[:, None] & m_tokens[None, :]
            tl.store(p_estimates + o_block, b_scores, mask=m_block)
            b_origin = tl.where(seen == 0, b_middle, b_origin)
            b_distance = tl.where(m_tokens[None, :], b_scores - b_origin[:, None], 0.0)
            b_distance = b_distance.reshape(BLOCK_H, BLOCK_T // ACROSS, ACROSS)  # [.., tokens of a lane, lanes]
            b_off += tl.sum(b_distance, axis=1)
            b_square += tl.sum(b_distance * b_distance, axis=1)
            b_scores = tl.where(m_tokens[None, :], b_scores, float("-inf"))
            b_ratio = tl.exp(-tl.abs(b_scores - b_max))  # of the lower to the higher one
            b_sum = tl.where(b_scores > b_max, b_sum * b_ratio + 1.0, b_sum + b_ratio)
            b_max = tl.maximum(b_max, b_scores)
            seen += tl.minimum(length - start, BLOCK_T).to(tl.int32)
        b_highest = tl.max(b_max, axis=1)
        b_all = tl.sum(b_sum * tl.exp(b_max - b_highest[:, None]), axis=1)
        count = tl.cast(seen, tl.float32)
        b_mean = tl.sum(b_off, axis=1) / tl.maximum(count, 1.0)
        b_scatter = tl.sum(b_square, axis=1) - b_mean * b_mean * count
        p_head = p_sums + o_group * 4 * splits + i_split  # [BLOCK_H]
        tl.store(p_head, b_highest + tl.log(tl.maximum(b_all, 1.0)), mask=m_head)
        tl.store(p_head + splits, tl.zeros([BLOCK_H], tl.float32) + count, mask=m_head)
        tl.store(p_head + 2 * splits, b_origin + b_mean, mask=m_head)
        tl.store(p_head + 3 * splits, tl.maximum(b_scatter, 0.0), mask=m_head)
