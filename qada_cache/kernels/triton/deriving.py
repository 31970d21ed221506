"""A sketch's fields that follow from its other fields and the covariance, derived at each flush:
`codec.average_channels` and `codec.round_slopes`, in one launch. Names are as in `kernels.py`."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import sketch as definition
from ...sketch import ERRORS, STEPS, Layout, codec
from ...sketch.codec import Sketch
from .blocks import to_nearest
from .coding import STEP_1, STEP_2, STEP_4, TINY, by_bits, find_sizes
from .direct import at_device
from .launching import Launches

COLUMNS = tl.constexpr(16)  # columns of pairs of slopes that a program rounds
NUMBERS = 2048  # elements, segments times channels, that a program reads at once
SLOPE_LEVELS = tl.constexpr(float(codec.SLOPE_LEVELS))
ERROR_4, ERROR_2, ERROR_1 = (tl.constexpr(ERRORS[bits] / (STEPS[bits] / 2) ** 2) for bits in (4, 2, 1))


@triton.jit
def average_channels(
    p_weights, p_order, p_mean_squares, p_noise, p_variances, p_ordered, length, segments,
    SEGMENT: tl.constexpr, FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write one head's noise and variances. `p_ordered` `[segments, 2, D]` is scratch, for every segment's share of
    each channel."""
    o_dim = tl.arange(0, BLOCK_D)
    b_errors = by_bits(o_dim, ERROR_4, ERROR_2, ERROR_1, 1.0, FOURS, TWOS, ONES)[None, :]
    b_steps = by_bits(o_dim, STEP_4, STEP_2, STEP_1, 1.0, FOURS, TWOS, ONES)[None, :]
    for start in range(0, segments, BLOCK_S):
        o_segment = start + tl.arange(0, BLOCK_S)
        m_segment = o_segment < segments
        m_block = m_segment[:, None] & (o_dim < D)[None, :]
        o_block = o_segment[:, None] * D + o_dim[None, :]
        b_tokens = tl.where(o_segment == segments - 1, length - o_segment * SEGMENT, SEGMENT)
        b_share = b_tokens.to(tl.float32) / length
        b_noise = (tl.load(p_mean_squares + o_segment, mask=m_segment, other=0.0) * b_share)[:, None]
        b_weights = tl.load(p_weights + o_block, mask=m_block, other=1.0).to(tl.float32)
        b_square = b_weights * b_weights
        p_block = (
            p_ordered + o_segment[:, None] * 2 * D + tl.load(p_order + o_block, mask=m_block, other=0).to(tl.int32)
        )
        tl.store(p_block, b_errors / b_square * b_noise, mask=m_block)
        tl.store(p_block + D, b_share[:, None] / (b_square * (b_steps * b_steps)), mask=m_block)
    tl.debug_barrier()  # threads read what others have written
    b_noise = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    b_variances = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in range(0, segments, BLOCK_S):
        o_segment = start + tl.arange(0, BLOCK_S)
        m_block = (o_segment < segments)[:, None] & (o_dim < D)[None, :]
        p_block = p_ordered + o_segment[:, None] * 2 * D + o_dim[None, :]
        b_noise += tl.load(p_block, mask=m_block, other=0.0)
        b_variances += tl.load(p_block + D, mask=m_block, other=0.0)
    tl.store(p_noise + o_dim, tl.sum(b_noise, axis=0), mask=o_dim < D)
    tl.store(p_variances + o_dim, tl.sum(b_variances, axis=0), mask=o_dim < D)


@triton.jit
def round_slopes(p_covariance, p_slopes, p_slope_units, first, D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Round one head's slopes along `COLUMNS` pairs of channels of keys, from pair `first` on. A pair is channel `c`
    and `c + D // 2`."""
    o_dim, o_value = first + tl.arange(0, COLUMNS), tl.arange(0, BLOCK_V)
    m_block = (o_value < V)[:, None] & (o_dim < D // 2)[None, :]
    b_pairs = tl.zeros([BLOCK_V, COLUMNS], tl.int32)
    for half in tl.static_range(2):
        o_channel = half * (D // 2) + o_dim
        b_covariance = tl.load(p_covariance + o_value[:, None] * D + o_channel[None, :], mask=m_block, other=0.0)
        b_unit = tl.div_rn(tl.max(tl.abs(b_covariance), axis=0), SLOPE_LEVELS)
        b_step = tl.maximum(b_unit, TINY)[None, :].broadcast_to(b_covariance.shape)
        b_slopes = to_nearest(tl.div_rn(b_covariance, b_step)).to(tl.int32)
        b_pairs |= (b_slopes & 15) << 4 * half
        tl.store(p_slope_units + o_channel, b_unit, mask=o_dim < D // 2)
    tl.store(p_slopes + o_value[:, None] * (D // 2) + o_dim[None, :], b_pairs.to(tl.int8), mask=m_block)


@triton.jit(do_not_specialize=["first_row", "length", "segments", "s_segment"])
def derive_kernel(
    p_weights, p_order, p_mean_squares, p_covariance, p_noise, p_variances, p_slopes, p_slope_units, p_ordered,
    first_row, length, segments, s_segment,
    SEGMENT: tl.constexpr, FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program a (part, KV head, row): part 0 is the averages, the others are columns of slopes."""
    i_part, i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_group = (first_row + i_row) * tl.num_programs(1) + i_head
    if i_part == 0:
        p_ordered += (i_row * tl.num_programs(1) + i_head) * segments * 2 * D
        average_channels(
            p_weights + i_group * s_segment * D, p_order + i_group * s_segment * D,
            p_mean_squares + i_group * s_segment, p_noise + i_group * D, p_variances + i_group * D, p_ordered,
            length, segments, SEGMENT, FOURS, TWOS, ONES, D, BLOCK_D, BLOCK_S,
        )  # fmt: skip
    else:
        p_covariance += i_group * V * D
        p_slopes += i_group * V * (D // 2)
        round_slopes(p_covariance, p_slopes, p_slope_units + i_group * D, (i_part - 1) * COLUMNS, D, V, BLOCK_V)


@functools.cache
def _bind_deriving(layout: Layout, value_dim: int, segment: int) -> Launches:
    wide = triton.next_power_of_2(layout.dim)
    sizes = find_sizes(layout, segment)
    sizes |= {"D": layout.dim, "BLOCK_D": wide, "V": value_dim, "BLOCK_V": triton.next_power_of_2(value_dim)}
    return Launches(**sizes, BLOCK_S=NUMBERS // wide, num_warps=4)


def derive(sketch: Sketch, rows: slice, length: int, covariance: Tensor) -> None:
    """Write `noise` and `variances`, `slopes` and `slope_units` of rows of `length` tokens into a sketch's tensors
    `[batch, kv_heads, ...]`, all contiguous, from its segments and `covariance`, float32 `[batch, kv_heads, value_dim,
    dim]`, contiguous. All lie on one device; there are up to 256 channels."""
    layout, segments = sketch.layout, definition.count_segments(length)
    first, stop, _ = rows.indices(len(covariance))
    heads, value_dim, dim = covariance.shape[1:]
    # Scratch of `average_channels`: what each segment adds to `noise` and to `variances`, by channel.
    segment_terms = torch.empty(stop - first, heads, segments, 2, dim, dtype=torch.float32, device=covariance.device)
    grid = 1 + triton.cdiv(dim // 2, COLUMNS.value), heads, stop - first
    with at_device(covariance.device):
        _bind_deriving(layout, value_dim, definition.SEGMENT_TOKENS).launch(
            derive_kernel, grid, (covariance.device,),
            sketch.weights, sketch.order, sketch.mean_squares, covariance,
            sketch.noise, sketch.variances, sketch.slopes, sketch.slope_units, segment_terms,
            first, length, segments, sketch.units.shape[2],
        )  # fmt: skip
