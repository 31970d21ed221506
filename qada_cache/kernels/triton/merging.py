"""How the last program to read a group's bulk puts the parts of query heads together; names as in `kernels.py`."""

import triton
import triton.language as tl

from .blocks import rotate

ALL = tl.constexpr(256)  # a power of two that holds the parts of a head
PART_BYTES = tl.constexpr(8192)  # of parts, float32, that are added at once; four times as many may be on their way


@triton.jit
def is_last(p_done, i_group):
    """Whether this is the last of the group's programs to come here, which may read what the others have written."""
    tl.debug_barrier()  # behind which all threads of this one have written
    return tl.atomic_add(p_done + i_group, 1, sem="acq_rel") == tl.num_programs(0) - 1


@triton.jit
def merge_group(
    p_parts, p_lse, p_flags, p_unread, p_sums, p_mean, p_along, p_out, i_group, splits,
    scaling, unread_weight,
    G: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """`merge_head` of the group's flagged heads. Of the others `local_kernel` has written the output."""
    for head in range(G):
        i_head = i_group * G + head
        if tl.load(p_flags + i_head):
            merge_head(
                p_parts, p_lse, p_unread, p_sums, p_mean, p_along, p_out, i_group, i_head,
                splits, scaling, unread_weight, V, BLOCK_V, TURNED,
            )  # fmt: skip


@triton.jit
def merge_head(
    p_parts, p_lse, p_unread, p_sums, p_mean, p_along, p_out, i_group, i_head, splits,
    scaling, unread_weight,
    V: tl.constexpr, BLOCK_V: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Attention over the union of a query head's parts, of `splits` of its bulk and of the near buffer.

    With `p_unread`, written by `selected_kernel`, the estimated mass of unread tokens counts `unread_weight` times,
    with the value of `sketch.selection.estimate_unread`; `p_along` is `store_along`'s. With `TURNED`, parts of the bulk
    are rotated in blocks of so many channels.
    """
    BLOCK_N: tl.constexpr = PART_BYTES // (4 * BLOCK_V)  # noqa: N806 - a compile-time constant
    parts = 1 + splits
    o_dim, o_all = tl.arange(0, BLOCK_V), tl.arange(0, ALL)
    m_dim = o_dim < V
    p_parts += i_head * parts * V
    p_lse += i_head * parts
    b_all = tl.load(p_lse + o_all, mask=o_all < parts, other=float("-inf"))  # [ALL]
    highest = tl.max(b_all, axis=0)
    if p_unread is not None:
        p_unread += i_head * 2 * splits
        b_unread = tl.load(p_unread + o_all, mask=o_all < splits, other=float("-inf"))
        b_score = tl.load(p_unread + splits + o_all, mask=o_all < splits, other=0.0)
        highest = tl.maximum(highest, tl.max(b_unread, axis=0))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(b_all - shift), axis=0)
    b_out = tl.zeros([BLOCK_V], tl.float32)
    for start in tl.range(1 if TURNED else 0, parts, BLOCK_N, loop_unroll_factor=4):
        o_part = start + tl.arange(0, BLOCK_N)
        b_lse = tl.load(p_lse + o_part, mask=o_part < parts, other=float("-inf"))  # [BLOCK_N]
        m_part = (b_lse > float("-inf"))[:, None] & m_dim[None, :]  # empty parts hold nothing
        b_part = tl.load(p_parts + o_part[:, None] * V + o_dim[None, :], mask=m_part, other=0.0)  # [BLOCK_N, BLOCK_V]
        b_out += tl.sum(b_part * tl.exp(b_lse - shift)[:, None], axis=0)
    if TURNED:
        b_local = tl.load(p_parts + o_dim, mask=m_dim, other=0.0)
        b_out = rotate(b_out[None, :], TURNED).reshape(BLOCK_V) + b_local * tl.exp(tl.load(p_lse) - shift)
    if p_unread is not None:
        unread = tl.sum(tl.exp(b_unread - shift), axis=0) * unread_weight
        if unread > 0.0:  # a bulk that is read whole has no estimates
            b_along = tl.load(p_along + i_head * V + o_dim, mask=m_dim, other=0.0)
            b_along *= scaling * tilt(p_sums + i_head * 4 * splits, splits, b_unread, b_score)
            b_out += unread * (tl.load(p_mean + i_group * V + o_dim, mask=m_dim, other=0.0) + b_along)
        total += unread
    tl.store(p_out + i_head * V + o_dim, b_out / total, mask=m_dim)


@triton.jit
def tilt(p_sums, splits, b_log, b_score):
    """How far a query head's unread tokens lie from the mean, in units of the variance of all estimates.

    `b_log`, `b_score` [ALL]: of the unread tokens of every split, the log of the sum of exponentials of their
    estimates, and the mean of these weighed by it. `p_sums` are the head's, see `estimate_kernel`.
    """
    o_split = tl.arange(0, ALL)
    m_split = o_split < splits
    b_tokens = tl.load(p_sums + splits + o_split, mask=m_split, other=0.0)
    b_mean = tl.load(p_sums + 2 * splits + o_split, mask=m_split, other=0.0)
    b_scatter = tl.load(p_sums + 3 * splits + o_split, mask=m_split, other=0.0)
    tokens = tl.sum(b_tokens, axis=0)
    mean = tl.sum(b_tokens * b_mean, axis=0) / tokens
    b_off = b_mean - mean
    variance = tl.sum(b_scatter + b_tokens * b_off * b_off, axis=0) / tokens
    b_weight = tl.exp(b_log - tl.max(b_log, axis=0))
    lifted = tl.sum(b_weight * (b_score - mean), axis=0) / tl.sum(b_weight, axis=0)
    return tl.where(variance > 0.0, lifted / variance, 0.0)
