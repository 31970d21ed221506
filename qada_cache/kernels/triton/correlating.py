"""Means and covariances that take in tokens: `correlating.take_in_by_torch`, in two launches. Names are as in
`kernels.py`.

`correlate_kernel` finds those of each chunk of tokens, and `merge_kernel` merges them, one chunk after the other, so
that the same tokens give the same numbers in every run.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from .blocks import BLOCK
from .coding import align
from .direct import at_device
from .launching import Launches

CHUNK = tl.constexpr(512)  # tokens
TOKENS, COLUMNS = tl.constexpr(32), 64  # of a chunk that are multiplied at once; of a covariance for one program
MERGED = 2048  # numbers of a covariance that a program merges
UNSPECIALIZED = [
    "s_row", "s_head", "s_token", "s_other_row", "s_other_head", "s_other_token", "count", "tokens", "chunks",
]  # fmt: skip


@triton.jit
def load_tokens(p_tokens, s_token, at, stop, o_dim, D: tl.constexpr):
    """`TOKENS` tokens from `at` on, float32 [TOKENS, channels], of which those from `stop` on are zeros; and which are
    there."""
    o_tokens = at + tl.arange(0, TOKENS)
    m_block = (o_tokens < stop)[:, None] & (o_dim < D)[None, :]
    p_block = p_tokens + (o_tokens.to(tl.int64) * s_token * BLOCK)[:, None] + o_dim[None, :]
    return tl.load(p_block, mask=m_block, other=0.0).to(tl.float32), m_block


@triton.jit
def average(p_tokens, s_token, start, stop, o_dim, D: tl.constexpr):
    """The mean of tokens `start..stop`, in these channels."""
    b_sum = tl.zeros([TOKENS, o_dim.shape[0]], tl.float32)
    for at in range(start, stop, TOKENS):
        b_sum += load_tokens(p_tokens, s_token, at, stop, o_dim, D)[0]
    return tl.sum(b_sum, axis=0) / (stop - start).to(tl.float32)


@triton.jit
def keep_mean(p_found, p_mean, b_mean, i_chunk, chunks, count, o_dim, m_dim, D: tl.constexpr):
    """A chunk's mean; behind those of all `chunks` the one that is held, as `merge_kernel` writes to that."""
    tl.store(p_found + i_chunk * D + o_dim, b_mean, mask=m_dim)
    if i_chunk == 0:
        b_held = tl.load(p_mean + o_dim, mask=m_dim & (count > 0), other=0.0)
        tl.store(p_found + chunks * D + o_dim, b_held, mask=m_dim)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def correlate_kernel(
    p_left, p_right, p_left_mean, p_right_mean, p_left_found, p_right_found, p_products,
    s_row, s_head, s_token, s_other_row, s_other_head, s_other_token, count, tokens, chunks,
    V: tl.constexpr, BLOCK_V: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the means of each chunk, and the sum of products of deviations from them, [V, D]. There is one program for
    each (chunk and `COLUMNS` channels of `p_right`, head, row).

    `p_left` is `[rows, heads, tokens, V]`, `p_right` `[rows, heads, tokens, D]`; strides are in blocks of `BLOCK`. The
    means are `[rows, heads, chunks + 1, *]`, products `[rows, heads, chunks, V, D]`.
    """
    i_chunk, i_tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    i_head, i_row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_group = i_row * tl.num_programs(1) + i_head
    o_value, o_dim = tl.arange(0, BLOCK_V), i_tile * COLUMNS + tl.arange(0, COLUMNS)
    p_left += (i_row * s_row + i_head * s_head) * BLOCK
    p_right += (i_row * s_other_row + i_head * s_other_head) * BLOCK
    start = i_chunk * CHUNK
    stop = tl.minimum(start + CHUNK, tokens)
    b_left_mean = average(p_left, s_token, start, stop, o_value, V)
    b_right_mean = average(p_right, s_other_token, start, stop, o_dim, D)
    b_products = tl.zeros([BLOCK_V, COLUMNS], tl.float32)
    for at in range(start, stop, TOKENS):
        b_left, m_left = load_tokens(p_left, s_token, at, stop, o_value, V)
        b_right, m_right = load_tokens(p_right, s_other_token, at, stop, o_dim, D)
        b_left = tl.where(m_left, b_left - b_left_mean[None, :], 0.0)
        b_right = tl.where(m_right, b_right - b_right_mean[None, :], 0.0)
        # Three products of tensor cores: numbers are split in two, which together have 22 bits.
        b_products = tl.dot(tl.trans(b_left), b_right, b_products, input_precision="tf32x3")
    p_left_found += i_group * (chunks + 1) * V
    p_right_found += i_group * (chunks + 1) * D
    keep_mean(
        p_right_found, p_right_mean + i_group * D, b_right_mean, i_chunk, chunks, count, o_dim, o_dim < D, D
    )  # fmt: skip
    if i_tile == 0:
        keep_mean(
            p_left_found, p_left_mean + i_group * V, b_left_mean, i_chunk, chunks, count, o_value, o_value < V, V
        )  # fmt: skip
    p_products += (i_group * chunks + i_chunk) * V * D
    p_block = p_products + o_value[:, None] * D + o_dim[None, :]
    tl.store(p_block, b_products, mask=(o_value < V)[:, None] & (o_dim < D)[None, :])


@triton.jit(do_not_specialize=["count", "tokens", "chunks"])
def merge_kernel(
    p_left_found, p_right_found, p_products, p_left_mean, p_right_mean, p_covariance, count, tokens, chunks,
    V: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Chan's merge of what `correlate_kernel` found into the means and the covariance [V, D] of `count` tokens, of
    which nothing is read if there are none; one program a (`BLOCK_R` rows of a covariance, head, row)."""
    i_block, i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_group = i_row * tl.num_programs(1) + i_head
    o_row, o_dim = i_block * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    m_row, m_dim = o_row < V, o_dim < D
    m_block = m_row[:, None] & m_dim[None, :]
    o_block = o_row[:, None] * D + o_dim[None, :]
    p_left_found += i_group * (chunks + 1) * V + o_row
    p_right_found += i_group * (chunks + 1) * D + o_dim
    p_products += i_group * chunks * V * D
    p_covariance += i_group * V * D + o_block
    b_left = tl.load(p_left_found + chunks * V, mask=m_row, other=0.0)
    b_right = tl.load(p_right_found + chunks * D, mask=m_dim, other=0.0)
    held = count.to(tl.float32)
    b_sum = tl.load(p_covariance, mask=m_block & (count > 0), other=0.0) * held
    for i_chunk in range(chunks):
        new = tl.minimum(tokens - i_chunk * CHUNK, CHUNK).to(tl.float32)
        share = new / (held + new)
        b_left_off = tl.load(p_left_found + i_chunk * V, mask=m_row, other=0.0) - b_left
        b_right_off = tl.load(p_right_found + i_chunk * D, mask=m_dim, other=0.0) - b_right
        b_sum += tl.load(p_products + i_chunk * V * D + o_block, mask=m_block, other=0.0)
        b_sum += b_left_off[:, None] * b_right_off[None, :] * (held * share)
        b_left += b_left_off * share
        b_right += b_right_off * share
        held += new
    tl.store(p_covariance, b_sum / held, mask=m_block)
    if p_left_mean is not None:
        tl.store(p_left_mean + i_group * V + o_row, b_left, mask=m_row)
    if i_block == 0:
        tl.store(p_right_mean + i_group * D + o_dim, b_right, mask=m_dim)


@functools.cache
def _bind_correlating(left_dim: int, right_dim: int) -> tuple[Launches, int, Launches, int]:
    """Launches of `correlate_kernel`, and columns of the covariance that one of its programs takes; launches of
    `merge_kernel`, and rows that one of its programs takes."""
    wide, block = (max(16, triton.next_power_of_2(dim)) for dim in (right_dim, left_dim))
    columns, rows = min(COLUMNS if block < 256 else COLUMNS // 2, wide), MERGED // wide
    correlate = Launches(
        V=left_dim, BLOCK_V=block, D=right_dim, COLUMNS=columns, TILES=triton.cdiv(right_dim, columns),
        num_warps=8 if block >= 128 else 4,
    )  # fmt: skip
    return correlate, columns, Launches(V=left_dim, D=right_dim, BLOCK_D=wide, BLOCK_R=rows, num_warps=4), rows


def take_in(count: int, means: tuple[Tensor, Tensor], covariance: Tensor, left: Tensor, right: Tensor) -> None:
    """As `correlating.take_in_by_torch`, of `left` `[rows, heads, tokens, n]` and `right` `[rows, heads, tokens, m]`.
    `n` and `m` are multiples of 8, up to 256. `means` and `covariance` are contiguous."""
    alike, (batch, heads, tokens, left_dim), right_dim = left is right, left.shape, right.shape[3]
    left, blocks = align(left)
    right, other_blocks = (left, blocks) if alike else align(right)
    correlate, columns, merge, rows = _bind_correlating(left_dim, right_dim)
    chunks, variant = -(-tokens // CHUNK.value), (left.dtype, right.dtype, left.device, alike)
    # Scratch between the kernels: means of `left` and of `right`, and products; in elements of a head.
    sizes = (chunks + 1) * left_dim, (chunks + 1) * right_dim, chunks * left_dim * right_dim
    scratch = covariance.new_empty(batch * heads * sum(sizes)).split([batch * heads * size for size in sizes])
    counts = count, tokens, chunks
    with at_device(left.device):
        correlate.launch(
            correlate_kernel, (chunks * -(-right_dim // columns), heads, batch), variant,
            left, right, *means, *scratch, *blocks, *other_blocks, *counts,
        )  # fmt: skip
        merge.launch(
            merge_kernel, (-(-left_dim // rows), heads, batch), variant,
            *scratch, None if alike else means[0], means[1], covariance, *counts,
        )  # fmt: skip
