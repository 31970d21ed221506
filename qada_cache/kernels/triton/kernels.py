"""The Triton kernels of one decode step; `__init__.py` launches them and says what they compute.

Names: `b_` block of values, `p_` pointer, `i_` index, `o_` offsets, `m_` mask, `s_` stride in elements. Sizes: `G`
query heads of a group, `D` dim, `V` value_dim; `BLOCK_*` is the power of two that holds them. "Part" 0 of a head is the
near buffer, the others are the splits of its bulk. The kernels that select tokens by a sketch are in
`estimate_kernels.py` and `sketch_kernels.py`.

Each row that is held stands for `turn` consecutive rows of a step, the queries of a turn: `i_group` is a group of the
step, `i_held` the KV head that holds its tokens. Triton compiles a `turn` of 1 for itself, without a division.
"""

import triton
import triton.language as tl

from .blocks import (
    attend_tokens,
    find_unreliable,
    load_own_query,
    load_query,
    log_sum,
    store_part,
)
from .estimate_kernels import prepare_segments, store_along
from .merging import is_last, merge_group
from .near_kernels import attend_block, count_pending, merge_near
from .record_kernels import count_segments, store_turned

INTERPRETED = triton.knobs.runtime.interpret  # decided when the kernels are decorated


# Triton compiles anew for an argument that becomes 1 or a multiple of 16. These follow the number of tokens, or are 0
# where all rows share one.
@triton.jit(
    do_not_specialize=[
        "s_local", "s_pending", "s_log_bulk", "columns", "min_tokens", "s_segment", "s_marks", "blocks", "parts",
    ],
    do_not_specialize_on_alignment=["turn"],
)  # fmt: skip
def local_kernel(
    p_query, p_keys, p_values, p_local, p_pending, p_lengths, p_decided, p_log_bulk, p_near, p_near_lse, p_arrived,
    p_parts, p_lse, p_flags, p_out,
    p_done, p_bulk_read_bytes, p_sketch_read_bytes, p_tokens, p_prepared, p_along, p_turned,
    p_errors, p_noise, p_variances, p_centres, p_order, p_weights, p_slopes, p_slope_units,
    p_record_weights, p_sinks, p_marks,
    s_key_row, s_key_head, s_key_token, s_value_row, s_value_head, s_value_token,
    s_local, s_pending, s_length, s_decided, s_log_bulk, s_marks, columns, blocks, turn, parts, scaling,
    logit_threshold, noise_limit, noise_share, min_tokens, s_segment,
    GROUP_RULE: tl.constexpr, TOKEN_BYTES: tl.constexpr,
    SKETCH_TOKEN_BYTES: tl.constexpr, SEGMENT_BYTES: tl.constexpr, HEAD_BYTES: tl.constexpr,
    SEGMENT: tl.constexpr, LAST: tl.constexpr, MIN_TOKENS: tl.constexpr,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr, ROWS: tl.constexpr, TURNED: tl.constexpr,
    PARTS: tl.constexpr, MERGE_STAGES: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
    PREPARED: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Local attention, decisions and, for flagged heads, the pending tokens; a (KV head, row, block of `BLOCK_N`
    columns), of which there are `blocks`. The last program of a group to come puts the blocks together: `p_arrived`
    counts them, and is 0 again afterwards.

    `p_out` takes the outputs of all heads as if they were local. The last program that reads the bulk replaces those of
    the others: `p_done` counts these programs.

    With `p_tokens`, what selects tokens is left to find: the number of tokens in the bulk, 0 for a group that is to
    read all of them, as of any bulk that has not stored `min_tokens`, or -1 for one without a long-context head. Bytes
    of the sketch are counted where estimates are asked for. Meanwhile more programs, one for `PREPARED` segments of
    a (KV head, row), prepare its queries, whether or not anybody will ask: `p_prepared`. Behind them, one for each
    query head of a group writes `p_along`, and the first of these `p_turned` for records.

    `p_sinks` are learned sinks [query heads]: each is one more local token, whose value is zero.

    With `p_marks`, bytes of a KV head are written there instead of counted, as several rows may read the same:
    `Operands.marks`.
    """
    TERMS: tl.constexpr = 1 if p_turned is None else 2  # noqa: N806 - a compile-time constant
    i_head, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_group = i_row * tl.num_programs(0) + i_head
    i_held_row = (tl.program_id(1) // turn).to(tl.int64)
    i_held = i_held_row * tl.num_programs(0) + i_head
    i_block = tl.program_id(2)
    length = tl.load(p_lengths + i_row * s_length)
    if p_prepared is not None:  # noqa: SIM102 - this one is decided by the compiler, the next by the device
        if i_block >= blocks:
            i_part, preparing = i_block - blocks, tl.cdiv(s_segment, PREPARED)
            if length >= MIN_TOKENS:
                if i_part >= preparing:
                    along = i_part - preparing
                    store_along(p_along, p_query, p_slopes, p_slope_units, i_group, i_held, along, G, D, V, BLOCK_V)
                    if p_turned is not None:  # noqa: SIM102 - this one is decided by the compiler, the next by the device
                        if along == 0:
                            p_record_weights += i_head * D
                            store_turned(
                                p_turned, p_query, p_record_weights, i_group, scaling, TURNED, G, BLOCK_Q, D, BLOCK_D
                            )
                else:
                    segments = count_segments(length, SEGMENT, LAST)
                    if i_part * PREPARED < segments:
                        for first in range(0, G, BLOCK_H):
                            prepare_segments(
                                p_prepared, p_query, p_errors, p_noise, p_centres, p_order, p_weights, i_group,
                                i_held, i_part * PREPARED, segments, s_segment, first, scaling, FOURS, TWOS, ONES,
                                TERMS, ROWS, G, BLOCK_Q, BLOCK_H, PREPARED, D, BLOCK_D,
                            )  # fmt: skip
            return
    p_keys += i_held_row * s_key_row + i_head * s_key_head
    if p_values is not None:
        p_values += i_held_row * s_value_row + i_head * s_value_head
    p_local += i_row * s_local
    p_pending += i_row * s_pending
    attend_block(
        p_query, p_keys, p_values, p_local, p_pending, p_near, p_near_lse, s_key_token, s_value_token, i_group, i_block,
        blocks, columns, scaling, G, BLOCK_G, D, BLOCK_D, V, BLOCK_V, BLOCK_N,
    )  # fmt: skip
    # What the last program is sure to need comes while it waits for the others.
    o_head = tl.arange(0, BLOCK_Q)
    m_head = o_head < G
    pending = count_pending(p_pending, columns, BLOCK_C)
    decided = tl.load(p_decided + i_row * s_decided)
    b_bulk = tl.load(p_log_bulk + i_row * s_log_bulk + i_head * G + o_head, mask=m_head, other=0.0)
    if not is_last(p_arrived, i_group, blocks):
        return
    tl.store(p_arrived + i_group, 0)

    o_near = ((i_group * G + o_head) * 2 * blocks)[:, None] + tl.arange(0, BLOCK_B)[None, :]
    m_near = m_head[:, None] & (tl.arange(0, BLOCK_B) < blocks)[None, :]
    b_local = tl.load(p_near_lse + o_near, mask=m_near, other=float("-inf"))  # [BLOCK_Q, blocks]
    b_late = tl.load(p_near_lse + o_near + blocks, mask=m_near, other=float("-inf"))
    b_log_local, b_sinks = log_sum(b_local), None
    if p_sinks is not None:
        b_sinks = tl.load(p_sinks + i_head * G + o_head, mask=m_head, other=float("-inf")).to(tl.float32)
        b_log_local = log_sum(tl.join(b_log_local, b_sinks))
    bulk_tokens = length + pending
    b_bulk = tl.where(b_bulk == b_bulk, b_bulk, float("inf"))  # of nan nothing can be said: read it
    b_flags = b_log_local - b_bulk < logit_threshold  # as `criterion.find_long_context`
    if GROUP_RULE == "any":
        b_flags = m_head & (tl.max(tl.where(m_head, b_flags.to(tl.int32), 0), axis=0) == 1)
    decided = decided & (bulk_tokens > 0)
    b_flags = b_flags & m_head & decided
    tl.store(p_flags + i_group * G + o_head, b_flags, mask=m_head)

    if tl.max(b_flags.to(tl.int32), axis=0) == 1:
        if p_bulk_read_bytes is not None:
            tl.atomic_add(p_bulk_read_bytes, length * TOKEN_BYTES, sem="relaxed")
        if p_marks is not None and p_tokens is None:
            tl.store(p_marks + i_held * s_marks + 1, length * TOKEN_BYTES)
        if p_tokens is not None:
            b_query = load_query(p_query, i_group, G, BLOCK_Q, D, BLOCK_D)
            b_unreliable = find_unreliable(
                b_query, p_noise + i_held * D, p_variances + i_held * D, noise_limit, noise_share, D
            )
            whole = tl.max((b_flags & b_unreliable).to(tl.int32), axis=0) == 1
            whole = whole | (length < min_tokens)
            tl.store(p_tokens + i_group, tl.where(whole, 0, bulk_tokens))
            if p_sketch_read_bytes is not None or p_marks is not None:
                estimated = ~whole
                if p_record_weights is not None:
                    estimated = estimated | (length >= MIN_TOKENS)
                sketch_bytes = length * SKETCH_TOKEN_BYTES + HEAD_BYTES
                sketch_bytes += count_segments(length, SEGMENT, LAST) * SEGMENT_BYTES
                if p_marks is None:
                    tl.atomic_add(p_sketch_read_bytes, tl.where(estimated, sketch_bytes, 0), sem="relaxed")
                else:
                    tl.store(p_marks + i_held * s_marks, sketch_bytes, mask=estimated)
    elif p_tokens is not None:
        tl.store(p_tokens + i_group, -1)
    merge_near(
        p_near, p_near_lse, p_parts, p_lse, p_out, i_group, blocks, parts, b_flags, b_local, b_late, b_sinks, G,
        BLOCK_Q, V, BLOCK_V, PARTS, MERGE_STAGES,
    )  # fmt: skip
    tl.store(p_done + i_group, 0)


@triton.jit(do_not_specialize_on_alignment=["turn"])
def bulk_kernel(
    p_query, p_keys, p_values, p_lengths, p_flags, p_parts, p_lse, p_out, p_done,
    s_key_row, s_key_head, s_key_token, s_value_row, s_value_head, s_value_token, s_length, turn, scaling,
    BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr, MERGE_STAGES: tl.constexpr,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention over one split of the bulk of a group with a flagged head; one program a (split, KV head, row). It
    computes all heads of the group, as they share keys. The last program of a group merges the flagged ones."""
    i_split, splits = tl.program_id(0), tl.num_programs(0)
    i_head, i_row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_group = i_row * tl.num_programs(1) + i_head
    o_head = tl.arange(0, BLOCK_G)
    b_flags = tl.load(p_flags + i_group * G + o_head, mask=o_head < G, other=0).to(tl.int32)
    length = tl.load(p_lengths + i_row * s_length)  # int64, as every token offset made from it
    b_query, b_rest = load_own_query(p_query, p_values, i_group, G, BLOCK_G, D, BLOCK_D, V, BLOCK_V)
    if tl.max(b_flags, axis=0) == 0:
        return
    share = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    first = i_split * share
    last = tl.minimum(first + share, length)
    i_held_row = (tl.program_id(2) // turn).to(tl.int64)
    p_keys += i_held_row * s_key_row + i_head * s_key_head
    if p_values is not None:
        p_values += i_held_row * s_value_row + i_head * s_value_head
    b_max, b_sum, b_out = attend_tokens(
        b_query, b_rest, p_keys, p_values, None, s_key_token, s_value_token, first, last, scaling,
        BLOCK_G, D, V, BLOCK_V, BLOCK_N,
    )  # fmt: skip
    store_part(b_max, b_sum, b_out, p_parts, p_lse, i_group, 1 + i_split, 1 + splits, G, V)
    if is_last(p_done, i_group, splits):
        merge_group(
            p_parts, p_lse, p_flags, None, None, None, None, p_out, i_group, splits, 0, False, scaling, 0.0,
            G, V, BLOCK_V, BLOCK_Q, BLOCK_P, 1, PARTS, MERGE_STAGES, 0,
        )  # fmt: skip
