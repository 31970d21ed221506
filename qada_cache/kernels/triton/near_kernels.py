"""Functions of `local_kernel` for the near buffer, block by block; names as in `kernels.py`.

A block has two parts of a group: of local tokens, and of pending ones, which only flagged heads read. `p_near` [query
heads, 2, blocks, V] holds their averages, `p_near_lse` the logs of their sums of exponentials.
"""

import triton
import triton.language as tl

from .blocks import attend, load_own_query, score_tokens, store_part


@triton.jit
def attend_block(
    p_query, p_keys, p_values, p_local, p_pending, p_near, p_near_lse, s_key_token, s_value_token, i_group, i_block,
    blocks, columns, scaling,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a block's two parts."""
    o_tokens = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_tokens = o_tokens < columns
    m_local = tl.load(p_local + o_tokens, mask=m_tokens, other=0)
    m_pending = tl.load(p_pending + o_tokens, mask=m_tokens, other=0)
    b_query, b_rest = load_own_query(p_query, p_values, i_group, G, BLOCK_G, D, BLOCK_D, V, BLOCK_V)
    # Keys of no token are read as well: to wait for the masks would take longer.
    b_scores, b_values = score_tokens(
        b_query, b_rest, p_keys, p_values, o_tokens, m_tokens, s_key_token, s_value_token, D, V, BLOCK_V
    )  # fmt: skip
    b_scores *= scaling
    for late in tl.static_range(2):
        m_part = m_pending if late else m_local
        b_own = tl.where(m_part[:, None], b_values, 0.0)  # what was never written may be nan
        b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_G], tl.float32)
        b_out = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
        b_max, b_sum, b_out = attend(b_scores, m_part[None, :], b_own, b_max, b_sum, b_out)
        store_part(b_max, b_sum, b_out, p_near, p_near_lse, i_group, late * blocks + i_block, 2 * blocks, G, V)


@triton.jit
def count_pending(p_pending, columns, BLOCK_C: tl.constexpr):
    """The number of pending columns of a row."""
    pending = 0
    for start in range(0, columns, BLOCK_C):
        o_column = start + tl.arange(0, BLOCK_C)
        pending += tl.sum(tl.load(p_pending + o_column, mask=o_column < columns, other=0).to(tl.int32), axis=0)
    return pending


@triton.jit
def merge_near(
    p_near, p_near_lse, p_parts, p_lse, p_out, i_group, blocks, parts, b_flags, b_local, b_late, b_sinks,
    G: tl.constexpr, BLOCK_Q: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr, MERGE_STAGES: tl.constexpr,
):  # fmt: skip
    """Write a group's part 0, and its output if there is no other: local tokens, and pending ones of heads with
    `b_flags`. `b_local` and `b_late` [BLOCK_Q, blocks] are what `p_near_lse` says; `b_sinks` [BLOCK_Q] are scores of
    one more token, whose value is zero, or None."""
    AT_ONCE: tl.constexpr = max(1, PARTS // (BLOCK_Q * BLOCK_V))  # noqa: N806 - a compile-time constant
    o_head, o_value = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_V)
    m_head, m_value = o_head < G, o_value < V
    b_late = tl.where(b_flags[:, None], b_late, float("-inf"))
    b_highest = tl.maximum(tl.max(b_local, axis=1), tl.max(b_late, axis=1))
    if b_sinks is not None:
        b_highest = tl.maximum(b_highest, b_sinks)
    b_shift = tl.where(b_highest == float("-inf"), 0.0, b_highest)
    b_sum = tl.sum(tl.exp(b_local - b_shift[:, None]) + tl.exp(b_late - b_shift[:, None]), axis=1)
    if b_sinks is not None:
        b_sum += tl.exp(b_sinks - b_shift)
    o_group = i_group * G + o_head
    b_out = tl.zeros([BLOCK_Q, AT_ONCE, BLOCK_V], tl.float32)
    for start in tl.range(0, 2 * blocks, AT_ONCE, num_stages=MERGE_STAGES):
        o_part = start + tl.arange(0, AT_ONCE)
        m_part = m_head[:, None] & ((o_part < blocks)[None, :] | (b_flags[:, None] & (o_part < 2 * blocks)[None, :]))
        o_part = (o_group * 2 * blocks)[:, None] + o_part[None, :]
        b_own = tl.load(p_near_lse + o_part, mask=m_part, other=float("-inf"))
        p_block = p_near + o_part[:, :, None] * V + o_value[None, None, :]
        b_part = tl.load(p_block, mask=m_part[:, :, None] & m_value[None, None, :], other=0.0)
        b_out += b_part * tl.exp(b_own - b_shift[:, None])[:, :, None]
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # 0 of no token: a padding query's
    b_average = tl.sum(b_out, axis=1) / b_sum[:, None]
    m_out = m_head[:, None] & m_value[None, :]
    tl.store(p_parts + (o_group * parts)[:, None] * V + o_value[None, :], b_average, mask=m_out)
    tl.store(p_lse + o_group * parts, b_highest + tl.log(b_sum), mask=m_head)
    tl.store(p_out + o_group[:, None] * V + o_value[None, :], b_average, mask=m_out)
