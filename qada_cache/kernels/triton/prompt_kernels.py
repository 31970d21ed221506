"""The Triton kernels of a prompt that is read by selection; `selected_prompt.py` launches them and says what they do.

Names as in `kernels.py`. A program is one block of queries of one head; blocks are counted from the `first` of a
launch, and from the first query, which has `past` tokens before it; heads of all rows.
"""

import triton
import triton.language as tl

from .. import sampled_prompt as _prompt
from .blocks import dot

_SHARES, _BITS = tl.constexpr(_prompt.SHARES), tl.constexpr(9)  # the low bits of a chosen token hold its probability
_TILE, _FEW, _FIRST = tl.constexpr(_prompt.TILE), tl.constexpr(_prompt.FEW), tl.constexpr(_prompt.FIRST)
_PEAK, _LEAST_UNIT = tl.constexpr(_prompt.PEAK), tl.constexpr(_prompt.LEAST_UNIT)
_NEXT_BLOCK, _NEXT_HEAD = tl.constexpr(_prompt.NEXT_BLOCK), tl.constexpr(_prompt.NEXT_HEAD)


@triton.jit
def load_rows(p_rows, o_rows, m_rows, s_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [rows, BLOCK_D] of `D` channels, 0 where masked; no mask for channels that fill the block."""
    o_dim = tl.arange(0, BLOCK_D)
    p_block = p_rows + o_rows.to(tl.int64)[:, None] * s_row + o_dim[None, :]
    if D == BLOCK_D:
        return tl.load(p_block, mask=m_rows[:, None], other=0.0)
    return tl.load(p_block, mask=m_rows[:, None] & (o_dim < D)[None, :], other=0.0)


@triton.jit
def gather_rows(p_rows, o_rows, s_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """As `load_rows`, of rows that are all there."""
    o_dim = tl.arange(0, BLOCK_D)
    p_block = p_rows + o_rows.to(tl.int64)[:, None] * s_row + o_dim[None, :]
    if D == BLOCK_D:
        return tl.load(p_block)
    return tl.load(p_block, mask=(o_dim < D)[None, :], other=0.0)


@triton.jit
def add_scores(b_scores, b_max, b_sum):
    """Take scores [rows, tokens], powers of two, into running sums; `b_max` is finite."""
    b_new = tl.maximum(b_max, tl.max(b_scores, axis=1))
    return b_new, b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_scores - b_new[:, None]), axis=1)


@triton.jit(do_not_specialize=["first", "past", "tokens", "columns", "sinks", "stride"])
def share_kernel(
    p_query, p_codes, p_steps, p_shares,
    s_query_row, s_query_head, s_query_token, heads, first, past, tokens, columns, sinks, stride, scaling, threshold,
    floor,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The probabilities, in `SHARES`, less one, by which a block of queries is to read each token before it: uint8
    `[heads, blocks, columns]`."""
    i_block, i_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin = past + (first + i_block) * BLOCK_M  # of the block, and the end of the tokens to choose from
    o_queries, o_keys = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    p_query += i_head // heads * s_query_row + i_head % heads * s_query_head - past.to(tl.int64) * s_query_token
    p_codes += i_head // G * tokens * D
    p_shares += (i_head * tl.num_programs(0) + i_block) * columns
    b_query = load_rows(p_query, o_queries, o_queries < tokens, s_query_token, D, BLOCK_D).to(tl.float32)
    step = tl.load(p_steps + i_head // G) * scaling
    unit = tl.maximum(tl.max(tl.abs(b_query)) * step / _PEAK, _LEAST_UNIT)  # of products, in powers of two
    b_query = (b_query * (step / unit)).to(p_codes.dtype.element_ty)

    # What the queries see: their own block and the first tokens, and of the others one of every `stride`.
    b_max, b_sum = tl.full([BLOCK_M], -1e30, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, begin + BLOCK_M, BLOCK_N):
        b_codes = load_rows(p_codes, start + o_keys, start + o_keys < tokens, D, D, BLOCK_D)
        b_scores = dot(b_query, tl.trans(b_codes)) * unit
        m_scores = (start + o_keys)[None, :] <= o_queries[:, None]
        b_max, b_sum = add_scores(tl.where(m_scores, b_scores, float("-inf")), b_max, b_sum)
    m_keys = o_keys < tl.minimum(begin, _FIRST)
    b_scores = dot(b_query, tl.trans(load_rows(p_codes, o_keys, m_keys, D, D, BLOCK_D))) * unit
    b_max, b_sum = add_scores(tl.where(m_keys[None, :], b_scores, float("-inf")), b_max, b_sum)
    lift = tl.log2(stride.to(tl.float32))
    for start in range(_FIRST, begin, BLOCK_N * stride):
        o_sample = start + o_keys * stride + stride // 2
        m_keys = o_sample < begin
        b_scores = dot(b_query, tl.trans(load_rows(p_codes, o_sample, m_keys, D, D, BLOCK_D))) * unit
        b_scores = tl.where(m_keys[None, :], b_scores + lift, float("-inf"))
        b_max, b_sum = add_scores(b_scores, b_max, b_sum)
    # The largest share that a query gives a token, in units of `threshold` even shares.
    b_bar = tl.where(o_queries < tokens, (b_max + tl.log2(b_sum)) / unit, float("inf"))
    wanted = tl.maximum(begin, _FEW).to(tl.float32) * _SHARES / threshold
    # Sums of products of 8 bits are float16: two are compared at once.
    sums: tl.constexpr = tl.float16 if p_codes.dtype.element_ty.primitive_bitwidth == 8 else tl.float32
    b_transposed, b_bar = tl.trans(b_query), b_bar.to(sums)
    for start in range(0, begin, BLOCK_N):  # without masks: rows of shares have room for whole tiles
        o_tokens = start + o_keys
        b_codes = gather_rows(p_codes, tl.minimum(o_tokens, tokens - 1), D, D, BLOCK_D)
        b_best = tl.max(dot(b_codes, b_transposed, sums) - b_bar[None, :], axis=1).to(tl.float32) * unit
        b_share = tl.minimum(tl.maximum(tl.exp2(tl.minimum(b_best, 10.0)) * wanted, floor), 1.0 * _SHARES)
        b_share = tl.where(o_tokens < sinks, 1.0 * _SHARES, b_share)
        tl.store(p_shares + o_tokens, (tl.ceil(b_share) - 1.0).to(tl.uint8))


@triton.jit(do_not_specialize=["first", "past", "columns", "capacity"])
def sample_kernel(
    p_shares, p_chosen, p_counts, first, past, columns, capacity, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Takes tokens where the sum of their probabilities passes a whole number, so that it says where they are written:
    to `p_chosen` int32 `[heads, blocks, capacity]`, each with its probability, and zeros behind the last in its tile.
    `p_counts` `[heads, blocks]` may be above `capacity`: then not all were written."""
    i_block, i_head = tl.program_id(0), tl.program_id(1)
    i_list = i_head.to(tl.int64) * tl.num_programs(0) + i_block
    begin = past + (first + i_block) * BLOCK_M
    passed = (begin // BLOCK_M * _NEXT_BLOCK + i_head * _NEXT_HEAD) % _SHARES
    p_shares += i_list * columns
    p_chosen += i_list * capacity
    for start in range(0, begin, BLOCK_N):
        o_tokens = start + tl.arange(0, BLOCK_N)
        m_tokens = o_tokens < begin
        b_share = tl.where(m_tokens, tl.load(p_shares + o_tokens, mask=m_tokens, other=0).to(tl.int32) + 1, 0)
        b_passed = passed + tl.cumsum(b_share, axis=0)
        o_list = b_passed // _SHARES
        m_taken = (o_list > (b_passed - b_share) // _SHARES) & (o_list <= capacity)
        tl.store(p_chosen + o_list - 1, (o_tokens << _BITS) | b_share, mask=m_taken)
        passed += tl.sum(b_share, axis=0)
    o_rest = passed // _SHARES + tl.arange(0, _TILE)
    tl.store(p_chosen + o_rest, tl.zeros([_TILE], tl.int32), mask=o_rest < capacity)
    tl.store(p_counts + i_list, passed // _SHARES)


@triton.jit(do_not_specialize=["first", "past", "tokens", "capacity"])
def read_kernel(
    p_query, p_keys, p_values, p_chosen, p_counts, p_out,
    s_query_row, s_query_head, s_query_token, s_key_row, s_key_head, s_key_token,
    s_value_row, s_value_head, s_value_token, s_out_row, s_out_head, s_out_token,
    heads, first, past, tokens, capacity, scaling,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries over itself, causally, and over the tokens chosen, each as if there were as many
    of it as its probability says; over all tokens if more were chosen than written."""
    i_block, i_all = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_list = i_all * tl.num_programs(0) + i_block
    i_row, i_head = i_all // heads, i_all % heads
    begin = past + (first + i_block) * BLOCK_M
    o_queries, o_keys = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    p_keys += i_row * s_key_row + i_head // G * s_key_head
    p_values += i_row * s_value_row + i_head // G * s_value_head
    p_query += i_row * s_query_row + i_head * s_query_head - past.to(tl.int64) * s_query_token
    b_query = load_rows(p_query, o_queries, o_queries < tokens, s_query_token, D, BLOCK_D)
    b_max, b_sum = tl.full([BLOCK_M], -1e30, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    b_out = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(begin, begin + BLOCK_M, BLOCK_N):
        o_tokens = start + o_keys
        m_keys = o_tokens < tokens
        b_keys = load_rows(p_keys, o_tokens, m_keys, s_key_token, D, BLOCK_D)
        b_values = load_rows(p_values, o_tokens, m_keys, s_value_token, V, BLOCK_V)
        b_scores = dot(b_query, tl.trans(b_keys)) * scaling
        b_scores = tl.where(o_tokens[None, :] <= o_queries[:, None], b_scores, float("-inf"))
        b_max, b_sum, b_out = attend_finite(b_scores, 1.0, b_values, b_max, b_sum, b_out)
    count = tl.load(p_counts + i_list)
    all_tokens = count > capacity
    count = tl.where(all_tokens, begin, count)
    p_chosen += i_list * capacity
    for start in range(0, count, BLOCK_N):  # without masks, which would be half of its instructions
        o_list = start + o_keys
        b_all = tl.where(o_list < count, (o_list << _BITS) | _SHARES, 0)
        b_chosen = tl.where(all_tokens, b_all, tl.load(p_chosen + tl.minimum(o_list, capacity - 1)))
        b_share = b_chosen & (2 * _SHARES - 1)
        b_root = tl.rsqrt(tl.maximum(b_share, 1).to(tl.float32))  # one instruction, where a quotient takes thirteen
        b_times = tl.where(b_share > 0, b_root * b_root * _SHARES, 0.0)
        b_keys = gather_rows(p_keys, b_chosen >> _BITS, s_key_token, D, BLOCK_D)
        b_values = gather_rows(p_values, b_chosen >> _BITS, s_value_token, V, BLOCK_V)
        b_scores = dot(b_query, tl.trans(b_keys)) * scaling
        b_max, b_sum, b_out = attend_finite(b_scores, b_times[None, :], b_values, b_max, b_sum, b_out)
    o_dim = tl.arange(0, BLOCK_V)
    p_out += i_row * s_out_row + i_head * s_out_head - past.to(tl.int64) * s_out_token
    p_block = p_out + o_queries.to(tl.int64)[:, None] * s_out_token + o_dim
    m_out = (o_queries < tokens)[:, None] & (o_dim < V)[None, :]
    tl.store(p_block, (b_out / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def attend_finite(b_scores, b_times, b_values, b_max, b_sum, b_out):
    """As `blocks.attend`, of scores that are powers of two, with a finite `b_max`; a token counts so many times."""
    b_new = tl.maximum(b_max, tl.max(b_scores, axis=1))
    b_weights = tl.exp2(b_scores - b_new[:, None]) * b_times
    b_decay = tl.exp2(b_max - b_new)
    b_sum = b_sum * b_decay + tl.sum(b_weights, axis=1)
    return b_new, b_sum, b_out * b_decay[:, None] + dot(b_weights.to(b_values.dtype), b_values)
