"""Selected attention of a prompt on a GPU: a block of queries of one head sees itself and, of the tokens before it, a
sample that is drawn by their estimated shares of attention.

A token's probability is the largest share that a query of the block gives it, in units of `threshold` even shares, and
at least `FLOOR`. A token that is read counts as often as its probability goes into one, so the sums of a softmax are
right on the average, and no estimate of what is not read is needed. Shares are estimated in 8 bits, where the device
multiplies them, from keys less their mean.
"""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ..sampled_prompt import (
    BLOCK,
    BROAD,
    FLOOR,
    SHARES,
    SHORT_BLOCK,
    encode,
    find_block,
    find_capacity,
    find_sum_stride,
    find_whole,
)
from .direct import at_device
from .launching import FUSING
from .prompt_kernels import read_kernel, sample_kernel, share_kernel

MAX_CHOSEN = 2**26  # tokens chosen at once: 256 MiB, and half as much for probabilities
MAX_TOKENS = 2**22  # that a chosen token's bits can name
SHARING = {BLOCK: {"BLOCK_N": 64, "num_warps": 8, "num_stages": 3}}
SHARING[SHORT_BLOCK] = {**SHARING[BLOCK], "num_warps": 4}
# Of devices where groups of warps multiply.
SHARING_ON_HOPPER = {BLOCK: {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3, "maxnreg": 128}}
SHARING_ON_HOPPER[SHORT_BLOCK] = {**SHARING_ON_HOPPER[BLOCK], "num_warps": 4, "maxnreg": 168}
SHARING_BROAD = {"BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
SAMPLING = {"BLOCK_N": 2048, "num_warps": 4}
READING = {BLOCK: {"BLOCK_N": 64, "num_warps": 8, "num_stages": 3}}
READING[SHORT_BLOCK] = {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
READING_RAGGED = {**READING[BLOCK], "BLOCK_N": 32}  # of heads that fill no block, whose masks take registers
READING_BROAD = {**READING_RAGGED, "num_stages": 2}
LOG2E = math.log2(math.e)


def selected_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, threshold: float, sinks: int, window: int,
    out: Tensor, end: int = 0,
) -> Tensor:  # fmt: skip
    """Causal attention of a prompt, or of a chunk of one, by selection. Chunks that are whole blocks read the same
    tokens as the whole prompt does, but for the rounding of codes: keys are coded less their mean so far.

    Args:
        query: `[batch, heads, queries, dim]`, of the last tokens.
        key, value: `[batch, kv_heads, tokens, dim or value_dim]`.
        scaling: of scores.
        threshold: times an even share, above 0.
        sinks: first tokens, which all read.
        window: last queries of the prompt. A block of these alone reads everything, and so does the last block, of
            which the first new token comes.
        out: `[batch, heads, queries, value_dim]` in the query's dtype, written.
        end: tokens of the whole prompt, if these are not all.

    Returns the pairs of a query and a token up to its own that were computed, of `batch * heads * (queries * past +
    queries * (queries + 1) / 2)`: int64 `[]` on the device, which is not waited for.
    """
    batch, heads, queries = query.shape[:3]
    tokens, past = key.shape[2], key.shape[2] - queries
    codes, steps = encode(key, find_code_type(key.dtype, key.device))
    length = max(end, tokens)
    block, stride = find_block(length, max(query.shape[3], value.shape[3])), find_sum_stride(length)
    blocks = -(-queries // block)
    begins = past + torch.arange(blocks, dtype=torch.int64, device=query.device) * block
    sizes = (tokens - begins).clamp_max(block)
    pairs, first = batch * heads * (sizes * (sizes + 1) // 2).sum(), 0
    whole = find_whole(length - past, window, block)
    with at_device(query.device):
        while first < blocks:
            some, capacity = _find_slice(first, blocks, batch * heads, past, block)
            sharing: dict[str, Any] = {"scaling": scaling, "threshold": threshold, "sinks": sinks}
            shares = find_shares(query, codes, steps, first, some, **sharing, block=block, stride=stride)
            chosen, counts = draw(shares, first, capacity, past, block=block)
            counts[:, max(0, whole - first) :] = capacity + 1
            read_sample(query, key, value, chosen, counts, out, first, scaling, block=block)
            of = slice(first, first + some)
            pairs += (torch.where(counts > capacity, begins[of], counts) * sizes[of]).sum()
            first += some
    return pairs


def find_code_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the codes of keys: 8-bit floats where the device multiplies these, else `dtype`."""
    return torch.float8_e4m3fn if find_capability(device) >= (8, 9) else dtype


def find_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device; `(0, 0)` for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _find_slice(first: int, blocks: int, heads: int, past: int, block: int) -> tuple[int, int]:
    """How many blocks from `first` on are computed at once, and the tokens that each has room to choose."""
    some = blocks - first
    while some > 1 and heads * some * find_capacity(past + (first + some) * block) > MAX_CHOSEN:
        some = -(-some // 2)
    return some, find_capacity(past + (first + some) * block)


def find_shares(
    query: Tensor, codes: Tensor, steps: Tensor, first: int, blocks: int, *, scaling: float, threshold: float,
    sinks: int, block: int, stride: int,
) -> Tensor:  # fmt: skip
    """Run `share_kernel` for so many blocks from `first` on. Returns uint8 `[batch * heads, blocks, columns]`: a column
    for each token before the last block, and padding up to a multiple of `BLOCK`."""
    (batch, heads, queries, dim), tokens = query.shape, codes.shape[2]
    past = tokens - queries
    columns = -(-(past + (first + blocks - 1) * block) // BLOCK) * BLOCK
    shares = torch.empty(batch * heads, blocks, columns, dtype=torch.uint8, device=query.device)
    sharing = SHARING_ON_HOPPER if find_capability(query.device)[0] == 9 else SHARING
    share_kernel[blocks, batch * heads](
        query, codes, steps, shares, *query.stride()[:3], heads, first, past, tokens, columns, sinks, stride,
        scaling * LOG2E, threshold, FLOOR * SHARES, G=heads // codes.shape[1], D=dim, BLOCK_D=_fill(dim), BLOCK_M=block,
        **(SHARING_BROAD if dim > BROAD else sharing[block]), **FUSING,
    )  # fmt: skip
    return shares


def draw(shares: Tensor, first: int, capacity: int, past: int = 0, *, block: int) -> tuple[Tensor, Tensor]:
    """Run `sample_kernel`. Returns the sampled tokens, int32 `[batch * heads, blocks, capacity]`, and their counts,
    int32 `[batch * heads, blocks]`."""
    heads, blocks, columns = shares.shape
    chosen = torch.empty(heads, blocks, capacity, dtype=torch.int32, device=shares.device)
    counts = torch.empty(heads, blocks, dtype=torch.int32, device=shares.device)
    sample_kernel[blocks, heads](
        shares, chosen, counts, first, past, columns, capacity, BLOCK_M=block, **SAMPLING, **FUSING
    )
    return chosen, counts


def read_sample(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, counts: Tensor, out: Tensor, first: int, scaling: float,
    *, block: int,
) -> None:  # fmt: skip
    """Run `read_kernel`: it writes the blocks of `out`, from block `first` on, whose sampled tokens are `chosen`."""
    (batch, heads, queries, dim), (tokens, value_dim) = query.shape, value.shape[2:]
    reading = READING[block]
    if max(dim, value_dim) > BROAD:
        reading = READING_BROAD
    elif block == BLOCK and (dim, value_dim) != (_fill(dim), _fill(value_dim)):
        reading = READING_RAGGED
    strides = (stride for tensor in (query, key, value, out) for stride in tensor.stride()[:3])
    read_kernel[chosen.shape[1], batch * heads](
        query, key, value, chosen, counts, out, *strides, heads, first, tokens - queries, tokens, chosen.shape[2],
        scaling * LOG2E,
        G=heads // key.shape[1], D=dim, BLOCK_D=_fill(dim), V=value_dim, BLOCK_V=_fill(value_dim), BLOCK_M=block,
        **reading, **FUSING,
    )  # fmt: skip


def _fill(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))
