"""A token's key and value put into their columns, and what heads decide by: one launch before those of a decode step.

It is `criterion.gaussian_log_bulk` of one query a row, by one prompt's moments or two, and takes the place of some ten
operations of torch's. Names are as in `kernels.py`.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operands import Query
from .launching import Launch, Launches, Steps

HEADS = 1  # query heads of a group that one program takes: each program reads all of a covariance
NUMBERS = 64  # of a covariance in the registers of a thread, which are all on their way at once


@triton.jit
def estimate_log_bulk(
    p_query, p_mean, p_covariance, p_log_tokens, s_query_head, o_head, m_head, scaling,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The estimates of query heads `o_head` of one group, by the moments of one KV head: float32 [BLOCK_H]."""
    o_dim = tl.arange(0, BLOCK_D)
    m_dim = o_dim < D
    m_query = m_head[:, None] & m_dim[None, :]
    b_query = tl.load(p_query + o_head[:, None] * s_query_head + o_dim[None, :], mask=m_query, other=0.0)
    b_sums = tl.zeros([BLOCK_H, BLOCK_R, BLOCK_D], tl.float32)
    for first in range(0, D, BLOCK_R):
        o_row = first + tl.arange(0, BLOCK_R)
        m_row = o_row < D
        p_rows = p_covariance + o_row[:, None] * D + o_dim[None, :]
        b_rows = tl.load(p_rows, mask=m_row[:, None] & m_dim[None, :], other=0.0)
        p_along = p_query + o_head[:, None] * s_query_head + o_row[None, :]
        b_along = tl.load(p_along, mask=m_head[:, None] & m_row[None, :], other=0.0).to(tl.float32)
        b_sums += b_along[:, :, None] * b_rows[None, :, :]
    b_mean = tl.load(p_mean + o_dim, mask=m_dim, other=0.0)
    b_sum = b_mean[None, :] + 0.5 * scaling * tl.sum(b_sums, axis=1)
    return tl.load(p_log_tokens) + scaling * tl.sum(b_sum * b_query.to(tl.float32), axis=1)


# Nothing but a covariance is long enough to be read in pieces of 16 bytes, and Triton would compile anew for a place,
# a stride or an address that becomes a multiple of them.
@triton.jit(
    do_not_specialize=[
        "s_query_row", "s_query_head", "s_key_row", "s_key_head", "s_value_row", "s_value_head",
        "s_near_key_row", "s_near_key_head", "s_near_key_token",
        "s_near_value_row", "s_near_value_head", "s_near_value_token",
        "s_moments", "s_log_tokens", "s_other_moments", "s_other_log_tokens", "place",
    ],
    do_not_specialize_on_alignment=[
        "p_query", "p_key", "p_value", "p_near_keys", "p_near_values", "p_place", "p_mean", "p_log_tokens",
        "p_other_mean", "p_other_log_tokens", "p_log_bulk",
    ],
)  # fmt: skip
def store_kernel(
    p_query, p_key, p_value, p_near_keys, p_near_values, p_place, p_log_bulk,
    p_mean, p_covariance, p_log_tokens, p_other_mean, p_other_covariance, p_other_log_tokens,
    s_query_row, s_query_head, s_key_row, s_key_head, s_value_row, s_value_head,
    s_near_key_row, s_near_key_head, s_near_key_token, s_near_value_row, s_near_value_head, s_near_value_token,
    s_moments, s_log_tokens, s_other_moments, s_other_log_tokens, place, scaling,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program a (KV head, row, `BLOCK_H` query heads); the first of a KV head stores its key and value.

    The column is `p_place`'s where that is given, and `place` elsewhere. `p_log_bulk` is contiguous. Without `p_mean`
    nothing is estimated; of two estimates the larger one counts, and a number before a nan.
    """
    i_head, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if tl.program_id(2) == 0:
        column = place.to(tl.int64)
        if p_place is not None:
            column = tl.load(p_place)
        o_dim = tl.arange(0, BLOCK_D)
        b_key = tl.load(p_key + i_row * s_key_row + i_head * s_key_head + o_dim, mask=o_dim < D)
        p_near_keys += i_row * s_near_key_row + i_head * s_near_key_head + column * s_near_key_token
        tl.store(p_near_keys + o_dim, b_key, mask=o_dim < D)
        if V > 0:
            o_value = tl.arange(0, BLOCK_V)
            b_value = tl.load(p_value + i_row * s_value_row + i_head * s_value_head + o_value, mask=o_value < V)
            p_near_values += i_row * s_near_value_row + i_head * s_near_value_head + column * s_near_value_token
            tl.store(p_near_values + o_value, b_value, mask=o_value < V)
    if p_mean is not None:
        o_head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
        m_head = o_head < G
        p_query += i_row * s_query_row + i_head * G * s_query_head
        i_moments = i_row * s_moments + i_head
        b_found = estimate_log_bulk(
            p_query, p_mean + i_moments * D, p_covariance + i_moments * D * D, p_log_tokens + i_row * s_log_tokens,
            s_query_head, o_head, m_head, scaling, D, BLOCK_D, BLOCK_H, BLOCK_R,
        )  # fmt: skip
        if p_other_mean is not None:
            i_moments = i_row * s_other_moments + i_head
            b_other = estimate_log_bulk(
                p_query, p_other_mean + i_moments * D, p_other_covariance + i_moments * D * D,
                p_other_log_tokens + i_row * s_other_log_tokens,
                s_query_head, o_head, m_head, scaling, D, BLOCK_D, BLOCK_H, BLOCK_R,
            )  # fmt: skip
            b_found = tl.where((b_other > b_found) | (b_found != b_found), b_other, b_found)
        tl.store(p_log_bulk + (i_row * tl.num_programs(0) + i_head) * G + o_head, b_found, mask=m_head)


class Storer:
    """Stores one token a row in each step, in near buffers that stay where they are."""

    def __init__(self, near_keys: Tensor, near_values: Tensor, heads: int) -> None:
        """Near buffers as in `Operands`, whose last dimension is contiguous, and the number of query heads."""
        (batch, kv_heads, _, dim), value_dim = near_keys.shape, near_values.shape[3]
        self._near, self._kv_heads, group = (near_keys, near_values), kv_heads, heads // kv_heads
        self._near_strides = *near_keys.stride()[:3], *near_values.stride()[:3]
        with torch.inference_mode(False):  # it is written to later, perhaps outside inference mode
            # Every step's: kernels have read one step's estimates before the next one's are written.
            self.log_bulk = torch.empty(batch, kv_heads, group, 1, dtype=torch.float32, device=near_keys.device)
        taken, block = min(triton.next_power_of_2(group), HEADS), triton.next_power_of_2(dim)
        warps = 4 if block < 128 else 8
        self._store_grid, self._grid = (kv_heads, batch, 1), (kv_heads, batch, triton.cdiv(group, taken))
        self._launches = Launches(
            G=group, D=dim, BLOCK_D=block, V=value_dim, BLOCK_V=triton.next_power_of_2(value_dim), BLOCK_H=taken,
            BLOCK_R=max(1, min(block, 32 * warps * NUMBERS // (block * taken))), num_warps=warps,
        )  # fmt: skip
        self._steps = Steps()

    def store(self, query: Query, place: int | Tensor) -> None:
        """Put `query.unstored` into column `place`, which a tensor int64 `[1]` has where a graph is captured.
        Estimate `query.log_bulk` by `query.moments`; without them it stays as it is."""
        assert query.unstored is not None
        states, (key, value), moments = query.states, query.unstored, query.moments
        of_query, of_key, of_value = states.stride(), key.stride(), value.stride()
        if not of_query[3] == of_key[3] == of_value[3] == 1:  # channels are read side by side
            states, key, value = states.contiguous(), key.contiguous(), value.contiguous()
            of_query, of_key, of_value = states.stride(), key.stride(), value.stride()
        changing: list[Any] = [states, key, value]
        at = [states.data_ptr(), key.data_ptr(), value.data_ptr()]
        variant: tuple[bool, ...] = (isinstance(place, int),)
        from_row_to_row = list[int]()
        for mean, covariance, log_tokens in moments:
            changing += mean, covariance, log_tokens
            at += mean.data_ptr(), covariance.data_ptr(), log_tokens.data_ptr()
            variant += (at[-2] % 16 == 0,)
            # 0, if all rows share one.
            from_row_to_row += 0 if mean.shape[0] == self._kv_heads else self._kv_heads, int(log_tokens.shape[0] > 1)
        changing.append(place)
        at.append(place if isinstance(place, int) else place.data_ptr())
        kind = variant, of_query, of_key, of_value, query.scaling, *from_row_to_row
        self._steps.launch(functools.partial(self._list_launches, kind), changing, at, variant=variant, kind=kind)
        if moments:
            query.log_bulk, query.moments = self.log_bulk, ()
        query.unstored = None

    def _list_launches(self, kind: tuple[Any, ...], *changing: Any) -> list[Launch]:
        """The launch for a `kind` and for what changes, as in `store`."""
        (by_host, *_), of_query, of_key, of_value, scaling, *from_row_to_row = kind
        states, key, value, *moments, place = changing
        there, column = (None, place) if by_host else (place, 0)
        strides = *of_query[:2], *of_key[:2], *of_value[:2], *self._near_strides, *from_row_to_row
        return [(
            self._launches, store_kernel, self._grid if moments else self._store_grid, (
                states, key, value, *self._near, there, self.log_bulk, *moments, *[None] * (6 - len(moments)),
                *strides, *[0] * (4 - len(from_row_to_row)), column, scaling,
            ),
        )]  # fmt: skip
