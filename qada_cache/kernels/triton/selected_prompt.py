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

from .prompt_kernels import SHARES, read_kernel, sample_kernel, share_kernel

BLOCK = 128  # queries that read together
FLOOR = 1 / 64  # of the probability to be read
MAX_SHARE = 4  # a block that chooses more than a part of the tokens in so many reads all of them
MAX_CHOSEN = 2**26  # tokens chosen at once: 256 MiB, and as much for their probabilities
MAX_TOKENS = 2**20  # that a chosen token's bits can name
SHARING = {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3, "maxnreg": 128}
SAMPLING = {"BLOCK_N": 2048, "num_warps": 4}
READING = {"BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
LOG2E = math.log2(math.e)
CODE_PEAK = 240.0


def selected_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, threshold: float, sinks: int, out: Tensor
) -> Tensor:
    """Causal attention of a prompt.

    Args:
        query: `[batch, heads, tokens, dim]`.
        key, value: `[batch, kv_heads, tokens, dim or value_dim]`.
        scaling: of scores.
        threshold: times an even share, above 0.
        sinks: first tokens, which all read.
        out: `[batch, heads, tokens, value_dim]` in the query's dtype, written.

    Returns the pairs of a query and a token before its block that were read, int64 on the device.
    """
    batch, heads, tokens = query.shape[:3]
    codes, steps = encode(key)
    blocks, read = -(-tokens // BLOCK), []
    first = 0
    while first < blocks:
        some, capacity = _find_slice(first, blocks, batch * heads)
        chosen, counts = _choose(query, codes, steps, first, some, capacity, scaling, threshold, sinks)
        _read(query, key, value, chosen, counts, out, first, scaling)
        before = torch.arange(first, first + some, device=query.device) * BLOCK
        read.append(torch.where(counts > capacity, before, counts).sum())
        first += some
    return torch.stack(read).sum() * BLOCK


def encode(key: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[batch, kv_heads, tokens, dim]` of keys less their mean, and the step of each head `[batch, kv_heads]`."""
    centred = key - key.mean(dim=2, keepdim=True, dtype=torch.float32).to(key.dtype)
    peaks = centred.abs().amax(dim=(2, 3)).float().clamp_min(1e-20)
    scales = (CODE_PEAK / peaks).to(key.dtype)
    codes = centred.mul_(scales[:, :, None, None])
    return codes.to(find_code_type(key)).contiguous(), 1 / scales.float()


def find_code_type(key: Tensor) -> torch.dtype:
    """8-bit floats, where products of them are to be had."""
    narrow = key.device.type == "cuda" and torch.cuda.get_device_capability(key.device) >= (8, 9)
    return torch.float8_e4m3fn if narrow else key.dtype


def _find_slice(first: int, blocks: int, heads: int) -> tuple[int, int]:
    """How many blocks from `first` on are computed at once, and the tokens that each has room to choose."""
    some = blocks - first
    while some > 1 and heads * some * _find_capacity(first + some) > MAX_CHOSEN:
        some = -(-some // 2)
    return some, _find_capacity(first + some)


def _find_capacity(blocks: int) -> int:
    return max(BLOCK, blocks * BLOCK // MAX_SHARE)


def _choose(
    query: Tensor, codes: Tensor, steps: Tensor, first: int, blocks: int, capacity: int, scaling: float,
    threshold: float, sinks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `sample_kernel` writes for so many blocks from `first` on."""
    (batch, heads, tokens, dim), device = query.shape, query.device
    grid, columns = (blocks, batch * heads), (first + blocks - 1) * BLOCK
    shares = torch.empty(batch * heads, blocks, columns, dtype=torch.uint8, device=device)
    chosen = torch.empty(batch * heads, blocks, capacity, dtype=torch.int32, device=device)
    counts = torch.empty(batch * heads, blocks, dtype=torch.int32, device=device)
    share_kernel[grid](
        query, codes, steps, shares, *query.stride()[:3], heads, first, tokens, columns, sinks, scaling * LOG2E,
        threshold, FLOOR * SHARES, G=heads // codes.shape[1], D=dim, BLOCK_D=_fill(dim), BLOCK_M=BLOCK, **SHARING,
    )  # fmt: skip
    sample_kernel[grid](shares, chosen, counts, first, columns, capacity, BLOCK_M=BLOCK, **SAMPLING)
    return chosen, counts


def _read(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, counts: Tensor, out: Tensor, first: int, scaling: float
) -> None:
    """Has `read_kernel` write its blocks of `out`."""
    (batch, heads, tokens, dim), value_dim = query.shape, value.shape[3]
    strides = (stride for tensor in (query, key, value, out) for stride in tensor.stride()[:3])
    read_kernel[chosen.shape[1], batch * heads](
        query, key, value, chosen, counts, out, *strides, heads, first, tokens, chosen.shape[2], scaling * LOG2E,
        G=heads // key.shape[1], D=dim, BLOCK_D=_fill(dim), V=value_dim, BLOCK_V=_fill(value_dim), BLOCK_M=BLOCK,
        **READING,
    )  # fmt: skip


def _fill(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))
