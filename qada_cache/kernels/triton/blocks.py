"""Functions of the decode kernels for a block of tokens, and for the segments of a sketch; names as in `kernels.py`.

`../../sketch` says what is computed of a sketch.
"""

import triton
import triton.language as tl

from ... import sketch as _sketch
from ...sketch import codec, selection

# The interpreter multiplies the bit patterns of bfloat16 matrices, where float32 gives it the products a GPU computes,
# and runs no assembly.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# What the definition in Python says of a sketch.
BLOCK, QUERY_LEVELS = tl.constexpr(_sketch.BLOCK), tl.constexpr(float(codec.QUERY_LEVELS))
FINER = tl.constexpr(2.0 * codec.QUERY_LEVELS)  # a rounded query's step over that of what rounding leaves
MIN_PEAK, WORD_BITS = tl.constexpr(codec.MIN_PEAK), tl.constexpr(_sketch.WORD_BITS)
HOPELESS, FLAT = tl.constexpr(selection.HOPELESS), tl.constexpr(selection.FLAT)
MOST_HALF, MOST_RISE = tl.constexpr(codec.MOST_HALF), tl.constexpr(codec.MOST_RISE)


@triton.jit
def dot(b_a, b_b, SUMS: tl.constexpr = tl.float32):
    """Matrix product, in `SUMS`; float32 factors are not rounded to TF32."""
    if _INTERPRETED:
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), input_precision="ieee").to(SUMS)
    return tl.dot(b_a, b_b, out_dtype=SUMS, input_precision="ieee")


@triton.jit
def load_tokens(p_tokens, o_tokens, m_tokens, s_token, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys or values [tokens, BLOCK_D] of a head; 0 for masked tokens, which are not read."""
    o_dim = tl.arange(0, BLOCK_D)
    p_block = p_tokens + o_tokens[:, None] * s_token + o_dim[None, :]
    return tl.load(p_block, mask=m_tokens[:, None] & (o_dim < D)[None, :], other=0.0)


@triton.jit
def weigh(b_scores, m_scores, b_max, b_sum):
    """Take the scores [BLOCK_G, tokens] where `m_scores` into a running softmax, `b_max` and `b_sum` [BLOCK_G]: these,
    what earlier sums are worth by now [BLOCK_G], and weights [BLOCK_G, tokens]."""
    b_scores = tl.where(m_scores, b_scores, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_scores, axis=1))
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)  # nothing seen yet: -inf - -inf would be nan
    b_weights = tl.exp(b_scores - b_shift[:, None])
    b_decay = tl.exp(b_max - b_shift)
    return b_new, b_sum * b_decay + tl.sum(b_weights, axis=1), b_decay, b_weights


@triton.jit
def attend(b_scores, m_scores, b_values, b_max, b_sum, b_out):
    """As `weigh`, with values [tokens, BLOCK_V] and their average `b_out` [BLOCK_G, BLOCK_V], unnormalised."""
    b_max, b_sum, b_decay, b_weights = weigh(b_scores, m_scores, b_max, b_sum)
    return b_max, b_sum, b_out * b_decay[:, None] + dot(b_weights.to(b_values.dtype), b_values)


@triton.jit
def log_sum(b_lse):
    """The log of the sum of exponentials of parts [heads, parts], -inf of none [heads]."""
    b_highest = tl.max(b_lse, axis=1)
    b_shift = tl.where(b_highest == float("-inf"), 0.0, b_highest)
    b_sum = tl.sum(tl.exp(b_lse - b_shift[:, None]), axis=1)
    return b_highest + tl.log(tl.where(b_sum == 0.0, 1.0, b_sum))


@triton.jit
def store_part(b_max, b_sum, b_out, p_parts, p_lse, i_group, i_part, parts, G: tl.constexpr, V: tl.constexpr):
    """Write a group's part: the softmax average, and the log of the sum of exponentials, -inf for an empty part."""
    o_head, o_dim = tl.arange(0, b_out.shape[0]), tl.arange(0, b_out.shape[1])
    m_head = o_head < G
    o_part = (i_group * G + o_head) * parts + i_part  # [BLOCK_G]
    b_sum = tl.maximum(b_sum, 1.0)  # the highest score seen has weight 1
    m_out = m_head[:, None] & (o_dim < V)[None, :]
    tl.store(p_parts + o_part[:, None] * V + o_dim[None, :], b_out / b_sum[:, None], mask=m_out)
    tl.store(p_lse + o_part, b_max + tl.log(b_sum), mask=m_head)


@triton.jit
def load_query(p_query, i_group, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A group's queries [BLOCK_G, BLOCK_D]. Kernels ask for all that they are sure to need before they look at any."""
    o_head, o_dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_query = (o_head < G)[:, None] & (o_dim < D)[None, :]
    return tl.load(p_query + (i_group * G + o_head)[:, None] * D + o_dim[None, :], mask=m_query, other=0.0)


@triton.jit
def load_own_query(
    p_query, p_values, i_group, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A group's queries as `score_tokens` takes them: as `load_query`, twice, as Triton 3.6 returns no None; or, where
    there are no `p_values`, the channels that meet values, and those behind them."""
    if p_values is None:
        REST: tl.constexpr = max(16, triton.next_power_of_2(D - V))  # noqa: N806 - a compile-time constant
        o_head, o_value, o_rest = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_V), tl.arange(0, REST)
        m_head, p_own = (o_head < G)[:, None], p_query + (i_group * G + o_head)[:, None] * D
        b_query = tl.load(p_own + o_value[None, :], mask=m_head & (o_value < V)[None, :], other=0.0)
        b_rest = tl.load(p_own + V + o_rest[None, :], mask=m_head & (o_rest < D - V)[None, :], other=0.0)
        return b_query, b_rest
    else:  # noqa: RET505 - decided by the compiler
        b_query = load_query(p_query, i_group, G, BLOCK_G, D, BLOCK_D)
        return b_query, b_query


@triton.jit
def score_tokens(
    b_query, b_rest, p_keys, p_values, o_tokens, m_tokens, s_key_token, s_value_token,
    D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Products [BLOCK_G, tokens] of queries with keys, and values [tokens, BLOCK_V]. Without `p_values` these are the
    first channels of keys, each read once."""
    if p_values is None:
        b_values = load_tokens(p_keys, o_tokens, m_tokens, s_key_token, V, BLOCK_V)
        b_keys = load_tokens(p_keys + V, o_tokens, m_tokens, s_key_token, D - V, b_rest.shape[1])
        b_scores = dot(b_query, tl.trans(b_values)) + dot(b_rest, tl.trans(b_keys))
    else:
        b_keys = load_tokens(p_keys, o_tokens, m_tokens, s_key_token, D, b_query.shape[1])
        b_values = load_tokens(p_values, o_tokens, m_tokens, s_value_token, V, BLOCK_V)
        b_scores = dot(b_query, tl.trans(b_keys))
    return b_scores, b_values


@triton.jit
def attend_tokens(
    b_query, b_rest, p_keys, p_values, p_index, s_key_token, s_value_token, first, last, scaling,
    BLOCK_G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `attend`, of a group over tokens `first` to `last` of its head, or of the indices `p_index`."""
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_out = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for start in range(first, last, BLOCK_N):
        o_tokens = start + tl.arange(0, BLOCK_N)
        m_tokens = o_tokens < last
        if p_index is not None:
            o_tokens = tl.load(p_index + o_tokens, mask=m_tokens, other=0).to(tl.int64)
        b_scores, b_values = score_tokens(
            b_query, b_rest, p_keys, p_values, o_tokens, m_tokens, s_key_token, s_value_token, D, V, BLOCK_V
        )  # fmt: skip
        b_max, b_sum, b_out = attend(b_scores * scaling, m_tokens[None, :], b_values, b_max, b_sum, b_out)
    return b_max, b_sum, b_out


@triton.jit
def find_unreliable(b_query, p_noise, p_variances, noise_limit, noise_share, D: tl.constexpr):
    """`selection.find_unreliable` [BLOCK_G] of queries [BLOCK_G, BLOCK_D]; `noise_limit` bounds `sum q_i^2 noise_i`."""
    o_dim = tl.arange(0, b_query.shape[1])
    b_square = b_query.to(tl.float32) * b_query.to(tl.float32)
    b_noise = tl.sum(b_square * tl.load(p_noise + o_dim, mask=o_dim < D, other=0.0)[None, :], axis=1)
    b_variance = tl.sum(b_square * tl.load(p_variances + o_dim, mask=o_dim < D, other=0.0)[None, :], axis=1)
    b_hopeful = b_noise <= HOPELESS * noise_limit
    b_reliable = (b_noise <= noise_limit) | ((b_noise <= noise_share * b_variance) & b_hopeful)
    return b_reliable == 0  # what is not a number is unreliable


@triton.jit
def rotate(b_values, SIZE: tl.constexpr):
    """`sketch.rotate` of [rows, channels], in blocks of `SIZE`.

    A step takes sums and differences of neighbours and puts the differences behind the sums, which turns the bits of
    an index around by one; after all steps of a block they are where they were.
    """
    ROWS: tl.constexpr = b_values.shape[0]  # noqa: N806 - a compile-time constant
    CHANNELS: tl.constexpr = b_values.shape[1]  # noqa: N806 - a compile-time constant
    b_rotated = b_values
    for step in tl.static_range(12):
        if 2**step < SIZE:
            b_one, b_other = tl.split(b_rotated.reshape(ROWS * CHANNELS // SIZE, SIZE // 2, 2))
            b_rotated = tl.permute(tl.join(b_one + b_other, b_one - b_other), (0, 2, 1)).reshape(ROWS, CHANNELS)
    return b_rotated * (SIZE**-0.5)


@triton.jit
def to_nearest(b_values):
    """The nearest integers, as float32, of numbers below 2^22 in size."""
    return (b_values + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def round_queries(b_rotated, TWICE: tl.constexpr):
    """Rotated queries rounded to 8-bit integers and, if `TWICE`, their remainders rounded `FINER` times as finely:
    int32 [BLOCK_G, BLOCK_D], for `take_high` and `take_low`; and their units [BLOCK_G]."""
    b_unit = tl.div_rn(tl.maximum(tl.max(tl.abs(b_rotated), axis=1), MIN_PEAK), QUERY_LEVELS)
    b_scaled = b_rotated * (1.0 / b_unit)[:, None]
    b_high = to_nearest(b_scaled)
    b_both = b_high.to(tl.int32)
    if TWICE:
        b_both = (b_both & 255) | (to_nearest((b_scaled - b_high) * FINER).to(tl.int32) << 8)
    return b_both, b_unit


@triton.jit
def take_high(b_both):
    """The rounded queries of `round_queries`, int8."""
    return b_both.to(tl.int8)


@triton.jit
def take_low(b_both):
    """The rounded remainders of `round_queries`, int8."""
    return (b_both >> 8).to(tl.int8)


@triton.jit
def dot_bytes(b_sum, b_bytes, b_integers):
    """`b_sum` plus the product of four unsigned bytes of a word with four signed ones of another; all are int32."""
    if _INTERPRETED:
        for byte in tl.static_range(4):
            b_sum += ((b_bytes >> 8 * byte) & 255) * ((b_integers << (24 - 8 * byte)) >> 24)
        return b_sum
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [b_bytes, b_integers, b_sum], dtype=tl.int32, is_pure=True, pack=1
    )
