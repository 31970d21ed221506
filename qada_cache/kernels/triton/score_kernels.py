"""Triton's kernels for scores of selected tokens, from a sketch's codes and queries of 16 bits; names as in
`kernels.py`.

A lane has a token and a query head, and nothing has another dimension: threads would hand each other every word.
"""

import triton
import triton.language as tl

from .blocks import FINER, dot_bytes
from .estimate_kernels import NUMBERS, UNROLLED

SCORED = tl.constexpr(256)  # scores of tokens whose records are read, at once


@triton.jit
def add_word_twice(
    b_high, b_low, p_codes, p_high, p_low, room, o_tokens, m_tokens, word, BITS: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Add the products of the codes of one word, as `add_products_twice`."""
    MASK: tl.constexpr = 0x01010101 * (2**BITS - 1)  # noqa: N806 - a compile-time constant
    b_codes = tl.load(p_codes + word * room + o_tokens, mask=m_tokens, other=0)
    for plane in tl.static_range(8 // BITS):
        row = (word * (8 // BITS) + plane) * BLOCK_Q
        b_bytes = (b_codes >> plane * BITS) & MASK
        b_high = dot_bytes(b_high, b_bytes, tl.load(p_high + row))
        b_low = dot_bytes(b_low, b_bytes, tl.load(p_low + row))
    return b_high, b_low


@triton.jit
def add_products_twice(
    b_high, b_low, p_codes, p_high, p_low, room, o_tokens, m_tokens, WORDS: tl.constexpr, BITS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """As `estimate_kernels.add_products`, lane by lane, for the high and the low term of each rounded query."""
    if WORDS > UNROLLED:
        for word in range(WORDS):
            b_high, b_low = add_word_twice(
                b_high, b_low, p_codes, p_high, p_low, room, o_tokens, m_tokens, word, BITS, BLOCK_Q
            )  # fmt: skip
    else:
        for word in tl.static_range(WORDS):
            b_high, b_low = add_word_twice(
                b_high, b_low, p_codes, p_high, p_low, room, o_tokens, m_tokens, word, BITS, BLOCK_Q
            )  # fmt: skip
    return b_high, b_low


@triton.jit
def score_selected(
    p_prepared, p_codes, p_scales, p_units, p_index, p_scores, i_group, i_held, s_codes, s_head, s_segment, room,
    segments, count,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr, ROWS: tl.constexpr, SEGMENT: tl.constexpr,
    G: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Write what codes say of the scores of `count` tokens `p_index` of `segments`, over their estimates: by queries of
    two terms, and without what errors are expected to add. A lane has a token and a query head."""
    WIDTH: tl.constexpr = max(SCORED, BLOCK_Q)  # noqa: N806 - a compile-time constant
    TOKENS: tl.constexpr = WIDTH // BLOCK_Q  # noqa: N806 - a compile-time constant
    PLANES: tl.constexpr = 2 * FOURS + 4 * TWOS + 8 * ONES  # noqa: N806 - a compile-time constant
    p_codes += i_held * s_codes
    p_scales += i_held * s_head
    p_units += i_held * s_segment
    p_prepared += i_group * s_segment * (ROWS * BLOCK_Q)
    p_scores += i_group * G * room
    p_twos = p_codes + FOURS * s_head
    p_ones = p_twos + TWOS * s_head
    o_lane = tl.arange(0, WIDTH)
    o_head = o_lane % BLOCK_Q
    for start in range(0, count, TOKENS):
        o_place = start + o_lane // BLOCK_Q
        m_lane = (o_place < count) & (o_head < G)
        o_tokens = tl.load(p_index + o_place, mask=m_lane, other=0)
        o_segment = tl.minimum(o_tokens // SEGMENT, segments - 1)
        p_high = p_prepared + o_segment * (ROWS * BLOCK_Q) + o_head
        p_numbers = p_high + (PLANES + 1) * BLOCK_Q
        p_low = p_numbers + NUMBERS * BLOCK_Q
        b_scale = tl.load(p_scales + o_tokens, mask=m_lane, other=0).to(tl.float32) * tl.load(p_units + o_segment)
        b_middle = tl.load(p_numbers).to(tl.float32, bitcast=True)
        b_step = tl.load(p_numbers + 2 * BLOCK_Q).to(tl.float32, bitcast=True)
        b_most, b_least = tl.load(p_high + PLANES * BLOCK_Q), tl.load(p_low + PLANES * BLOCK_Q)
        b_high, b_low = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32)
        b_high, b_low = add_products_twice(
            b_high, b_low, p_codes, p_high, p_low, s_head, o_tokens, m_lane, FOURS, 4, BLOCK_Q
        )  # fmt: skip
        p_high, p_low = p_high + 2 * FOURS * BLOCK_Q, p_low + 2 * FOURS * BLOCK_Q
        b_high, b_low = add_products_twice(
            b_high, b_low, p_twos, p_high, p_low, s_head, o_tokens, m_lane, TWOS, 2, BLOCK_Q
        )  # fmt: skip
        p_high, p_low = p_high + 4 * TWOS * BLOCK_Q, p_low + 4 * TWOS * BLOCK_Q
        b_high, b_low = add_products_twice(
            b_high, b_low, p_ones, p_high, p_low, s_head, o_tokens, m_lane, ONES, 1, BLOCK_Q
        )  # fmt: skip
        b_products = (2 * b_high - b_most).to(tl.float32) + (2 * b_low - b_least).to(tl.float32) * (1.0 / FINER)
        b_scores = b_middle + b_scale * (b_step * b_products)
        tl.store(p_scores + o_head * room + o_tokens, b_scores, mask=m_lane)
