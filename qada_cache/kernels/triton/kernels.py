"""The Triton kernels of one decode step; `__init__.py` launches them and says what they compute.

Names: `b_` block of values, `p_` pointer, `i_` index, `o_` offsets, `m_` mask, `s_` stride in elements. Sizes: `G`
query heads of a group, `D` dim, `V` value_dim; `BLOCK_*` is the power of two that holds them. "Part" 0 of a head is the
near buffer, the others are the splits of its bulk. The kernels that select tokens by a sketch are in
`estimate_kernels.py` and `sketch_kernels.py`.
"""

import triton
import triton.language as tl

from .blocks import add_along, attend, attend_split, compute_scores, find_unreliable, rotate, store_part, tilt
from .estimate_kernels import prepare_segment
from .record_kernels import count_closed, count_segments, store_turned

INTERPRETED = triton.knobs.runtime.interpret  # decided when the kernels are decorated


# Triton compiles anew for an argument that becomes 1 or a multiple of 16. These follow the number of tokens, or are 0
# where all rows share one.
@triton.jit(
    do_not_specialize=["s_local", "s_pending", "s_log_bulk", "columns", "min_tokens", "s_segment"],
    do_not_specialize_on_alignment=["parts"],
)
def local_kernel(
    p_query, p_keys, p_values, p_local, p_pending, p_lengths, p_decided, p_log_bulk, p_parts, p_lse, p_flags,
    p_bulk_read_bytes, p_sketch_read_bytes, p_resident_pointers, p_resident_hit_bytes, p_tokens, p_noise, p_variances,
    p_prepared, p_turned, p_errors, p_centres, p_order, p_weights, p_record_weights,
    s_key_row, s_key_head, s_key_token, s_value_row, s_value_head, s_value_token,
    s_local, s_pending, s_length, s_decided, s_log_bulk, columns, parts, scaling, logit_threshold, noise_limit,
    noise_share, min_tokens, s_segment,
    GROUP_RULE: tl.constexpr, TOKEN_BYTES: tl.constexpr,
    SKETCH_TOKEN_BYTES: tl.constexpr, SEGMENT_BYTES: tl.constexpr, HEAD_BYTES: tl.constexpr,
    SEGMENT: tl.constexpr, LAST: tl.constexpr, MIN_TOKENS: tl.constexpr,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr, ROWS: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Local attention, decisions and, for flagged heads, the pending tokens; one program a (KV head, row).

    With `p_tokens`, what selects tokens is left to find: the number of tokens in the bulk, 0 for a group that is to
    read all of them, as of any bulk that has not stored `min_tokens`, or -1 for one without a long-context head. Bytes
    of the sketch are counted where estimates are asked for. Meanwhile more programs, one a (KV head, row, segment),
    prepare its queries, whether or not anybody will ask: `p_prepared`, and `p_turned` for records.
    """
    TERMS: tl.constexpr = 1 if p_turned is None else 2  # noqa: N806 - a compile-time constant
    i_head, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_group = i_row * tl.num_programs(0) + i_head
    if p_prepared is not None:  # noqa: SIM102 - this one is decided by the compiler, the next by the device
        if tl.program_id(2) > 0:
            i_segment, length = tl.program_id(2) - 1, tl.load(p_lengths + i_row * s_length)
            if (length >= MIN_TOKENS) & (i_segment < count_segments(length, SEGMENT, LAST)):
                for first in range(0, G, BLOCK_H):
                    prepare_segment(
                        p_prepared, p_query, p_errors, p_centres, p_order, p_weights, i_group, i_segment, s_segment,
                        first, scaling, FOURS, TWOS, ONES, TERMS, ROWS, G, BLOCK_Q, BLOCK_H, D, BLOCK_D,
                    )  # fmt: skip
                if p_turned is not None:  # noqa: SIM102 - likewise
                    if i_segment == 0:
                        p_record_weights += i_head * D
                        store_turned(
                            p_turned, p_query, p_record_weights, i_group, scaling, TURNED, G, BLOCK_Q, D, BLOCK_D
                        )
            return
    o_head, o_dim, o_block = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    m_head, m_dim = o_head < G, o_dim < D
    p_query += i_group * G * D
    p_keys += i_row * s_key_row + i_head * s_key_head
    p_values += i_row * s_value_row + i_head * s_value_head
    p_local += i_row * s_local
    p_pending += i_row * s_pending
    b_query = tl.load(p_query + o_head[:, None] * D + o_dim[None, :], mask=m_head[:, None] & m_dim[None, :], other=0.0)

    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_out = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    bulk_tokens = tl.load(p_lengths + i_row * s_length)
    for start in range(0, columns, BLOCK_N):
        o_tokens = start + o_block
        m_tokens = o_tokens < columns
        m_local = tl.load(p_local + o_tokens, mask=m_tokens, other=0)
        m_pending = tl.load(p_pending + o_tokens, mask=m_tokens, other=0)
        b_scores = compute_scores(b_query, p_keys, o_tokens, m_local | m_pending, s_key_token, scaling, D)
        b_max, b_sum, b_out = attend(
            b_scores, m_local[None, :], b_max, b_sum, b_out, p_values, o_tokens, m_local, s_value_token, V
        )
        bulk_tokens += tl.sum(m_pending.to(tl.int32), axis=0)

    b_bulk = tl.load(p_log_bulk + i_row * s_log_bulk + i_head * G + o_head, mask=m_head, other=0.0)
    b_bulk = tl.where(b_bulk == b_bulk, b_bulk, float("inf"))  # of nan nothing can be said: read it
    b_flags = b_max + tl.log(tl.maximum(b_sum, 1.0)) - b_bulk < logit_threshold  # as `criterion.find_long_context`
    if GROUP_RULE == "any":
        b_flags = m_head & (tl.max(tl.where(m_head, b_flags.to(tl.int32), 0), axis=0) == 1)
    decided = tl.load(p_decided + i_row * s_decided) & (bulk_tokens > 0)
    b_flags = b_flags & m_head & decided
    tl.store(p_flags + i_group * G + o_head, b_flags, mask=m_head)

    if tl.max(b_flags.to(tl.int32), axis=0) == 1:
        for start in range(0, columns, BLOCK_N):
            o_tokens = start + o_block
            m_pending = tl.load(p_pending + o_tokens, mask=o_tokens < columns, other=0)
            b_scores = compute_scores(b_query, p_keys, o_tokens, m_pending, s_key_token, scaling, D)
            m_scores = m_pending[None, :] & b_flags[:, None]
            b_max, b_sum, b_out = attend(
                b_scores, m_scores, b_max, b_sum, b_out, p_values, o_tokens, m_pending, s_value_token, V
            )
        if p_bulk_read_bytes is not None:
            if p_resident_pointers is not None:  # noqa: SIM102 - this one is decided by the compiler, the next by the device
                if tl.load(p_resident_pointers + 2 * i_group) != 0:
                    p_bulk_read_bytes = p_resident_hit_bytes
            tl.atomic_add(p_bulk_read_bytes, tl.load(p_lengths + i_row * s_length) * TOKEN_BYTES, sem="relaxed")
        if p_tokens is not None:
            b_unreliable = find_unreliable(
                b_query, p_noise + i_group * D, p_variances + i_group * D, noise_limit, noise_share, D
            )
            whole = tl.max((b_flags & b_unreliable).to(tl.int32), axis=0) == 1
            length = tl.load(p_lengths + i_row * s_length)
            whole = whole | (length < min_tokens)
            tl.store(p_tokens + i_group, tl.where(whole, 0, bulk_tokens))
            if p_sketch_read_bytes is not None:
                estimated = ~whole
                if p_turned is not None:
                    estimated = estimated | (count_closed(length, SEGMENT, LAST, MIN_TOKENS) > 0)
                sketch_bytes = length * SKETCH_TOKEN_BYTES + HEAD_BYTES
                sketch_bytes += count_segments(length, SEGMENT, LAST) * SEGMENT_BYTES
                tl.atomic_add(p_sketch_read_bytes, tl.where(estimated, sketch_bytes, 0), sem="relaxed")
    elif p_tokens is not None:
        tl.store(p_tokens + i_group, -1)
    store_part(b_max, b_sum, b_out, p_parts, p_lse, i_group, 0, parts, G, V)


@triton.jit
def bulk_kernel(
    p_query, p_keys, p_values, p_resident_pointers, p_lengths, p_flags, p_parts, p_lse,
    s_key_row, s_key_head, s_key_token, s_value_row, s_value_head, s_value_token, s_length, scaling,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention over one split of the bulk of a group with a flagged head; one program a (split, KV head, row). It
    computes all heads of the group, as they share keys; the merge takes the flagged ones."""
    i_split, splits = tl.program_id(0), tl.num_programs(0)
    i_head, i_row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_group = i_row * tl.num_programs(1) + i_head
    o_head = tl.arange(0, BLOCK_G)
    b_flags = tl.load(p_flags + i_group * G + o_head, mask=o_head < G, other=0).to(tl.int32)
    if tl.max(b_flags, axis=0) == 0:
        return
    length = tl.load(p_lengths + i_row * s_length)  # int64, as every token offset made from it
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    first = i_split * share
    last = tl.minimum(first + share, length)
    p_keys += i_row * s_key_row + i_head * s_key_head
    p_values += i_row * s_value_row + i_head * s_value_head
    attend_split(
        p_query, p_keys, p_values, p_resident_pointers, None, p_parts, p_lse, s_key_token, s_value_token,
        i_group, first, last, scaling, G, BLOCK_G, D, BLOCK_D, V, BLOCK_V, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["parts"])
def merge_kernel(
    p_parts, p_lse, p_flags, p_unread, p_sums, p_query, p_mean, p_slopes, p_slope_units, p_out, parts, scaling,
    unread_weight,
    G: tl.constexpr, D: tl.constexpr, BLOCK_C: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Attention over the union of a query head's parts, one for a local head; one program a query head.

    With `p_unread`, written by `selected_kernel`, the estimated mass of unread tokens counts `unread_weight` times,
    with the value of `sketch.selection.estimate_unread`. With `TURNED`, parts of the bulk are rotated in blocks of so
    many channels.
    """
    i_head, splits = tl.program_id(0).to(tl.int64), parts - 1
    used = tl.where(tl.load(p_flags + i_head), parts, 1)
    o_dim, o_all = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_P)
    m_dim = o_dim < V
    p_parts += i_head * parts * V
    p_lse += i_head * parts
    b_all = tl.load(p_lse + o_all, mask=o_all < used, other=float("-inf"))  # [BLOCK_P]
    highest = tl.max(b_all, axis=0)
    if p_unread is not None:
        p_unread += i_head * 2 * splits
        m_split = o_all < used - 1
        b_unread = tl.load(p_unread + o_all, mask=m_split, other=float("-inf"))
        b_score = tl.load(p_unread + splits + o_all, mask=m_split, other=0.0)
        highest = tl.maximum(highest, tl.max(b_unread, axis=0))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(b_all - shift), axis=0)
    b_out = tl.zeros([BLOCK_V], tl.float32)
    for start in range(1 if TURNED else 0, used, BLOCK_N):
        o_part = start + tl.arange(0, BLOCK_N)
        b_lse = tl.load(p_lse + o_part, mask=o_part < used, other=float("-inf"))  # [BLOCK_N]
        m_part = (b_lse > float("-inf"))[:, None] & m_dim[None, :]  # empty parts hold nothing
        b_part = tl.load(p_parts + o_part[:, None] * V + o_dim[None, :], mask=m_part, other=0.0)  # [BLOCK_N, BLOCK_V]
        b_out += tl.sum(b_part * tl.exp(b_lse - shift)[:, None], axis=0)
    if TURNED:
        b_local = tl.load(p_parts + o_dim, mask=m_dim, other=0.0)
        b_out = rotate(b_out[None, :], TURNED).reshape(BLOCK_V) + b_local * tl.exp(tl.load(p_lse) - shift)
    if p_unread is not None:
        unread = tl.sum(tl.exp(b_unread - shift), axis=0) * unread_weight
        if unread > 0.0:  # a bulk that is read whole has no estimates
            i_group = i_head // G
            b_along = add_along(
                p_query + i_head * D, p_slopes + i_group * V * D, p_slope_units + i_group * D, D, BLOCK_C, V, BLOCK_V
            )
            b_along *= scaling * tilt(p_sums + i_head * 4 * splits, splits, b_unread, b_score, BLOCK_P)
            b_out += unread * (tl.load(p_mean + i_group * V + o_dim, mask=m_dim, other=0.0) + b_along)
        total += unread
    total = tl.where(highest == float("-inf"), 1.0, total)  # of nothing: a padding query's
    tl.store(p_out + i_head * V + o_dim, b_out / total, mask=m_dim)
