"""Attention of a few tokens' queries to latents on a GPU: all heads share a key, whose first channels are the value.

A program takes a block of queries over a split of the tokens, and reads each token once, or its record, which it
decodes. Names are as in `kernels.py`, but for the sizes of a token: `D` channels, of which the first `R` are the latent
and the value, the others rotary.
"""

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import sketch as definition
from ...sketch import WORD_BITS, Layout
from ...sketch.codec import Sketch
from ...sketch.coded import RecordLayout
from . import sizing
from .blocks import attend, dot, load_tokens
from .coding import find_sizes
from .direct import at_device
from .latent_records import attend_latent_records, count_own_words
from .launching import Launches

# That a program takes at most: their sums of values fill half of its registers. More blocks read tokens more often.
QUERIES, WIDE_QUERIES = 32, 64
WIDE_MEMORY = 144 << 10  # bytes of shared memory that a program may take where there are `WIDE_QUERIES`
SPLIT_TOKENS, MAX_SPLITS = 256, 64  # of a split at least; splits of a row at most
TOKEN_BYTES = 1 << 15  # of the tokens that a program reads at once
RECORDED_TOKENS = 16  # that a program decodes at once
PARTS = 4  # splits whose parts are merged at once


@triton.jit
def store_query_parts(b_max, b_sum, b_out, p_parts, p_lse, o_part, m_query, R: tl.constexpr):
    """Write queries' averages over a split, and the logs of the sums of exponentials, as parts `o_part`."""
    o_rank = tl.arange(0, b_out.shape[1])
    m_out = m_query[:, None] & (o_rank < R)[None, :]
    tl.store(p_parts + o_part[:, None] * R + o_rank[None, :], b_out / b_sum[:, None], mask=m_out)
    tl.store(p_lse + o_part, b_max + tl.log(b_sum), mask=m_query)


# Numbers follow the tokens, the room for them and the heads: nothing is compiled anew for them.
@triton.jit(do_not_specialize=["s_row", "queries", "tokens", "split_tokens"])
def latent_kernel(
    p_query, p_latents, p_parts, p_lse, s_row, queries, tokens, split_tokens, scaling,
    D: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Parts [rows, queries, splits, R] float32 and their `lse`; one program a (split of `split_tokens`, block of
    queries, row). `s_row` is in tokens. Every split has at least one token of a row."""
    i_split, i_block, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_query, o_rank, o_rotary = i_block * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
    m_query, o_row = o_query < queries, i_row * queries + o_query
    p_own = p_query + o_row[:, None] * D
    b_query = tl.load(p_own + o_rank[None, :], mask=m_query[:, None] & (o_rank < R)[None, :], other=0.0)
    m_rotary = m_query[:, None] & (o_rotary < D - R)[None, :]
    b_rotary_query = tl.load(p_own + R + o_rotary[None, :], mask=m_rotary, other=0.0)
    p_latents += i_row * s_row * D
    b_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    b_out = tl.zeros([BLOCK_Q, BLOCK_R], tl.float32)
    last = tl.minimum((i_split + 1) * split_tokens, tokens)
    for start in range(i_split * split_tokens, last, BLOCK_N):
        o_tokens = start + tl.arange(0, BLOCK_N)
        m_tokens = o_tokens < last
        b_latents = load_tokens(p_latents, o_tokens, m_tokens, D, R, BLOCK_R)
        b_rotary = load_tokens(p_latents + R, o_tokens, m_tokens, D, D - R, BLOCK_E)
        b_scores = (dot(b_query, tl.trans(b_latents)) + dot(b_rotary_query, tl.trans(b_rotary))) * scaling
        b_max, b_sum, b_out = attend(b_scores, m_tokens[None, :], b_latents, b_max, b_sum, b_out)
    store_query_parts(b_max, b_sum, b_out, p_parts, p_lse, o_row * tl.num_programs(0) + i_split, m_query, R)


@triton.jit(do_not_specialize=["s_row", "queries", "tokens", "split_tokens", "segments", "s_segment", "s_tokens"])
def recorded_latent_kernel(
    p_query, p_records, p_own, p_parts, p_lse, p_codes, p_scales, p_units, p_centres, p_order, p_weights,
    p_record_weights, s_row, queries, tokens, split_tokens, segments, s_segment, s_tokens, scaling,
    SEGMENT: tl.constexpr, KEY_BITS: tl.constexpr, RECORD: tl.constexpr, UNIT: tl.constexpr, OWN: tl.constexpr,
    FOURS: tl.constexpr, TWOS: tl.constexpr, ONES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `latent_kernel`, over a bulk's first tokens, which lie in records. For each row, the sketch has room for
    `s_tokens` tokens and `s_segment` segments; `s_row` is in records. `p_own` has `OWN` words for each program."""
    i_split, i_block, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_query = i_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    m_query, o_row = o_query < queries, i_row * queries + o_query
    p_own += ((i_row * tl.num_programs(1) + i_block) * tl.num_programs(0) + i_split) * OWN
    p_records += i_row * s_row * RECORD
    b_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    b_out = tl.zeros([BLOCK_Q, BLOCK_R], tl.float32)
    last = tl.minimum((i_split + 1) * split_tokens, tokens)
    at = i_row * s_segment
    b_max, b_sum, b_out = attend_latent_records(
        b_max, b_sum, b_out, p_query, o_row, m_query, p_own, p_records, p_records, None,
        p_codes + i_row * (FOURS + TWOS + ONES) * s_tokens, p_scales + i_row * s_tokens, p_units + at,
        p_centres + at * D, p_order + at * D, p_weights + at * D, p_record_weights, i_split * split_tokens, last, last,
        segments, s_tokens, scaling, SEGMENT, KEY_BITS, RECORD, UNIT, FOURS, TWOS, ONES, D, BLOCK_D, R, BLOCK_R,
        BLOCK_N,
    )  # fmt: skip
    store_query_parts(b_max, b_sum, b_out, p_parts, p_lse, o_row * tl.num_programs(0) + i_split, m_query, R)


@triton.jit(do_not_specialize=["splits"])
def latent_merge_kernel(
    p_parts, p_lse, p_out, p_out_lse, splits,
    R: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program a query: attention over the union of its parts."""
    i_query, o_split, o_rank = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R)
    p_lse += i_query * splits
    b_lse = tl.load(p_lse + o_split, mask=o_split < splits, other=float("-inf"))
    highest = tl.max(b_lse, axis=0)
    total = tl.sum(tl.exp(b_lse - highest), axis=0)
    b_out = tl.zeros([PARTS, BLOCK_R], tl.float32)
    for start in range(0, splits, PARTS):
        o_part = start + tl.arange(0, PARTS)
        b_own = tl.load(p_lse + o_part, mask=o_part < splits, other=float("-inf"))
        p_block = p_parts + (i_query * splits + o_part)[:, None] * R + o_rank[None, :]
        b_part = tl.load(p_block, mask=(o_part < splits)[:, None] & (o_rank < R)[None, :], other=0.0)
        b_out += b_part * tl.exp(b_own - highest)[:, None]
    tl.store(p_out + i_query * R + o_rank, tl.sum(b_out, axis=0) / total, mask=o_rank < R)
    tl.store(p_out_lse + i_query, highest + tl.log(total))


@functools.cache
def find_most_queries(device: torch.device) -> int:
    """The most queries of a program on this device."""
    if device.type != "cuda":  # the interpreter is as a large GPU
        return WIDE_QUERIES
    found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return WIDE_QUERIES if found >= WIDE_MEMORY else QUERIES


@functools.cache
def _bind(dim: int, rank: int, queries: int, itemsize: int) -> tuple[Launches, Launches, dict[str, int]]:
    """Launches for blocks of so many queries; and sizes of the first one."""
    sizes = {"D": dim, "R": rank, "BLOCK_R": sizing.pad(rank), "BLOCK_E": sizing.pad(dim - rank), "BLOCK_Q": queries}
    at_once = TOKEN_BYTES // (itemsize * (sizes["BLOCK_R"] + sizes["BLOCK_E"]))
    sizes["BLOCK_N"] = max(16, min(64, triton.next_power_of_2(at_once)))
    sizes |= {"num_warps": 4 if queries == 16 else 8, "num_stages": 2}
    merging = {"R": rank, "BLOCK_R": sizes["BLOCK_R"], "BLOCK_P": MAX_SPLITS, "PARTS": PARTS}
    return Launches(**sizes), Launches(**merging), sizes


@functools.cache
def _bind_recorded(
    records: RecordLayout, rank: int, queries: int, itemsize: int, stride: int, layout: Layout, segment: int
) -> tuple[Launches, Launches, dict[str, int]]:
    """As `_bind`, for tokens in records, `stride` bytes apart, and a sketch of this `layout`."""
    dim, (_, merging, others) = records.dim, _bind(records.dim, rank, queries, itemsize)
    sizes = {name: others[name] for name in ("D", "R", "BLOCK_R", "BLOCK_Q")} | find_sizes(layout, segment)
    sizes |= {"BLOCK_D": max(WORD_BITS, sizing.pad(dim)), "BLOCK_N": RECORDED_TOKENS, "KEY_BITS": records.key_bits}
    sizes |= {"RECORD": stride, "UNIT": records.unit}
    sizes |= {"OWN": count_own_words(RECORDED_TOKENS, dim, itemsize, stride), "num_warps": 8}
    return Launches(**sizes, maxnreg=sizing.MOST_REGISTERS), merging, sizes


def attend_latents(query: Tensor, latents: Tensor, rank: int, *, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention over one part of the keys, of calls that `latent_choice` admits.

    Args:
        query: `[batch, 1, queries, dim]`, of all heads.
        latents: `[batch, 1, tokens, dim]` in its dtype, a row's tokens side by side; a value is the first `rank`
            channels.
        scaling: of scores.

    Returns `out` float32 `[batch, 1, queries, rank]` and `lse` float32 `[batch, 1, queries]`, as `partial_attention`.
    """
    (_, _, queries, dim), tokens, query = query.shape, latents.shape[2], query.contiguous()
    most = find_most_queries(query.device)
    launches, merging, sizes = _bind(dim, rank, min(most, sizing.pad(queries)), query.element_size())

    def launch(grid: tuple[int, int, int], parts: tuple[Tensor, Tensor], split_tokens: int) -> None:
        launches.launch(
            latent_kernel, grid, (query.dtype, query.device, query.data_ptr() % 16 == 0, latents.data_ptr() % 16 == 0),
            query, latents, *parts, latents.stride(0) // dim, queries, tokens, split_tokens, scaling,
        )  # fmt: skip

    return _attend(query, tokens, rank, launch, merging, sizes)


def attend_recorded_latents(
    query: Tensor, records: Tensor, sketch: Sketch, weights: Tensor, layout: RecordLayout, rank: int, *,
    scaling: float, segments: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `attend_latents`, over a bulk's first tokens, which lie in `records` uint8 `[batch, 1, tokens, stride]`, those
    of a row contiguous. `sketch` is of these rows, contiguous, with the bulk's `segments`. `weights` are `m`, float32
    `[1, dim]`.
    """
    queries, tokens, query = query.shape[2], records.shape[2], query.contiguous()
    stride, at_once = records.stride(2), min(QUERIES, sizing.pad(queries))
    launches, merging, sizes = _bind_recorded(
        layout, rank, at_once, query.element_size(), stride, sketch.layout, definition.SEGMENT_TOKENS
    )

    def launch(grid: tuple[int, int, int], parts: tuple[Tensor, Tensor], split_tokens: int) -> None:
        own = torch.empty(math.prod(grid) * sizes["OWN"], dtype=torch.int32, device=query.device)
        launches.launch(
            recorded_latent_kernel, grid, (query.dtype, query.device, query.data_ptr() % 16 == 0),
            query, records, own, *parts, sketch.codes, sketch.scales, sketch.units, sketch.centres, sketch.order,
            sketch.weights, weights, records.stride(0) // stride, queries, tokens, split_tokens, segments,
            sketch.units.shape[2], sketch.scales.shape[2], scaling,
        )  # fmt: skip

    return _attend(query, tokens, rank, launch, merging, sizes)


def _attend(
    query: Tensor, tokens: int, rank: int, launch: Callable[..., None], merging: Launches, sizes: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """Merge the partial attention that `launch` writes for each split. It takes its grid, its parts and the tokens of a
    split."""
    batch, _, queries, _ = query.shape
    out = torch.empty(batch, 1, queries, rank, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, 1, queries, dtype=torch.float32, device=query.device)
    if 0 in (batch, queries, tokens):
        return out.zero_(), lse.fill_(-torch.inf)
    blocks, block = triton.cdiv(queries, sizes["BLOCK_Q"]), sizes["BLOCK_N"]
    resident = sizes | {"maxnreg": sizing.MOST_REGISTERS}
    splits = sizing.count_splits(tokens, SPLIT_TOKENS, MAX_SPLITS, batch * blocks, query.device, resident)
    split_tokens = triton.cdiv(triton.cdiv(tokens, splits), block) * block
    splits = triton.cdiv(tokens, split_tokens)
    parts = out, lse
    if splits > 1:
        parts = out.new_empty(batch, queries, splits, rank), lse.new_empty(batch, queries, splits)
    with at_device(query.device):
        launch((splits, blocks, batch), parts, split_tokens)
        if splits > 1:
            merging.launch(latent_merge_kernel, (batch * queries, 1, 1), (query.device,), *parts, out, lse, splits)
    return out, lse
