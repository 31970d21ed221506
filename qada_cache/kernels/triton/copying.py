"""Tokens of all heads copied in one launch. Names are as in `kernels.py`."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .direct import at_device
from .launching import Launches

RUNS = 6  # tensors that one launch copies
ALIGNMENT = 16  # bytes, which are read and written at once
BYTES = 1 << 14  # that a program has under way
# Programs that the bus needs to be busy; more would take processors from what is computed meanwhile.
HOST_PROGRAMS = 32
STRIDES = [f"{of}_{by}_{run}" for run in range(RUNS) for of in ("s", "t") for by in ("row", "head", "token")]


@triton.jit
def copy_run(
    p_source, p_target, s_row, s_head, s_token, t_row, t_head, t_token, tokens, i_block, i_head, i_row,
    VECTOR: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One run's blocks from `i_block` on, as many apart as there are programs; returns the first of the next run's.
    Strides are in vectors of `VECTOR` numbers."""
    o_dim = tl.arange(0, BLOCK_D)
    p_source += (i_row * s_row + i_head * s_head) * VECTOR
    p_target += (i_row * t_row + i_head * t_head) * VECTOR
    blocks, step = tl.cdiv(tokens, BLOCK_N), tl.num_programs(0)
    for block in range(i_block, blocks, step):
        o_tokens = (block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        m_block = (o_tokens < tokens)[:, None] & (o_dim < D)[None, :]
        b_tokens = tl.load(p_source + (o_tokens * s_token * VECTOR)[:, None] + o_dim[None, :], mask=m_block)
        tl.store(p_target + (o_tokens * t_token * VECTOR)[:, None] + o_dim[None, :], b_tokens, mask=m_block)
    return i_block + tl.cdiv(tl.maximum(blocks - i_block, 0), step) * step - blocks


@triton.jit(do_not_specialize=[*STRIDES, *(f"tokens_{run}" for run in range(RUNS))])
def copy_kernel(
    p_source_0, p_target_0, s_row_0, s_head_0, s_token_0, t_row_0, t_head_0, t_token_0, tokens_0,
    p_source_1, p_target_1, s_row_1, s_head_1, s_token_1, t_row_1, t_head_1, t_token_1, tokens_1,
    p_source_2, p_target_2, s_row_2, s_head_2, s_token_2, t_row_2, t_head_2, t_token_2, tokens_2,
    p_source_3, p_target_3, s_row_3, s_head_3, s_token_3, t_row_3, t_head_3, t_token_3, tokens_3,
    p_source_4, p_target_4, s_row_4, s_head_4, s_token_4, t_row_4, t_head_4, t_token_4, tokens_4,
    p_source_5, p_target_5, s_row_5, s_head_5, s_token_5, t_row_5, t_head_5, t_token_5, tokens_5,
    VECTOR: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program a (share of all runs' blocks, head, row). Runs that are not there have no tokens: else Triton
    would compile anew for each number of them."""
    i_block, i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_block = copy_run(
        p_source_0, p_target_0, s_row_0, s_head_0, s_token_0, t_row_0, t_head_0, t_token_0, tokens_0,
        i_block, i_head, i_row, VECTOR, D, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    if tokens_1 > 0:
        i_block = copy_run(
            p_source_1, p_target_1, s_row_1, s_head_1, s_token_1, t_row_1, t_head_1, t_token_1, tokens_1,
            i_block, i_head, i_row, VECTOR, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    if tokens_2 > 0:
        i_block = copy_run(
            p_source_2, p_target_2, s_row_2, s_head_2, s_token_2, t_row_2, t_head_2, t_token_2, tokens_2,
            i_block, i_head, i_row, VECTOR, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    if tokens_3 > 0:
        i_block = copy_run(
            p_source_3, p_target_3, s_row_3, s_head_3, s_token_3, t_row_3, t_head_3, t_token_3, tokens_3,
            i_block, i_head, i_row, VECTOR, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    if tokens_4 > 0:
        i_block = copy_run(
            p_source_4, p_target_4, s_row_4, s_head_4, s_token_4, t_row_4, t_head_4, t_token_4, tokens_4,
            i_block, i_head, i_row, VECTOR, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    if tokens_5 > 0:
        i_block = copy_run(
            p_source_5, p_target_5, s_row_5, s_head_5, s_token_5, t_row_5, t_head_5, t_token_5, tokens_5,
            i_block, i_head, i_row, VECTOR, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip


def can_copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether `copy_tokens` takes these: numbers of one dtype and vectors of as many, at whole `ALIGNMENT`s."""
    dtype, shape = pairs[0][0].dtype, pairs[0][0].shape
    dim, vector = shape[3], ALIGNMENT // dtype.itemsize
    if dim % vector or not shape[2]:
        return False
    for pair in pairs:
        for part in pair:
            of_row, of_head, of_token, of_number = part.stride()
            if part.dtype != dtype or part.shape[3] != dim or of_number != 1:
                return False
            if (of_row | of_head | of_token) & (vector - 1) or part.data_ptr() & (ALIGNMENT - 1):
                return False
    return True


@functools.cache
def _bind_copying(dtype: torch.dtype, dim: int) -> tuple[Launches, int]:
    """And how many tokens a program copies at once."""
    wide, size = triton.next_power_of_2(dim), dtype.itemsize
    block = max(1, BYTES // (wide * size))
    return Launches(VECTOR=ALIGNMENT // size, D=dim, BLOCK_D=wide, BLOCK_N=block, num_warps=4), block


def copy_tokens(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copy sources to targets on the device's current stream, `(target, source)` each, of the same shape `[rows, heads,
    tokens, dim]`, of which tokens alone differ from pair to pair. They lie on the device or in pinned host memory;
    `can_copy` says of which layouts they may be."""
    dtype, (batch, heads, _, dim) = pairs[0][0].dtype, pairs[0][0].shape
    launches, block = _bind_copying(dtype, dim)
    vector, on_host = ALIGNMENT // dtype.itemsize, any(part.device != device for part in pairs[0])
    with at_device(device):
        for first in range(0, len(pairs), RUNS):
            now, arguments, blocks = pairs[first : first + RUNS], list[Any](), 0
            for target, source in now:
                arguments += source, target
                for of_row, of_head, of_token, _ in (source.stride(), target.stride()):
                    arguments += of_row // vector, of_head // vector, of_token // vector
                arguments.append(tokens := target.shape[2])
                blocks += -(-tokens // block)
            arguments += [*arguments[:2], 0, 0, 0, 0, 0, 0, 0] * (RUNS - len(now))
            programs = min(blocks, max(1, HOST_PROGRAMS // (batch * heads))) if on_host else blocks
            launches.launch(copy_kernel, (programs, heads, batch), (device,), *arguments)
