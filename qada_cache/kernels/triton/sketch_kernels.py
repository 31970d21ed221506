"""The Triton kernels by which a group reads selected tokens of its bulk.

`../../sketch` says which these are, `kernels.py` the names.

Programs take turns at a bulk's blocks, because selected tokens lie close together: `i_split` has every
`splits`-th. Where `local_kernel` has left 0 for the number of tokens, all are read, and of the sketch nothing.

With `p_turned`, closed segments lie in records (`record_kernels.py`), whose keys follow from the sketch.
"""

import triton
import triton.language as tl

from .blocks import (
    BLOCK,
    FINER,
    WORD_BITS,
    attend_split,
    attend_tokens,
    load_codes,
    multiply_codes,
    resolve_pointer,
    rotate,
    round_queries,
    store_part,
    take_channels,
    take_high,
    take_low,
)
from .record_kernels import attend_records, count_closed, count_segments, store_turned


@triton.jit(do_not_specialize=["s_segment"])  # it grows with the bulk
def estimate_kernel(
    p_query, p_errors, p_codes, p_scales, p_units, p_centres, p_order, p_weights, p_record_weights, p_lengths, p_tokens,
    p_flags, p_estimates, p_exact, p_turned, p_sums, p_sketch_read_bytes, s_length, s_head, s_segment, room, scaling,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr,
    BLOCK_FOURS: tl.constexpr, BLOCK_TWOS: tl.constexpr, BLOCK_ONES: tl.constexpr,
    SEGMENT: tl.constexpr, LAST: tl.constexpr, TURN: tl.constexpr, BLOCK_N: tl.constexpr,
    TOKEN_BYTES: tl.constexpr, SEGMENT_BYTES: tl.constexpr, HEAD_BYTES: tl.constexpr, MIN_TOKENS: tl.constexpr,
    TURNED: tl.constexpr,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`codec.estimate_scores` of one split, and what is to be known of all of them; a (split, KV head, row).

    Programs take turns at `TURN` tokens, which lie in one segment, and rotate the queries once for them. Of a head the
    sketch has room for `s_head` tokens in `s_segment` segments; estimates of a query head are `room` floats apart
    from the next one's. A key has words of 4-, 2- and 1-bit values: `FOURS`, `TWOS` and `ONES`.

    `p_sums` `[query heads, 4, splits]` takes the log of the sum of exponentials of a split's estimates, their number,
    their mean, and the sum of their squares around it.

    With `p_turned`, which takes the queries of `store_turned`, `p_exact` takes the scores that codes of closed segments
    say, of heads that read them whole too.
    """
    i_split, splits = tl.program_id(0), tl.num_programs(0)
    i_head, i_row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_group = i_row * tl.num_programs(1) + i_head
    o_head, o_dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_head, m_dim = o_head < G, o_dim < D
    b_flags = tl.load(p_flags + i_group * G + o_head, mask=m_head, other=0)
    if tl.max(b_flags.to(tl.int32), axis=0) == 0:
        return
    length = tl.load(p_lengths + i_row * s_length)
    stop = length
    if tl.load(p_tokens + i_group) == 0:  # which is there for long-context heads alone
        stop = stop * 0 if p_turned is None else count_closed(length, SEGMENT, LAST, MIN_TOKENS)
    if stop == 0:
        return
    segments = count_segments(length, SEGMENT, LAST)
    if p_sketch_read_bytes is not None:  # noqa: SIM102 - this one is decided by the compiler, the next by the device
        if i_split == 0:
            tl.atomic_add(
                p_sketch_read_bytes, length * TOKEN_BYTES + segments * SEGMENT_BYTES + HEAD_BYTES, sem="relaxed"
            )

    if p_turned is not None:  # noqa: SIM102 - likewise
        if i_split == splits - 1:  # which has the fewest turns
            p_record_weights += i_head * D
            store_turned(p_turned, p_query, p_record_weights, i_group, scaling, TURNED, G, BLOCK_G, D, BLOCK_D)

    o_group = i_group * G + o_head
    m_query = m_head[:, None] & m_dim[None, :]
    WORDS: tl.constexpr = FOURS + TWOS + ONES  # noqa: N806 - a compile-time constant
    FIRST_TWO: tl.constexpr = WORD_BITS // 4 * FOURS  # noqa: N806 - a compile-time constant
    FIRST_ONE: tl.constexpr = FIRST_TWO + WORD_BITS // 2 * TWOS  # noqa: N806 - a compile-time constant
    CODED: tl.constexpr = FIRST_ONE + WORD_BITS * ONES  # noqa: N806 - a compile-time constant
    p_codes += i_group * s_head * WORDS
    p_scales += i_group * s_head
    p_units += i_group * s_segment
    p_centres += i_group * s_segment * D
    p_order += i_group * s_segment * D
    p_weights += i_group * s_segment * D

    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_mean = tl.zeros([BLOCK_G], tl.float32)
    b_scatter = tl.zeros([BLOCK_G], tl.float32)
    seen = 0.0
    for turn in range(i_split.to(tl.int64) * TURN, stop, splits * TURN):
        i_segment = tl.minimum(turn // SEGMENT, segments - 1)
        unit = tl.load(p_units + i_segment)
        b_query = tl.load(p_query + o_group[:, None] * D + o_dim[None, :], mask=m_query, other=0.0).to(tl.float32)
        b_centre = tl.load(p_centres + i_segment * D + o_dim, mask=m_dim, other=0.0).to(tl.float32)
        b_middle = tl.sum(b_query * b_centre[None, :], axis=1) * scaling
        b_order = tl.load(p_order + i_segment * D + o_dim, mask=m_dim, other=0).to(tl.int64)
        b_query = tl.load(p_query + o_group[:, None] * D + b_order[None, :], mask=m_query, other=0.0).to(tl.float32)
        b_weights = tl.load(p_weights + i_segment * D + o_dim, mask=m_dim, other=1.0).to(tl.float32)
        b_weighed = tl.div_rn(b_query, b_weights[None, :].broadcast_to(b_query.shape))
        b_errors = tl.load(p_errors + o_dim, mask=m_dim, other=0.0)
        b_spread = tl.sum(b_weighed * b_weighed * b_errors[None, :], axis=1) * (0.5 * scaling * scaling)
        b_rotated = rotate(tl.where((o_dim < CODED)[None, :], b_weighed, 0.0), BLOCK)
        b_both, b_unit = round_queries(b_rotated, p_turned is not None)
        if FOURS:
            b_fours = take_channels(b_both, FOURS, 0, 4, BLOCK_FOURS)
        if TWOS:
            b_twos = take_channels(b_both, TWOS, FIRST_TWO, 2, BLOCK_TWOS)
        if ONES:
            b_ones = take_channels(b_both, ONES, FIRST_ONE, 1, BLOCK_ONES)
        for start in range(turn, tl.minimum(turn + TURN, length), BLOCK_N):
            o_tokens = start + tl.arange(0, BLOCK_N)
            m_tokens = o_tokens < length
            b_scale = tl.load(p_scales + o_tokens, mask=m_tokens, other=0).to(tl.float32) * unit
            b_products = tl.zeros([BLOCK_G, BLOCK_N], tl.int32)
            b_lows = tl.zeros([BLOCK_G, BLOCK_N], tl.int32)
            if FOURS:
                b_codes = load_codes(p_codes, s_head, o_tokens, m_tokens, FOURS, 4, BLOCK_FOURS)
                b_products += multiply_codes(take_high(b_fours), b_codes, 4)
                if p_turned is not None:
                    b_lows += multiply_codes(take_low(b_fours), b_codes, 4)
            if TWOS:
                p_twos = p_codes + FOURS * s_head
                b_codes = load_codes(p_twos, s_head, o_tokens, m_tokens, TWOS, 2, BLOCK_TWOS)
                b_products += multiply_codes(take_high(b_twos), b_codes, 2)
                if p_turned is not None:
                    b_lows += multiply_codes(take_low(b_twos), b_codes, 2)
            if ONES:
                p_ones = p_codes + (FOURS + TWOS) * s_head
                b_codes = load_codes(p_ones, s_head, o_tokens, m_tokens, ONES, 1, BLOCK_ONES)
                b_products += multiply_codes(take_high(b_ones), b_codes, 1)
                if p_turned is not None:
                    b_lows += multiply_codes(take_low(b_ones), b_codes, 1)
            b_parts = (scaling * b_unit)[:, None] * b_products.to(tl.float32) + b_spread[:, None] * b_scale[None, :]
            b_scores = b_middle[:, None] + b_scale[None, :] * b_parts  # [BLOCK_G, BLOCK_N]
            o_block = o_group[:, None] * room + o_tokens[None, :]
            m_block = b_flags[:, None] & m_tokens[None, :]
            tl.store(p_estimates + o_block, b_scores, mask=m_block)
            if p_turned is not None:
                b_fine = b_products.to(tl.float32) + b_lows.to(tl.float32) * (1.0 / FINER)
                b_exact = b_middle[:, None] + b_scale[None, :] * ((scaling * b_unit)[:, None] * b_fine)
                tl.store(p_exact + o_block, b_exact, mask=m_block)
            # Chan's merge of their mean and scatter with those of what was seen before.
            new = tl.minimum(length - start, BLOCK_N).to(tl.float32)
            b_new = tl.sum(tl.where(m_tokens[None, :], b_scores, 0.0), axis=1) / new
            b_off = tl.where(m_tokens[None, :], b_scores - b_new[:, None], 0.0)
            b_delta = b_new - b_mean
            b_mean += b_delta * (new / (seen + new))
            b_scatter += tl.sum(b_off * b_off, axis=1) + b_delta * b_delta * (seen * new / (seen + new))
            seen += new
            b_scores = tl.where(m_tokens[None, :], b_scores, float("-inf"))
            b_new = tl.maximum(b_max, tl.max(b_scores, axis=1))  # finite: the first token of a block is one
            b_sum = b_sum * tl.exp(b_max - b_new) + tl.sum(tl.exp(b_scores - b_new[:, None]), axis=1)
            b_max = b_new
    p_sums += o_group * 4 * splits + i_split  # [BLOCK_G]
    tl.store(p_sums, b_max + tl.log(tl.maximum(b_sum, 1.0)), mask=m_head)
    tl.store(p_sums + splits, tl.zeros([BLOCK_G], tl.float32) + seen, mask=m_head)
    tl.store(p_sums + 2 * splits, b_mean, mask=m_head)
    tl.store(p_sums + 3 * splits, b_scatter, mask=m_head)


@triton.jit(do_not_specialize=["record_room"])  # it grows with the bulk
def selected_kernel(
    p_query, p_turned, p_keys, p_values, p_records, p_resident_pointers, p_lengths, p_tokens, p_flags, p_estimates,
    p_exact, p_sums, p_index, p_parts, p_lse, p_unread, p_bulk_read_bytes, p_resident_hit_bytes,
    s_key_row, s_key_head, s_key_token, s_value_row, s_value_head, s_value_token, s_length,
    room, record_room, scaling, log_threshold,
    BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, TOKEN_BYTES: tl.constexpr,
    SEGMENT: tl.constexpr, LAST: tl.constexpr, MIN_TOKENS: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, RECORD: tl.constexpr, UNIT: tl.constexpr, TERMS: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention over the tokens of one split that a flagged head of the group selects; a (split, KV head, row).

    Their indices are written down first: few are selected, and blocks of them leave no lane without a token. As in
    `bulk_kernel`, computed for all heads of the group. `BLOCK_Q` query heads are what `G` needs outside of products.

    `p_unread` `[query heads, 2, splits]` takes, of the estimates of the split's other tokens, the log of the sum of
    exponentials, and the mean that these weigh.
    """
    i_split, splits = tl.program_id(0), tl.num_programs(0)
    i_head, i_row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_group = i_row * tl.num_programs(1) + i_head
    o_head = tl.arange(0, BLOCK_Q)
    m_head = o_head < G
    b_flags = tl.load(p_flags + i_group * G + o_head, mask=m_head, other=0)
    if tl.max(b_flags.to(tl.int32), axis=0) == 0:
        return
    length, bulk_tokens = tl.load(p_lengths + i_row * s_length), tl.load(p_tokens + i_group)
    closed = count_closed(length, SEGMENT, LAST, MIN_TOKENS)

    o_group = i_group * G + o_head
    b_score_cut = tl.full([BLOCK_Q], float("-inf"), tl.float32)  # of selected tokens
    if bulk_tokens > 0:
        o_split = tl.arange(0, BLOCK_P)
        b_buffer = tl.load(p_lse + o_group * (1 + splits), mask=m_head, other=0.0)
        m_split = m_head[:, None] & (o_split < splits)[None, :]
        p_masses = p_sums + o_group[:, None] * 4 * splits + o_split[None, :]
        b_masses = tl.load(p_masses, mask=m_split, other=float("-inf"))
        b_highest = tl.maximum(b_buffer, tl.max(b_masses, axis=1))
        b_all = tl.exp(b_buffer - b_highest) + tl.sum(tl.exp(b_masses - b_highest[:, None]), axis=1)
        b_score_cut = b_highest + tl.log(b_all) + log_threshold - tl.log(bulk_tokens.to(tl.float32))

    p_index += i_group * room + i_split * (room // splits)
    selected, recorded = 0, 0  # of these, how many lie in records
    b_high = tl.full([BLOCK_Q, BLOCK_S], -1e30, tl.float32)  # of what is not read, lane by lane: below any score
    b_unread = tl.zeros([BLOCK_Q, BLOCK_S], tl.float32)
    b_lift = tl.zeros([BLOCK_Q, BLOCK_S], tl.float32)
    for start in range(i_split.to(tl.int64) * BLOCK_S, length, splits * BLOCK_S):
        o_tokens = start + tl.arange(0, BLOCK_S)
        m_tokens = o_tokens < length
        m_selected = b_flags[:, None] & m_tokens[None, :]
        m_read = m_selected & (bulk_tokens > 0)
        b_scores = tl.load(p_estimates + o_group[:, None] * room + o_tokens[None, :], mask=m_read, other=0.0)
        m_selected = m_selected & (b_scores >= b_score_cut[:, None])  # [BLOCK_Q, BLOCK_S]
        b_selected = tl.max(m_selected.to(tl.int32), axis=0)
        o_index = selected + tl.cumsum(b_selected, axis=0) - 1
        tl.store(p_index + o_index, o_tokens.to(tl.int32), mask=b_selected == 1)
        selected += tl.sum(b_selected, axis=0)
        recorded += tl.sum(tl.where(o_tokens < closed, b_selected, 0), axis=0)
        b_left = tl.where(m_read & (b_selected == 0)[None, :], b_scores, float("-inf"))
        b_new = tl.maximum(b_high, b_left)
        b_decay, b_gain = tl.exp(b_high - b_new), tl.exp(b_left - b_new)
        b_unread = b_unread * b_decay + b_gain
        b_lift = b_lift * b_decay + b_gain * b_scores  # which are finite where there is nothing to gain
        b_high = b_new
    b_highest = tl.max(b_high, axis=1)
    b_decay = tl.exp(b_high - b_highest[:, None])
    b_all = tl.sum(b_unread * b_decay, axis=1)  # 0, at least 1, or nan, which shows
    b_some = tl.where(b_all == 0.0, 1.0, b_all)
    p_unread += o_group * 2 * splits + i_split  # [BLOCK_Q]
    tl.store(p_unread, tl.where(b_all == 0.0, float("-inf"), b_highest + tl.log(b_some)), mask=m_head)
    tl.store(p_unread + splits, tl.sum(b_lift * b_decay, axis=1) / b_some, mask=m_head)
    tl.debug_barrier()  # threads read what others have written
    if p_bulk_read_bytes is not None:
        p_stored_read_bytes = p_bulk_read_bytes
        if p_resident_pointers is not None:  # noqa: SIM102 - this one is decided by the compiler, the next by the device
            if tl.load(p_resident_pointers + 2 * i_group) != 0:
                p_stored_read_bytes = p_resident_hit_bytes
        if p_records is None:
            tl.atomic_add(p_stored_read_bytes, tl.cast(selected, tl.int64) * TOKEN_BYTES, sem="relaxed")
        else:
            tl.atomic_add(p_stored_read_bytes, tl.cast(recorded, tl.int64) * RECORD, sem="relaxed")
            tl.atomic_add(p_bulk_read_bytes, tl.cast(selected - recorded, tl.int64) * TOKEN_BYTES, sem="relaxed")

    p_keys += i_row * s_key_row + i_head * s_key_head
    p_values += i_row * s_value_row + i_head * s_value_head
    if p_records is None:
        attend_split(
            p_query, p_keys, p_values, p_resident_pointers, p_index, p_parts, p_lse, s_key_token, s_value_token,
            i_group, 0, selected, scaling, G, BLOCK_G, D, BLOCK_D, V, BLOCK_V, BLOCK_N,
        )  # fmt: skip
    else:
        b_max, b_sum, b_out = attend_tokens(
            p_query, p_keys, p_values, p_index, s_key_token, s_value_token, i_group, recorded, selected, closed,
            scaling, G, BLOCK_G, D, BLOCK_D, V, BLOCK_V, BLOCK_N,
        )  # fmt: skip
        if recorded < selected:
            b_out = rotate(b_out, TURNED)
        if recorded > 0:
            p_records += i_group * record_room * RECORD
            if p_resident_pointers is not None:
                p_records = resolve_pointer(p_records, p_resident_pointers + 2 * i_group)
            b_max, b_sum, b_out = attend_records(
                b_max, b_sum, b_out, p_turned, p_records, p_index, p_exact, p_flags, i_group, room, recorded,
                KEY_BITS, VALUE_BITS, RECORD, UNIT, TERMS, G, BLOCK_G, D, BLOCK_D, V, BLOCK_V, BLOCK_R,
            )  # fmt: skip
        store_part(b_max, b_sum, b_out, p_parts, p_lse, i_group, 1 + i_split, 1 + splits, G, V)
