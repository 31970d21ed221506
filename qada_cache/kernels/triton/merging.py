"""How the last program to read a group's bulk puts the parts of query heads together; names as in `kernels.py`.

All heads at once: what it loads takes longer to come than to add, and comes together if it is asked for together.
"""

import triton
import triton.language as tl

from .blocks import FLAT, rotate


@triton.jit
def is_last(p_done, i_group, count):
    """Whether this is the last of `count` programs of a group to come here, which may read what the others wrote."""
    tl.debug_barrier()  # behind which all threads of this one have written
    return tl.atomic_add(p_done + i_group, 1, sem="acq_rel") == count - 1


@triton.jit
def merge_group(
    p_parts, p_lse, p_flags, p_unread, p_sums, p_mean, p_along, p_out, i_group, splits, sums, estimated, scaling,
    unread_weight,
    G: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr, PARTS: tl.constexpr, MERGE_STAGES: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """`merge_heads` of the group's heads, as many at once as have a part, or numbers of all splits, among `PARTS`
    floats."""
    HEADS: tl.constexpr = min(BLOCK_Q, PARTS // max(BLOCK_V, BLOCK_P, BLOCK_E))  # noqa: N806 - a compile-time constant
    for first in range(0, G, HEADS):
        merge_heads(
            p_parts, p_lse, p_flags, p_unread, p_sums, p_mean, p_along, p_out, i_group, first, splits, sums, estimated,
            scaling, unread_weight, G, V, BLOCK_V, BLOCK_P, BLOCK_E, HEADS, PARTS // BLOCK_V // HEADS, MERGE_STAGES,
            TURNED,
        )  # fmt: skip


@triton.jit
def merge_heads(
    p_parts, p_lse, p_flags, p_unread, p_sums, p_mean, p_along, p_out, i_group, first, splits, sums, estimated,
    scaling, unread_weight,
    G: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
    HEADS: tl.constexpr, PARTS: tl.constexpr, MERGE_STAGES: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Attention of the flagged ones of `HEADS` query heads from the `first` on, over the union of the near buffer and
    of `splits` parts of the bulk. `local_kernel` has written the output of the others.

    With `p_unread`, written by `selected_kernel`, the estimated mass of unread tokens counts `unread_weight` times,
    with the value of `sketch.selection.estimate_unread`; `p_mean` is the KV head's, `p_along` is `store_along`'s, and
    `p_sums` is of `sums` splits. They hold nothing unless scores were `estimated`. With `TURNED`, parts of the bulk are
    rotated in blocks of so many channels.
    """
    o_head, o_split, o_dim = first + tl.arange(0, HEADS), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    m_head, m_dim = o_head < G, o_dim < V
    m_split = m_head[:, None] & (o_split < splits)[None, :]
    # Offsets within a group are of 32 bits, which take half of the registers.
    o_near = o_head * (1 + splits)
    o_value = o_head[:, None] * V + o_dim[None, :]
    m_value = m_head[:, None] & m_dim[None, :]
    p_parts += i_group * G * (1 + splits) * V
    p_lse += i_group * G * (1 + splits)
    p_out += i_group * G * V
    m_flags = tl.load(p_flags + i_group * G + o_head, mask=m_head, other=0) != 0
    b_near = tl.load(p_lse + o_near, mask=m_head, other=0.0)  # [HEADS]
    b_lse = tl.load(p_lse + o_near[:, None] + (1 + o_split)[None, :], mask=m_split, other=float("-inf"))
    b_out = tl.load(p_parts + o_near[:, None] * V + o_dim[None, :], mask=m_value, other=0.0)  # [HEADS, BLOCK_V]
    if p_unread is not None:
        p_own = p_unread + i_group * G * 2 * splits + (o_head[:, None] * 2 * splits + o_split[None, :])
        b_unread = tl.load(p_own, mask=m_split, other=float("-inf"))
        b_score = tl.load(p_own + splits, mask=m_split, other=0.0)
        b_mean = tl.load(p_mean + o_dim, mask=m_dim & estimated, other=0.0)
        b_along = tl.load(p_along + i_group * G * V + o_value, mask=m_value & estimated, other=0.0)
        p_sums += i_group * G * 4 * sums
        b_lift = scaling * tilt(p_sums, o_head, m_head & estimated, sums, b_unread, b_score, BLOCK_E)
    b_highest = tl.maximum(b_near, tl.max(b_lse, axis=1))
    if p_unread is not None:
        b_highest = tl.maximum(b_highest, tl.max(b_unread, axis=1))
    b_shift = tl.where(b_highest == float("-inf"), 0.0, b_highest)
    b_near = tl.exp(b_near - b_shift)
    b_total = b_near + tl.sum(tl.exp(b_lse - b_shift[:, None]), axis=1)
    b_out *= b_near[:, None]

    b_parts = tl.zeros([HEADS, PARTS, BLOCK_V], tl.float32)
    for start in tl.range(0, splits, PARTS, num_stages=MERGE_STAGES):
        o_part = start + tl.arange(0, PARTS)
        m_part = m_flags[:, None] & (o_part < splits)[None, :]
        o_part = o_near[:, None] + (1 + o_part)[None, :]
        b_own = tl.load(p_lse + o_part, mask=m_part, other=float("-inf"))  # [HEADS, PARTS]
        p_block = p_parts + o_part[:, :, None] * V + o_dim[None, None, :]
        b_part = tl.load(p_block, mask=m_part[:, :, None] & m_dim[None, None, :], other=0.0)
        b_parts += b_part * tl.exp(b_own - b_shift[:, None])[:, :, None]
    b_bulk = tl.sum(b_parts, axis=1)
    if TURNED:
        b_bulk = rotate(b_bulk, TURNED)
    b_out += b_bulk
    if p_unread is not None:
        b_mass = tl.sum(tl.exp(b_unread - b_shift[:, None]), axis=1) * unread_weight
        b_out += b_mass[:, None] * (b_mean[None, :] + b_along * b_lift[:, None])
        b_total += b_mass
    tl.store(p_out + o_value, b_out / b_total[:, None], mask=m_flags[:, None] & m_dim[None, :])


@triton.jit
def tilt(p_sums, o_head, m_head, splits, b_log, b_score, BLOCK_E: tl.constexpr):
    """How far query heads' unread tokens lie from the mean, in units of the variance of all estimates [heads].

    `b_log`, `b_score` [heads, parts]: of the unread tokens of every part, the log of the sum of exponentials of their
    estimates, and the mean of these weighed by it. `p_sums` are the group's: see `estimate_kernel`.
    """
    o_split = tl.arange(0, BLOCK_E)
    m_split = m_head[:, None] & (o_split < splits)[None, :]
    p_sums += o_head[:, None] * 4 * splits + o_split[None, :]
    b_tokens = tl.load(p_sums + splits, mask=m_split, other=0.0)
    b_mean = tl.load(p_sums + 2 * splits, mask=m_split, other=0.0)
    b_scatter = tl.load(p_sums + 3 * splits, mask=m_split, other=0.0)
    b_count = tl.maximum(tl.sum(b_tokens, axis=1), 1.0)
    b_middle = tl.sum(b_tokens * b_mean, axis=1) / b_count
    b_off = b_mean - b_middle[:, None]
    b_variance = tl.sum(b_scatter + b_tokens * b_off * b_off, axis=1) / b_count
    b_highest = tl.max(b_log, axis=1)
    b_weight = tl.exp(b_log - tl.where(b_highest == float("-inf"), 0.0, b_highest)[:, None])
    b_lifted = tl.sum(b_weight * (b_score - b_middle[:, None]), axis=1) / tl.maximum(tl.sum(b_weight, axis=1), 1.0)
    return tl.where(b_variance > FLAT, b_lifted / tl.where(b_variance > FLAT, b_variance, 1.0), 0.0)
