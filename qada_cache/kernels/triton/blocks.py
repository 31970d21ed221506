"""Operations of all decode kernels on a block of tokens; names as in `kernels.py`."""

import triton
import triton.language as tl

# The interpreter multiplies the bit patterns of bfloat16 matrices; float32 gives it the products a GPU computes.
_WIDEN = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(b_a, b_b):
    """Matrix product in float32; float32 factors are not rounded to TF32."""
    if _WIDEN:
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    return tl.dot(b_a, b_b, input_precision="ieee")


@triton.jit
def scores(b_query, p_keys, o_tokens, m_tokens, s_token, scaling, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Scores [BLOCK_G, tokens] of queries [BLOCK_G, BLOCK_D]; 0 for masked tokens, whose keys are not read."""
    o_dim = tl.arange(0, BLOCK_D)
    p_block = p_keys + o_tokens[:, None] * s_token + o_dim[None, :]
    b_keys = tl.load(p_block, mask=m_tokens[:, None] & (o_dim < D)[None, :], other=0.0)  # [tokens, BLOCK_D]
    return dot(b_query, tl.trans(b_keys)) * scaling


@triton.jit
def attend(
    b_scores, m_scores, b_max, b_sum, b_out, p_values, o_tokens, m_tokens, s_token,
    V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Take the scores [BLOCK_G, tokens] where `m_scores` into a running softmax average.

    `b_max`, `b_sum` [BLOCK_G], `b_out` [BLOCK_G, BLOCK_V] unnormalised. Values of masked tokens are not read.
    """
    o_dim = tl.arange(0, BLOCK_V)
    p_block = p_values + o_tokens[:, None] * s_token + o_dim[None, :]
    b_values = tl.load(p_block, mask=m_tokens[:, None] & (o_dim < V)[None, :], other=0.0)  # [tokens, BLOCK_V]
    b_scores = tl.where(m_scores, b_scores, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_scores, axis=1))
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)  # nothing seen yet: -inf - -inf would be nan
    b_weights = tl.exp(b_scores - b_shift[:, None])
    b_decay = tl.exp(b_max - b_shift)
    b_out = b_out * b_decay[:, None] + dot(b_weights.to(b_values.dtype), b_values)
    return b_new, b_sum * b_decay + tl.sum(b_weights, axis=1), b_out


@triton.jit
def store_part(
    b_max, b_sum, b_out, p_parts, p_lse, i_group, i_part, parts,
    G: tl.constexpr, BLOCK_G: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write a group's part: the softmax average, and the log of the sum of exponentials, -inf for an empty part."""
    o_head, o_dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_V)
    m_head = o_head < G
    o_part = (i_group * G + o_head) * parts + i_part  # [BLOCK_G]
    b_sum = tl.maximum(b_sum, 1.0)  # the highest score seen has weight 1
    m_out = m_head[:, None] & (o_dim < V)[None, :]
    tl.store(p_parts + o_part[:, None] * V + o_dim[None, :], b_out / b_sum[:, None], mask=m_out)
    tl.store(p_lse + o_part, b_max + tl.log(b_sum), mask=m_head)


@triton.jit
def resolve_pointer(p_own, p_place):
    """`p_own`, or the address at `p_place` if it is not 0: a resident's."""
    place = tl.load(p_place)
    if place != 0:
        p_own = tl.multiple_of(place.to(p_own.dtype), 16)  # as every allocation
    return p_own
