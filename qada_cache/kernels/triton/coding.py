"""Sketches of keys as they are stored: what `codec.quantize` computes, of all segments at once, in three launches.

`describe_kernel` finds what a segment is coded by: its centre, and its channels' order and weights. `code_kernel` codes
blocks of tokens, and `scale_kernel` rounds their scales to the segment's unit. All write straight into a sketch's
tensors. Names are as in `kernels.py`.

The same tokens give the same code in whatever batch and bulk they lie: what is compiled, and so the order of sums,
depends on dtype and layout alone, not on strides, lengths or addresses.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import sketch as definition
from ...sketch import STEPS, Layout, codec
from ...sketch.codec import Sketch
from .blocks import BLOCK, WORD_BITS, rotate, to_nearest
from .direct import at_device
from .launching import Launches

ALIGNMENT = 16  # bytes, of addresses that are read at once
DESCRIBED_TOKENS, DESCRIBED_WARPS = 64, 8  # that a program of `describe_kernel` reads at once
CODED_NUMBERS = 2048  # of tokens that a program of `code_kernel` codes: 16 for each lane of four warps
# What the definition in Python says.
ROUNDINGS, SCALE_LEVELS = tl.constexpr(codec.ROUNDINGS), tl.constexpr(float(codec.SCALE_LEVELS))
MIN_ENERGY, MIN_VARIANCE = tl.constexpr(codec.MIN_ENERGY), tl.constexpr(codec.MIN_VARIANCE)
MIN_MEAN = tl.constexpr(codec.MIN_MEAN)
STEP_4, STEP_2, STEP_1 = (tl.constexpr(STEPS[bits] / 2) for bits in (4, 2, 1))
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# Numbers that follow the tokens or where they lie: nothing is compiled anew for them.
UNSPECIALIZED = ["s_row", "s_head", "s_token", "first_row", "first", "tokens", "segments", "s_segment", "s_tokens"]


@triton.jit
def find_mean(b_values, m_dim, D: tl.constexpr):
    """The mean of the values [BLOCK_D] of all channels."""
    return tl.sum(tl.where(m_dim, b_values, 0.0), axis=0) / D


@triton.jit
def set_floor(b_values, mean, SHARE: tl.constexpr):
    """`codec.set_floor`, of values whose mean is known."""
    return tl.where(mean > MIN_MEAN, tl.maximum(b_values, mean * SHARE), 1.0)


@triton.jit
def round_to_bfloat16(b_values):
    """Float32 to the nearest of bfloat16, of two the even one: the interpreter cuts the rest off."""
    b_bits = b_values.to(tl.int32, bitcast=True)
    b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & -65536
    return b_bits.to(tl.float32, bitcast=True)


@triton.jit
def by_bits(o_dim, four, two, one, none, FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr):
    """For each channel in its place, what is said of its bits."""
    FIRST_TWO: tl.constexpr = WORD_BITS // 4 * FOURS  # noqa: N806 - a compile-time constant
    FIRST_ONE: tl.constexpr = FIRST_TWO + WORD_BITS // 2 * TWOS  # noqa: N806 - a compile-time constant
    CODED: tl.constexpr = FIRST_ONE + WORD_BITS * ONES  # noqa: N806 - a compile-time constant
    b_found = tl.where(o_dim < FIRST_ONE, two, tl.where(o_dim < CODED, one, none))
    return tl.where(o_dim < FIRST_TWO, four, b_found)


@triton.jit
def find_words(o_dim, FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr):
    """For each channel in its place, the word of a code that holds it; as many as there are, if none does."""
    FIRST_TWO: tl.constexpr = WORD_BITS // 4 * FOURS  # noqa: N806 - a compile-time constant
    FIRST_ONE: tl.constexpr = FIRST_TWO + WORD_BITS // 2 * TWOS  # noqa: N806 - a compile-time constant
    o_two, o_one = FOURS + (o_dim - FIRST_TWO) // 16, FOURS + TWOS + (o_dim - FIRST_ONE) // 32
    return by_bits(o_dim, o_dim // 8, o_two, o_one, FOURS + TWOS + ONES, FOURS, TWOS, ONES)


@triton.jit
def find_shifts(o_dim, FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr):
    """The first bit of each channel: of a word's channels the one in place `4 p + j` lies in byte `j`, from bit `p *
    bits` on."""
    FIRST_TWO: tl.constexpr = WORD_BITS // 4 * FOURS  # noqa: N806 - a compile-time constant
    FIRST_ONE: tl.constexpr = FIRST_TWO + WORD_BITS // 2 * TWOS  # noqa: N806 - a compile-time constant
    o_within = by_bits(o_dim, o_dim % 8, (o_dim - FIRST_TWO) % 16, (o_dim - FIRST_ONE) % 32, 0, FOURS, TWOS, ONES)
    return o_within // 4 * by_bits(o_dim, 4, 2, 1, 0, FOURS, TWOS, ONES) + o_within % 4 * 8


@triton.jit(do_not_specialize=UNSPECIALIZED)
def describe_kernel(
    p_keys, p_energies, p_centres, p_order, p_weights,
    s_row, s_head, s_token, first_row, first, tokens, segments, s_segment,
    SEGMENT: tl.constexpr, FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Centre, order and weights; one program a (segment, KV head, row).

    `p_keys` are of `tokens` tokens in `segments` segments, all of `SEGMENT` tokens but the last one; strides are in
    blocks of `BLOCK`. They go to row `first_row` of the sketch, from segment `first` of `s_segment` on.
    """
    i_segment, i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_dim = tl.arange(0, BLOCK_D)
    m_dim = o_dim < D
    p_keys += (i_row * s_row + i_head * s_head) * BLOCK
    start = i_segment * SEGMENT
    stop = tl.where(i_segment == segments - 1, tokens, start + SEGMENT)
    count = (stop - start).to(tl.float32)
    b_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for at in range(start, stop, BLOCK_N):
        o_tokens = at + tl.arange(0, BLOCK_N)
        p_block = p_keys + (o_tokens.to(tl.int64) * s_token * BLOCK)[:, None] + o_dim[None, :]
        b_sum += tl.load(p_block, mask=(o_tokens < stop)[:, None] & m_dim[None, :], other=0.0).to(tl.float32)
    b_centre = round_to_bfloat16(tl.sum(b_sum, axis=0) / count)
    b_square = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for at in range(start, stop, BLOCK_N):
        o_tokens = at + tl.arange(0, BLOCK_N)
        m_keys = (o_tokens < stop)[:, None] & m_dim[None, :]
        p_block = p_keys + (o_tokens.to(tl.int64) * s_token * BLOCK)[:, None] + o_dim[None, :]
        b_keys = tl.load(p_block, mask=m_keys, other=0.0).to(tl.float32)
        b_off = tl.where(m_keys, b_keys - b_centre[None, :], 0.0)
        b_square += b_off * b_off
    b_variances = tl.sum(b_square, axis=0) / count
    b_variances = set_floor(b_variances, find_mean(b_variances, m_dim, D), MIN_VARIANCE)
    b_needs = b_variances
    if p_energies is not None:
        b_energies = tl.load(p_energies + i_head * D + o_dim, mask=m_dim, other=0.0)
        b_needs *= set_floor(b_energies, find_mean(b_energies, m_dim, D), MIN_ENERGY)
    # Numbers above 0 are in the order of their bits. Channels alike stay in theirs, those of no key behind.
    b_bits = tl.where(m_dim, b_needs.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    b_order = (tl.sort(((0x7FFFFFFF - b_bits).to(tl.int64) << 16) | o_dim) & 0xFFFF).to(tl.int32)
    b_steps = by_bits(o_dim, STEP_4, STEP_2, STEP_1, 1.0, FOURS, TWOS, ONES)
    b_deviations = tl.sqrt_rn(tl.gather(b_variances, b_order, 0))
    b_weights = round_to_bfloat16(tl.div_rn(1.0 / b_deviations, b_steps))

    i_place = ((first_row + i_row) * tl.num_programs(1) + i_head) * s_segment + first + i_segment
    tl.store(p_centres + i_place * D + o_dim, b_centre.to(tl.bfloat16), mask=m_dim)
    tl.store(p_order + i_place * D + o_dim, b_order.to(p_order.dtype.element_ty), mask=m_dim)
    tl.store(p_weights + i_place * D + o_dim, b_weights.to(tl.bfloat16), mask=m_dim)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def code_kernel(
    p_keys, p_energies, p_centres, p_order, p_weights, p_codes, p_found,
    s_row, s_head, s_token, first_row, first, tokens, segments, s_segment, s_tokens,
    SEGMENT: tl.constexpr, FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Codes, and the scales `p_found` [rows, heads, tokens] before they are rounded; one program a (block of tokens, KV
    head, row). The sketch has room for `s_tokens` tokens; others as for `describe_kernel`."""
    FIRST_TWO: tl.constexpr = WORD_BITS // 4 * FOURS  # noqa: N806 - a compile-time constant
    FIRST_ONE: tl.constexpr = FIRST_TWO + WORD_BITS // 2 * TWOS  # noqa: N806 - a compile-time constant
    CODED: tl.constexpr = FIRST_ONE + WORD_BITS * ONES  # noqa: N806 - a compile-time constant
    WORDS: tl.constexpr = FOURS + TWOS + ONES  # noqa: N806 - a compile-time constant
    PARTS: tl.constexpr = BLOCK_D // BLOCK  # noqa: N806 - a compile-time constant
    i_block, i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_segment = tl.minimum(i_block * BLOCK_N // SEGMENT, segments - 1)
    i_group = (first_row + i_row) * tl.num_programs(1) + i_head
    o_tokens, o_dim = i_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_tokens, m_dim, m_coded = o_tokens < tokens, o_dim < D, o_dim < CODED
    o_place = (i_group * s_segment + first + i_segment) * D
    b_order = tl.load(p_order + o_place + o_dim, mask=m_dim, other=0).to(tl.int32)
    b_weights = tl.load(p_weights + o_place + o_dim, mask=m_dim, other=1.0).to(tl.float32)
    b_importance = tl.zeros([BLOCK_D], tl.float32) + 1.0
    if p_energies is not None:
        p_energies += i_head * D
        mean = find_mean(tl.load(p_energies + o_dim, mask=m_dim, other=0.0), m_dim, D)
        b_importance = set_floor(tl.load(p_energies + b_order, mask=m_dim, other=0.0), mean, MIN_ENERGY)
    b_importance = tl.div_rn(b_importance, b_weights * b_weights).reshape(PARTS, BLOCK)
    b_importance = (tl.sum(b_importance, axis=1) / BLOCK)[:, None].broadcast_to(PARTS, BLOCK).reshape(BLOCK_D)
    b_importance = tl.where(m_coded, b_importance, 0.0)[None, :]

    b_centre = tl.load(p_centres + o_place + b_order, mask=m_coded, other=0.0).to(tl.float32)
    p_keys += (i_row * s_row + i_head * s_head) * BLOCK
    p_block = p_keys + (o_tokens.to(tl.int64) * s_token * BLOCK)[:, None] + b_order[None, :]
    m_keys = m_tokens[:, None] & m_coded[None, :]
    b_keys = tl.load(p_block, mask=m_keys, other=0.0).to(tl.float32)
    b_rotated = rotate(tl.where(m_keys, (b_keys - b_centre[None, :]) * b_weights[None, :], 0.0), BLOCK)
    b_steps = by_bits(o_dim, STEP_4, STEP_2, STEP_1, 0.0, FOURS, TWOS, ONES)[None, :]
    b_half = by_bits(o_dim, 8.0, 2.0, 1.0, 1.0, FOURS, TWOS, ONES)[None, :]  # of a value's levels
    b_off = b_rotated * b_steps
    b_scale = tl.sqrt_rn(tl.sum(b_off * b_off, axis=1) / CODED)
    b_level = b_rotated
    for _ in range(ROUNDINGS):  # each to the nearest levels, then the scale that leaves these the least error
        b_step = tl.maximum(2 * b_scale, TINY)[:, None].broadcast_to(b_rotated.shape)
        b_level = tl.floor(tl.div_rn(b_rotated, b_step))
        b_level = tl.minimum(tl.maximum(b_level, -b_half), b_half - 1)
        b_odd = 2 * b_level + 1
        b_weighed = b_importance * b_odd
        b_scale = tl.div_rn(tl.sum(b_weighed * b_rotated, axis=1), tl.sum(b_weighed * b_odd, axis=1))
    tl.store(p_found + (i_row * tl.num_programs(1) + i_head) * tokens + o_tokens, b_scale, mask=m_tokens)

    b_code = tl.where(m_coded[None, :], (b_level + b_half).to(tl.int32), 0)
    b_code = b_code << find_shifts(o_dim, FOURS, TWOS, ONES)[None, :]
    b_parts = tl.sum(b_code.reshape(BLOCK_N, PARTS, BLOCK), axis=2)  # of one word each
    o_word = find_words(tl.arange(0, PARTS) * BLOCK, FOURS, TWOS, ONES)
    p_codes += i_group * WORDS * s_tokens + first * SEGMENT
    for word in range(WORDS):
        b_word = tl.sum(tl.where((o_word == word)[None, :], b_parts, 0), axis=1)
        tl.store(p_codes + word * s_tokens + o_tokens, b_word, mask=m_tokens)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scale_kernel(
    p_found, p_scales, p_units, p_mean_squares,
    first_row, first, tokens, segments, s_segment, s_tokens,
    SEGMENT: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Rounded scales, a segment's unit and the mean square; one program a (segment, KV head, row). `BLOCK_S` holds the
    longest segment."""
    i_segment, i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_group = (first_row + i_row) * tl.num_programs(1) + i_head
    start = i_segment * SEGMENT
    stop = tl.where(i_segment == segments - 1, tokens, start + SEGMENT)
    o_tokens = start + tl.arange(0, BLOCK_S)
    m_tokens = o_tokens < stop
    p_found += (i_row * tl.num_programs(1) + i_head) * tokens
    b_scale = tl.load(p_found + o_tokens, mask=m_tokens, other=0.0)
    unit = tl.div_rn(tl.max(b_scale, axis=0), SCALE_LEVELS)
    b_scale = to_nearest(tl.div_rn(b_scale, (tl.zeros([BLOCK_S], tl.float32) + tl.maximum(unit, TINY))))
    b_scale = tl.minimum(tl.maximum(b_scale, 0.0), SCALE_LEVELS)
    tl.store(p_scales + i_group * s_tokens + first * SEGMENT + o_tokens, b_scale.to(tl.uint8), mask=m_tokens)
    b_scale *= unit
    mean_square = tl.sum(b_scale * b_scale, axis=0) / (stop - start).to(tl.float32)
    p_units += i_group * s_segment + first + i_segment
    tl.store(p_units, unit)
    tl.store(p_mean_squares + i_group * s_segment + first + i_segment, mean_square)


def find_sizes(layout: Layout, segment: int) -> dict[str, int]:
    """The compile-time sizes of a sketch's segments and words, for every kernel."""
    return {"SEGMENT": segment, **dict(zip(("FOURS", "TWOS", "ONES"), layout.words, strict=True))}


@functools.cache
def _bind_coding(layout: Layout, segment: int, last: int) -> tuple[Launches, Launches, Launches, int]:
    """The launches of the three kernels for segments of these sizes, and the tokens of a `code_kernel` program."""
    wide = triton.next_power_of_2(layout.dim)
    sizes = find_sizes(layout, segment) | {"D": layout.dim, "BLOCK_D": wide}
    at_once = min(CODED_NUMBERS // wide, segment)
    return (
        Launches(**sizes, BLOCK_N=DESCRIBED_TOKENS, num_warps=DESCRIBED_WARPS),
        Launches(**sizes, BLOCK_N=at_once, num_warps=4),
        Launches(SEGMENT=segment, BLOCK_S=triton.next_power_of_2(segment + last), num_warps=4),
        at_once,
    )


def align(tokens: Tensor) -> tuple[Tensor, list[int]]:
    """Tokens `[rows, kv_heads, tokens, dim]`, copied if kernels could not read them in blocks of channels, and the
    strides of the first three dimensions in such blocks."""
    of_row, of_head, of_token, of_channel = tokens.stride()
    block = definition.BLOCK  # a power of two
    if of_channel != 1 or (of_row | of_head | of_token) & (block - 1) or tokens.data_ptr() % ALIGNMENT:
        tokens = tokens.clone(memory_format=torch.contiguous_format)
        of_row, of_head, of_token, _ = tokens.stride()
    return tokens, [of_row // block, of_head // block, of_token // block]


def code_segments(sketch: Sketch, rows: slice, first: int, keys: Tensor, energies: Tensor | None) -> None:
    """Write what `codec.quantize_segments` returns for `keys` `[rows, kv_heads, tokens, dim]` into a sketch's tensors
    `[batch, kv_heads, ...]`, all contiguous, from these rows' segment `first` on. `energies` are float32 `[kv_heads,
    dim]`, contiguous. All tensors lie on one device; heads have up to 256 channels."""
    keys, blocks = align(keys)
    layout, segment, last = sketch.layout, definition.SEGMENT_TOKENS, definition.LAST_TOKENS
    describe, code, scale, at_once = _bind_coding(layout, segment, last)
    batch, heads, tokens = keys.shape[:3]
    segments = definition.count_segments(tokens) if tokens % segment else tokens // segment
    found = torch.empty(batch, heads, tokens, dtype=torch.float32, device=keys.device)
    places = rows.indices(len(sketch.scales))[0], first, tokens, segments, sketch.units.shape[2]
    described = keys, energies, sketch.centres, sketch.order, sketch.weights
    grid, room, variant = (segments, heads, batch), sketch.scales.shape[2], (keys.dtype, keys.device, energies is None)
    with at_device(keys.device):
        describe.launch(describe_kernel, grid, variant, *described, *blocks, *places)
        coded = (*described, sketch.codes, found, *blocks, *places, room)
        code.launch(code_kernel, (triton.cdiv(tokens, at_once), heads, batch), variant, *coded)
        rounded = found, sketch.scales, sketch.units, sketch.mean_squares
        scale.launch(scale_kernel, grid, variant, *rounded, *places, room)
