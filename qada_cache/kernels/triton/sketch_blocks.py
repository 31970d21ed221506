"""What the kernels do with the segments of a sketch; names as in `kernels.py`, `../../sketch` says what is computed."""

import triton
import triton.language as tl


@triton.jit
def segments_of(length, SEGMENT: tl.constexpr):
    """Segments of a bulk: all have `SEGMENT` tokens but the last, which ends with the bulk."""
    return tl.maximum((length + SEGMENT // 2) // SEGMENT, 1)


@triton.jit
def half_variance(
    b_query, p_weights, p_squares, length,
    SEGMENT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The average over tokens of `|q / w|^2` times the squared scale [BLOCK_G] for queries [BLOCK_G, BLOCK_D]."""
    o_dim = tl.arange(0, BLOCK_D)
    segments = segments_of(length, SEGMENT)
    b_inverse = tl.zeros([BLOCK_D], tl.float32)  # what the square of a query's channel counts
    for start in range(0, segments, BLOCK_S):
        o_segment = start + tl.arange(0, BLOCK_S)
        m_segment = o_segment < segments
        m_block = m_segment[:, None] & (o_dim < D)[None, :]
        b_weights = tl.load(p_weights + o_segment[:, None] * D + o_dim[None, :], mask=m_block, other=1.0).to(tl.float32)
        b_tokens = tl.where(o_segment == segments - 1, length - o_segment * SEGMENT, SEGMENT).to(tl.float32)
        b_square = tl.load(p_squares + o_segment, mask=m_segment, other=0.0) * (b_tokens / length.to(tl.float32))
        b_inverse += tl.sum(b_square[:, None] / (b_weights * b_weights), axis=0)
    b_wide = b_query.to(tl.float32)
    return tl.sum(b_wide * b_wide * b_inverse[None, :], axis=1)


@triton.jit
def signs(p_rotation, D: tl.constexpr, BLOCK_D: tl.constexpr, HADAMARD: tl.constexpr):
    """The first row of every Hadamard block [BLOCK_D]: all its other rows are these values with other signs."""
    o_dim = tl.arange(0, BLOCK_D)
    return tl.load(p_rotation + o_dim // HADAMARD * HADAMARD * D + o_dim, mask=o_dim < D, other=0.0)


@triton.jit
def rotated(b_query, b_signs, HADAMARD: tl.constexpr, STEPS: tl.constexpr):
    """Queries [BLOCK_G, BLOCK_D] as the rotation turns them: by `2^STEPS = HADAMARD` channels at once.

    A step takes sums and differences of neighbours and puts the differences behind the sums, which turns the bits of
    an index around by one; after all steps they are where they were.
    """
    BLOCK_G: tl.constexpr = b_query.shape[0]  # noqa: N806
    BLOCK_D: tl.constexpr = b_query.shape[1]  # noqa: N806
    ROWS: tl.constexpr = BLOCK_G * BLOCK_D // HADAMARD  # noqa: N806
    b_turned = b_query * b_signs[None, :]
    for _ in tl.static_range(STEPS):
        b_one, b_other = tl.split(b_turned.reshape(ROWS, HADAMARD // 2, 2))
        b_turned = tl.permute(tl.join(b_one + b_other, b_one - b_other), (0, 2, 1)).reshape(BLOCK_G, BLOCK_D)
    return b_turned


@triton.jit
def rounded(b_turned, D: tl.constexpr, BYTES: tl.constexpr, BLOCK_B: tl.constexpr):
    """Rotated queries in 8-bit integers [BLOCK_G, BLOCK_D], and their units [BLOCK_G].

    In the order in which `BYTES` bytes unpack: plane by plane, each padded to `BLOCK_B`.
    """
    b_unit = tl.div_rn(tl.maximum(tl.max(tl.abs(b_turned), axis=1), 1e-35), 127.0)  # a normal number
    b_rounded = tl.div_rn(b_turned, b_unit[:, None].broadcast_to(b_turned.shape)) + 12582912.0  # 1.5 * 2^23: to nearest
    b_integers = (b_rounded - 12582912.0).to(tl.int32)
    if b_turned.shape[1] != D:
        o_code = tl.arange(0, b_turned.shape[1])
        o_value = (o_code // BLOCK_B * BYTES + o_code % BLOCK_B)[None, :].broadcast_to(b_turned.shape)
        b_integers = tl.where((o_code % BLOCK_B < BYTES)[None, :], tl.gather(b_integers, o_value, 1), 0)
    return b_integers.to(tl.int8), b_unit


@triton.jit
def tilt(p_sums, splits, b_log, b_score, BLOCK_P: tl.constexpr):
    """How far a query head's unread tokens lie from the mean, in units of the variance of all estimates.

    `b_log`, `b_score` [BLOCK_P]: of the unread tokens of every split, the log of the sum of exponentials of their
    estimates, and the mean of these weighed by it. `p_sums` are the head's, see `estimate_kernel`.
    """
    o_split = tl.arange(0, BLOCK_P)
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


@triton.jit
def along(
    p_query, p_slopes, p_units, D: tl.constexpr, BLOCK_C: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """What values gain along a query [BLOCK_V], `slopes (slope_units q)`, by `BLOCK_C` channels at once."""
    o_value = tl.arange(0, BLOCK_V)
    b_along = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, D, BLOCK_C):
        o_dim = start + tl.arange(0, BLOCK_C)
        m_block = (o_value < V)[:, None] & (o_dim < D)[None, :]
        b_slopes = tl.load(p_slopes + o_value[:, None] * D + o_dim[None, :], mask=m_block, other=0.0)
        b_query = tl.load(p_query + o_dim, mask=o_dim < D, other=0.0)
        b_query = b_query.to(tl.float32) * tl.load(p_units + o_dim, mask=o_dim < D, other=0.0)
        b_along += tl.sum(b_slopes.to(tl.float32) * b_query[None, :], axis=1)
    return b_along
