"""Selected attention of a prompt on a GPU: a block of queries of one head sees itself and, of the tokens before it, a
sample that is drawn by their estimated shares of attention.

A token's probability is the largest share that a query of the block gives it, in units of `threshold` even shares, and
at least `FLOOR`. A token that is read counts as often as its probability goes into one, so the sums of a softmax are
right on the average, and no estimate of what is not read is needed. Shares are estimated in 8 bits, where the device
multiplies them, from keys less their mean.
"""

import math

import torch
import triton
from torch import Tensor

from .prompt_kernels import SHARES, TILE, read_kernel, sample_kernel, share_kernel

BLOCK = 128  # queries that read together
SHORT, SHORT_BLOCK = 8192, 64  # prompts of fewer tokens lose less, by fewer pairs, if fewer queries share a sample
FLOOR = 1 / 64  # of the probability to be read
MAX_SHARE = 2  # a block that chooses more than a part of the tokens in so many reads all of them
MAX_CHOSEN = 2**26  # tokens chosen at once: 256 MiB, and half as much for probabilities
MAX_TOKENS = 2**22  # that a chosen token's bits can name
BROAD = 128  # channels: of heads of more, blocks are short, and programs wide
SHARING = {BLOCK: {"BLOCK_N": 64, "num_warps": 8, "num_stages": 3}}
SHARING[SHORT_BLOCK] = {**SHARING[BLOCK], "num_warps": 4}
# Of devices where groups of warps multiply. Of 128 registers two spill for 128 channels in groups of one.
WIDE = {BLOCK: {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3, "maxnreg": 128}}
WIDE[SHORT_BLOCK] = {**WIDE[BLOCK], "num_warps": 4, "maxnreg": 168}
SHARING_BROAD = {"BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
SAMPLING = {"BLOCK_N": 2048, "num_warps": 4}
READING = {BLOCK: {"BLOCK_N": 64, "num_warps": 8, "num_stages": 3}}
READING[SHORT_BLOCK] = {"BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
READING_RAGGED = {**READING[BLOCK], "BLOCK_N": 32}  # of heads that fill no block, whose masks take registers
READING_BROAD = {**READING_RAGGED, "num_stages": 2}
LOG2E = math.log2(math.e)
CODE_PEAK = 240.0


def selected_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, threshold: float, sinks: int, window: int,
    out: Tensor, end: int = 0,
) -> Tensor:  # fmt: skip
    """Causal attention of a prompt, or of a chunk of one, by selection. Of chunks that are whole blocks the same is
    read as of the whole prompt, but for the rounding of codes: keys are coded less their mean so far.

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
    codes, steps = encode(key)
    block = find_block(max(end, tokens), max(query.shape[3], value.shape[3]))
    blocks = -(-queries // block)
    begins = past + torch.arange(blocks, dtype=torch.int64, device=query.device) * block
    sizes = (tokens - begins).clamp_max(block)
    pairs, first = batch * heads * (sizes * (sizes + 1) // 2).sum(), 0
    whole = find_whole(max(end, tokens) - past, window, block)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        while first < blocks:
            some, capacity = _find_slice(first, blocks, batch * heads, past, block)
            told = query, codes, steps, first, some
            shares = find_shares(*told, scaling=scaling, threshold=threshold, sinks=sinks, block=block)
            chosen, counts = draw(shares, first, capacity, past, block=block)
            counts[:, max(0, whole - first) :] = capacity + 1
            read_sample(query, key, value, chosen, counts, out, first, scaling, block=block)
            of = slice(first, first + some)
            pairs += (torch.where(counts > capacity, begins[of], counts) * sizes[of]).sum()
            first += some
    return pairs


def find_block(tokens: int, dim: int) -> int:
    """Queries of a prompt of so many tokens that read together, with heads of up to `dim` channels."""
    return SHORT_BLOCK if tokens < SHORT or dim > BROAD else BLOCK


def find_whole(queries: int, window: int, block: int) -> int:
    """The first block that reads everything, of so many queries from the first block to the prompt's end."""
    return min(-(-max(0, queries - window) // block), (queries - 1) // block)


def encode(key: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[batch, kv_heads, tokens, dim]` of keys less their mean, and the step of each head `[batch, kv_heads]`."""
    centred = key - key.mean(dim=2, keepdim=True, dtype=torch.float32).to(key.dtype)
    least = max(1e-20, 2 * CODE_PEAK / torch.finfo(key.dtype).max)  # for scales that are numbers of the dtype
    peaks = centred.abs().amax(dim=(2, 3)).float().clamp_min(least)
    scales = (CODE_PEAK / peaks).to(key.dtype)
    codes = centred.mul_(scales[:, :, None, None])
    return codes.to(find_code_type(key)).contiguous(), 1 / scales.float()


def find_code_type(key: Tensor) -> torch.dtype:
    """8-bit floats, where products of them are to be had."""
    return torch.float8_e4m3fn if find_capability(key.device) >= (8, 9) else key.dtype


def find_capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device; none has less than others."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _find_slice(first: int, blocks: int, heads: int, past: int, block: int) -> tuple[int, int]:
    """How many blocks from `first` on are computed at once, and the tokens that each has room to choose."""
    some = blocks - first
    while some > 1 and heads * some * _find_capacity(past + (first + some) * block) > MAX_CHOSEN:
        some = -(-some // 2)
    return some, _find_capacity(past + (first + some) * block)


def _find_capacity(tokens: int) -> int:
    return max(BLOCK, tokens // (MAX_SHARE * TILE) * TILE)


def find_shares(
    query: Tensor, codes: Tensor, steps: Tensor, first: int, blocks: int, *, scaling: float, threshold: float,
    sinks: int, block: int,
) -> Tensor:  # fmt: skip
    """What `share_kernel` writes of so many blocks from `first` on: uint8 `[batch * heads, blocks, tokens before the
    last block]`."""
    (batch, heads, queries, dim), tokens = query.shape, codes.shape[2]
    past = tokens - queries
    columns = past + (first + blocks - 1) * block
    shares = torch.empty(batch * heads, blocks, columns, dtype=torch.uint8, device=query.device)
    sharing = WIDE if find_capability(query.device)[0] == 9 else SHARING
    share_kernel[blocks, batch * heads](
        query, codes, steps, shares, *query.stride()[:3], heads, first, past, tokens, columns, sinks, scaling * LOG2E,
        threshold, FLOOR * SHARES, G=heads // codes.shape[1], D=dim, BLOCK_D=_fill(dim), BLOCK_M=block,
        **(SHARING_BROAD if dim > BROAD else sharing[block]),
    )  # fmt: skip
    return shares


def draw(shares: Tensor, first: int, capacity: int, past: int = 0, *, block: int) -> tuple[Tensor, Tensor]:
    """What `sample_kernel` writes: tokens, int32 `[batch * heads, blocks, capacity]`, and their counts, int32 `[batch *
    heads, blocks]`."""
    heads, blocks, columns = shares.shape
    chosen = torch.empty(heads, blocks, capacity, dtype=torch.int32, device=shares.device)
    counts = torch.empty(heads, blocks, dtype=torch.int32, device=shares.device)
    told = chosen, counts, first, past, columns, capacity
    sample_kernel[blocks, heads](shares, *told, BLOCK_M=block, **SAMPLING)
    return chosen, counts


def read_sample(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, counts: Tensor, out: Tensor, first: int, scaling: float,
    *, block: int,
) -> None:  # fmt: skip
    """Has `read_kernel` write the blocks of `out` from `first` on that `draw` chose for."""
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
        **reading,
    )  # fmt: skip


def _fill(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))
