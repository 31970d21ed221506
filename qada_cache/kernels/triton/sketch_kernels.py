"""The Triton kernels by which a group reads selected tokens of its bulk.

`../../sketch` says which these are, `kernels.py` the names.

Programs take turns at runs of a bulk's tokens, because selected tokens lie close together: `i_split` has every
`splits`-th. If `local_kernel` has left 0 for the number of tokens, all are read, and nothing of the sketch.

With `p_records`, tokens lie in records (`record_kernels.py`, `latent_records.py`), whose keys follow from the sketch.
"""

import triton
import triton.language as tl

from .blocks import attend_tokens, load_own_query, rotate, store_part
from .latent_records import attend_latent_records
from .merging import is_last, merge_group
from .record_kernels import attend_records, count_segments
from .score_kernels import score_selected


# They grow with the bulk.
@triton.jit(
    do_not_specialize=["record_room", "open_room", "s_codes", "s_head", "s_segment", "sums", "s_marks"],
    do_not_specialize_on_alignment=["turn"],
)
def selected_kernel(
    p_query, p_turned, p_prepared, p_codes, p_scales, p_units, p_keys, p_values, p_records, p_open,
    p_centres, p_order, p_weights, p_record_weights, p_lengths, p_bulk_read_bytes, p_tokens, p_flags, p_estimates,
    p_sums, p_index, p_unpacked, p_parts, p_lse, p_unread, p_mean, p_along, p_out, p_done, p_marks,
    s_key_row, s_key_head, s_key_token, s_value_row, s_value_head, s_value_token, s_length,
    s_codes, s_head, s_segment, s_marks, room, record_room, open_room, sums, turn, scaling, log_threshold,
    unread_weight,
    BLOCK_S: tl.constexpr, RUN: tl.constexpr, SCAN_STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr, MERGE_STAGES: tl.constexpr,
    BLOCK_Q: tl.constexpr, TOKEN_BYTES: tl.constexpr,
    SEGMENT: tl.constexpr, LAST: tl.constexpr, MIN_TOKENS: tl.constexpr, KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, RECORD: tl.constexpr, COPY: tl.constexpr, UNPACKED: tl.constexpr, UNIT: tl.constexpr,
    TERMS: tl.constexpr, TURNED: tl.constexpr, BLOCK_R: tl.constexpr, FOURS: tl.constexpr, TWOS: tl.constexpr,
    ONES: tl.constexpr, ROWS: tl.constexpr,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention over the tokens of one split that a flagged head of the group selects; a (split, KV head, row).

    Their indices are written down first: few are selected, and blocks of them leave no lane without a token. As in
    `bulk_kernel`, computed for all heads of the group. `BLOCK_Q` query heads are what `G` needs outside of products.
    `BLOCK_S` tokens are looked at together, in runs of `RUN`; `p_sums` is of `sums` splits.

    `p_unread` `[query heads, 2, splits]` takes, of the estimates of the split's other tokens, the log of the sum of
    exponentials, and the mean that these weigh. The last program of a group merges its parts. With `p_marks`, bytes of
    a token are written there instead of counted: `Operands.marks`.
    """
    i_split, splits = tl.program_id(0), tl.num_programs(0)
    i_head, i_row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_group = i_row * tl.num_programs(1) + i_head
    o_head = tl.arange(0, BLOCK_Q)
    m_head = o_head < G
    o_group = i_group * G + o_head
    b_flags = tl.load(p_flags + o_group, mask=m_head, other=0)
    length = tl.load(p_lengths + i_row * s_length).to(tl.int32)  # as indices are: half of the registers
    bulk_tokens = tl.load(p_tokens + i_group).to(tl.int32)
    b_buffer = tl.load(p_lse + o_group * (1 + splits), mask=m_head, other=0.0)
    o_sum = tl.arange(0, BLOCK_E)
    m_sum = m_head[:, None] & (o_sum < sums)[None, :]
    p_masses = p_sums + i_group * G * 4 * sums + (o_head[:, None] * 4 * sums + o_sum[None, :])
    b_masses = tl.load(p_masses, mask=m_sum, other=float("-inf"))
    b_query, b_rest = load_own_query(p_query, p_values, i_group, G, BLOCK_G, D, BLOCK_D, V, BLOCK_V)
    if tl.max(b_flags.to(tl.int32), axis=0) == 0:
        return
    i_held_row = (tl.program_id(2) // turn).to(tl.int64)
    i_held = i_held_row * tl.num_programs(1) + i_head
    segments = count_segments(length, SEGMENT, LAST)
    closed = (segments - 1) * SEGMENT

    b_score_cut = tl.full([BLOCK_Q], float("-inf"), tl.float32)  # of selected tokens
    if bulk_tokens > 0:
        b_highest = tl.maximum(b_buffer, tl.max(b_masses, axis=1))
        b_all = tl.exp(b_buffer - b_highest) + tl.sum(tl.exp(b_masses - b_highest[:, None]), axis=1)
        b_score_cut = b_highest + tl.log(b_all) + log_threshold - tl.log(bulk_tokens.to(tl.float32))

    token_bytes = TOKEN_BYTES
    if p_records is not None:
        token_bytes = tl.where(length >= MIN_TOKENS, RECORD, TOKEN_BYTES)
    p_index += i_group * room + i_split * (room // splits)
    selected = 0
    # Of what is not read, lane by lane, relative to the cut: all of it is below, and what is far below is nothing.
    b_shift = tl.where(bulk_tokens > 0, b_score_cut, 0.0)
    b_unread = tl.zeros([BLOCK_Q, BLOCK_S], tl.float32)
    b_lift = tl.zeros([BLOCK_Q, BLOCK_S], tl.float32)
    o_block = tl.arange(0, BLOCK_S)
    o_block = (o_block // RUN * splits + i_split) * RUN + o_block % RUN
    p_scores = p_estimates + i_group * G * room
    for start in tl.range(0, length, splits * BLOCK_S, num_stages=SCAN_STAGES):
        o_tokens = start + o_block
        m_tokens = o_tokens < length
        m_selected = b_flags[:, None] & m_tokens[None, :]
        m_read = m_selected & (bulk_tokens > 0)
        b_scores = tl.load(p_scores + (o_head[:, None] * room + o_tokens[None, :]), mask=m_read, other=0.0)
        m_selected = m_selected & (b_scores >= b_score_cut[:, None])  # [BLOCK_Q, BLOCK_S]
        b_selected = tl.max(m_selected.to(tl.int32), axis=0)
        o_index = selected + tl.cumsum(b_selected, axis=0) - 1
        tl.store(p_index + o_index, o_tokens, mask=b_selected == 1)
        selected += tl.sum(b_selected, axis=0)
        if p_marks is not None:
            tl.store(p_marks + i_held * s_marks + 1 + o_tokens, token_bytes, mask=b_selected == 1)
        m_left = m_read & (b_selected == 0)[None, :]
        b_gain = tl.where(m_left, tl.exp(b_scores - b_shift[:, None]), 0.0)
        b_unread += b_gain
        b_lift += b_gain * b_scores
    b_all = tl.sum(b_unread, axis=1)
    b_some = tl.where(b_all == 0.0, 1.0, b_all)
    p_own = p_unread + o_group * 2 * splits + i_split  # [BLOCK_Q]
    tl.store(p_own, tl.where(b_all == 0.0, float("-inf"), b_shift + tl.log(b_some)), mask=m_head)
    tl.store(p_own + splits, tl.sum(b_lift, axis=1) / b_some, mask=m_head)
    tl.debug_barrier()  # threads read what others have written
    if p_bulk_read_bytes is not None:
        tl.atomic_add(p_bulk_read_bytes, tl.cast(selected, tl.int64) * token_bytes, sem="relaxed")

    p_keys += i_held_row * s_key_row + i_head * s_key_head
    if p_values is not None:
        p_values += i_held_row * s_value_row + i_head * s_value_head
    recorded = 0
    if p_records is not None:
        recorded = tl.where(length >= MIN_TOKENS, selected, 0)
    b_max, b_sum, b_out = attend_tokens(
        b_query, b_rest, p_keys, p_values, p_index, s_key_token, s_value_token, recorded, selected, scaling,
        BLOCK_G, D, V, BLOCK_V, BLOCK_N,
    )  # fmt: skip
    if p_records is not None and p_values is None:
        at = i_held * s_segment  # of the first segment
        b_max, b_sum, b_out = attend_latent_records(
            b_max, b_sum, b_out, p_query, i_group * G + tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_G) < G,
            p_unpacked + (i_group * splits + i_split) * UNPACKED,
            p_records + i_held * record_room * RECORD, p_open + i_held * open_room * RECORD, p_index,
            p_codes + i_held * s_codes, p_scales + i_held * s_head, p_units + at, p_centres + at * D,
            p_order + at * D, p_weights + at * D, p_record_weights + i_head * D, 0, recorded, closed, segments,
            s_head, scaling, SEGMENT, KEY_BITS, RECORD, UNIT, FOURS, TWOS, ONES, D, BLOCK_D, V, BLOCK_V, BLOCK_R,
        )  # fmt: skip
    elif p_records is not None:
        if recorded < selected:
            b_out = rotate(b_out, TURNED)
        if recorded > 0:
            score_selected(
                p_prepared, p_codes, p_scales, p_units, p_index, p_estimates, i_group, i_held, s_codes, s_head,
                s_segment, room, segments, recorded, FOURS, TWOS, ONES, ROWS, SEGMENT, G, BLOCK_Q,
            )  # fmt: skip
            tl.debug_barrier()  # likewise
            p_records += i_held * record_room * RECORD
            p_open += i_held * open_room * RECORD
            p_unpacked += (i_group * splits + i_split) * UNPACKED
            b_max, b_sum, b_out = attend_records(
                b_max, b_sum, p_turned, p_records, p_open, p_index, p_estimates, p_flags, p_unpacked, i_group, room,
                closed, recorded, KEY_BITS, VALUE_BITS, RECORD, COPY, UNIT, TERMS, G, BLOCK_G, D, BLOCK_D, V, BLOCK_V,
                BLOCK_R,
            )  # fmt: skip
    store_part(b_max, b_sum, b_out, p_parts, p_lse, i_group, 1 + i_split, 1 + splits, G, V)
    if is_last(p_done, i_group, splits):
        merge_group(
            p_parts, p_lse, p_flags, p_unread, p_sums, p_mean + i_held * V, p_along, p_out, i_group, splits, sums,
            bulk_tokens > 0, scaling, unread_weight, G, V, BLOCK_V, BLOCK_Q, BLOCK_P, BLOCK_E, PARTS, MERGE_STAGES,
            TURNED,
        )  # fmt: skip
