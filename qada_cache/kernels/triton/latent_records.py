"""Attention to latents that lie in records (`../../sketch/coded.py`), without values; names as in `kernels.py`.

Their channels are values too, so that they are decoded: a block of tokens of one segment at once, for all heads of a
program, in memory of the program's own, which stays in the cache. Records come there first, all of them together; and
there the sketch's channels find their places.
"""

import triton
import triton.language as tl

from .blocks import WORD_BITS, attend, dot, load_tokens
from .decoding import load_values, store_tokens
from .record_kernels import SCALES, copy_records
from .recording import unpack_keys

DECODED = tl.constexpr(2048)  # channels that a program decodes at once
SCORED = tl.constexpr(32)  # channels of queries and keys that are multiplied at once: whole queries take most registers
NONE = tl.constexpr(2**31 - 1)  # a number above any token's


def count_own_words(tokens: int, dim: int, itemsize: int, stride: int) -> int:
    """The 32-bit words of scratch of a program: the place of each channel, and for a block of tokens the sketch's
    estimates, latents, and records of `stride` bytes."""
    return dim + tokens * (dim + (dim * itemsize + stride) // 4)


@triton.jit
def store_places(p_places, p_order, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write the place of each channel in a segment's order."""
    o_dim = tl.arange(0, BLOCK_D)
    b_order = tl.load(p_order + o_dim, mask=o_dim < D, other=0).to(tl.int32)
    tl.store(p_places + b_order, o_dim, mask=o_dim < D)


@triton.jit
def find_tokens(p_index, o_places, m_places):
    """The tokens at these places of `p_index`, or of all; none where masked."""
    if p_index is None:
        return tl.where(m_places, o_places, NONE).to(tl.int64)
    else:  # noqa: RET505 - decided by the compiler
        return tl.load(p_index + o_places, mask=m_places, other=NONE).to(tl.int64)


@triton.jit
def decode_latents(
    p_keys, p_told, p_places, p_tokens, p_centre, p_record_weights, o_rows, m_tokens,
    KEY_BITS: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Decode tokens of one segment into rows `o_rows` of `p_keys`, as `coded.decode_keys`: from the records that
    `p_tokens` point to, and the sketch's estimates in `p_told`."""
    o_dim = tl.arange(0, BLOCK_D)
    m_dim = o_dim < D
    o_places = tl.load(p_places + o_dim, mask=m_dim, other=0)
    m_block = m_tokens[:, None] & m_dim[None, :]
    b_told = tl.load(p_told + o_rows[:, None] * D + o_places[None, :], mask=m_block, other=0.0)
    b_told += tl.load(p_centre + o_dim, mask=m_dim, other=0.0).to(tl.float32)[None, :]
    b_weights = tl.load(p_record_weights + o_dim, mask=m_dim, other=1.0)[None, :]
    p_planes = p_tokens if UNIT == WORD_BITS else p_tokens.to(tl.pointer_type(tl.uint8))
    b_scale = (tl.load(p_tokens, mask=m_tokens, other=0) << 16).to(tl.float32, bitcast=True)
    b_keys = load_values(p_planes, b_scale, m_tokens, SCALES, KEY_BITS, UNIT, D & -D, D, BLOCK_D)
    b_keys = b_told + tl.div_rn(b_keys, b_weights.broadcast_to(b_keys.shape))
    store_tokens(p_keys, b_keys, o_rows, m_tokens, D)


@triton.jit
def attend_latent_records(
    b_max, b_sum, b_out, p_query, o_query, m_query, p_own, p_records, p_open, p_index, p_codes, p_scales, p_units,
    p_centres, p_order, p_weights, p_record_weights, first, last, closed, segments, s_tokens, scaling,
    SEGMENT: tl.constexpr, KEY_BITS: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `attend`, of queries `o_query` over tokens `first` to `last` of a head, or over the ascending indices
    `p_index`: those of `closed` tokens in `p_records`, the next ones in `p_open`, `STRIDE` bytes apart. Words by which
    the sketch codes a bulk, of `segments`, are `s_tokens` apart. `p_own` is the program's own: `count_own_words`."""
    ROUND: tl.constexpr = max(1, min(BLOCK_N, DECODED // BLOCK_D))  # noqa: N806 - a compile-time constant
    TOLD: tl.constexpr = BLOCK_N * D  # noqa: N806 - a compile-time constant
    WORDS: tl.constexpr = TOLD * (p_query.dtype.element_ty.primitive_bitwidth // 8) // 4  # noqa: N806 - likewise
    p_told, p_keys = (p_own + D).to(tl.pointer_type(tl.float32)), p_own + D + TOLD
    p_copies = p_keys + WORDS
    p_keys = p_keys.to(tl.pointer_type(p_query.dtype.element_ty))
    o_block, known, start = tl.arange(0, BLOCK_N), -1, first
    while start < last:
        o_tokens = find_tokens(p_index, start + o_block, start + o_block < last)
        b_segments = tl.minimum(o_tokens // SEGMENT, segments - 1).to(tl.int32)
        i_segment = tl.min(b_segments, axis=0)
        m_block = (start + o_block < last) & (b_segments == i_segment)
        count = tl.sum(m_block.to(tl.int32), axis=0)
        at = i_segment * D
        if i_segment != known:
            store_places(p_own, p_order + at, D, BLOCK_D)
            known = i_segment
        m_closed = o_tokens < closed
        p_tokens = tl.where(m_closed, p_records, p_open) + tl.where(m_closed, o_tokens, o_tokens - closed) * STRIDE
        copy_records(p_copies, p_tokens, m_block, STRIDE, triton.next_power_of_2(STRIDE // 4))
        unit, o_dim = tl.load(p_units + i_segment), tl.arange(0, BLOCK_D)
        b_weights = tl.load(p_weights + at + o_dim, mask=o_dim < D, other=1.0).to(tl.float32)
        for place in tl.range(0, count, ROUND, num_stages=1):
            o_rows = place + tl.arange(0, ROUND)
            b_told = unpack_keys(
                p_codes, p_scales, unit, b_weights, find_tokens(p_index, start + o_rows, o_rows < count),
                o_rows < count, s_tokens, FOURS, TWOS, ONES, BLOCK_D,
            )  # fmt: skip
            m_told = (o_rows < count)[:, None] & (o_dim < D)[None, :]
            tl.store(p_told + o_rows[:, None] * D + o_dim[None, :], b_told, mask=m_told)
        tl.debug_barrier()  # threads read what others have written
        for place in tl.range(0, count, ROUND, num_stages=1):
            o_rows = place + tl.arange(0, ROUND)
            decode_latents(
                p_keys, p_told, p_own, p_copies + o_rows * (STRIDE // 4), p_centres + at, p_record_weights, o_rows,
                o_rows < count, KEY_BITS, UNIT, D, BLOCK_D,
            )  # fmt: skip
        tl.debug_barrier()  # likewise
        b_scores = tl.zeros([b_max.shape[0], BLOCK_N], tl.float32)
        for channel in tl.range(0, D, SCORED, num_stages=1):
            o_channel = channel + tl.arange(0, SCORED)
            m_part = m_query[:, None] & (o_channel < D)[None, :]
            b_query = tl.load(p_query + o_query[:, None] * D + o_channel[None, :], mask=m_part, other=0.0)
            b_keys = load_tokens(p_keys + channel, o_block, m_block, D, D - channel, SCORED)
            b_scores += dot(b_query, tl.trans(b_keys))
        b_values = load_tokens(p_keys, o_block, m_block, D, V, BLOCK_V)
        b_max, b_sum, b_out = attend(b_scores * scaling, m_block[None, :], b_values, b_max, b_sum, b_out)
        tl.debug_barrier()  # before others write there again
        start += count
    return b_max, b_sum, b_out
