"""A prompt of which blocks of queries read a sample: who reads with whom, and what a token's probability to be read is,
by torch. `triton/selected_prompt.py` says what it is for, and reads by it.
"""

import math

import torch
from torch import Tensor

BLOCK = 128  # queries that read together
SHORT, SHORT_BLOCK = 8192, 64  # prompts of fewer tokens lose less, by fewer pairs, if fewer queries share a sample
BROAD = 128  # channels: of heads of more, blocks are short
SHARES = 256  # steps of a probability
FLOOR = 1 / 64  # of a probability
FEW = 1024  # tokens: even shares are those of so many where there are fewer
FIRST = 64  # tokens that are all scored for the sum that shares are of, which sinks dominate
LEAST_STRIDE, SCORED, MOST_STRIDE = 16, 1024, 64  # that sum is of so many tokens or more, in long prompts
NEXT_BLOCK, NEXT_HEAD = 159, 97  # steps of where sampling begins, SHARES a round
MAX_SHARE = 2  # a block that chooses more than a part of the tokens in so many reads all of them
TILE = 64  # places of chosen tokens that are read at once, at most: lists have room for a multiple
# Sums of products of codes over 256 channels, and the log of a sum over as many tokens as there can be, are numbers of
# float16: codes are at most so large, and a unit of the sums at least so large.
PEAK, LEAST_UNIT = 15.0, 1 / 256


def find_block(tokens: int, dim: int) -> int:
    """Queries of a prompt of so many tokens that read together, with heads of up to `dim` channels."""
    return SHORT_BLOCK if tokens < SHORT or dim > BROAD else BLOCK


def find_sum_stride(tokens: int) -> int:
    """Of so many tokens behind a prompt's first, one is scored for the sum that a block's shares are of."""
    return min(max(LEAST_STRIDE, tokens // SCORED), MOST_STRIDE)


def find_whole(queries: int, window: int, block: int) -> int:
    """The first block that reads everything, of so many queries from the first block to the prompt's end."""
    return min(-(-max(0, queries - window) // block), (queries - 1) // block)


def find_capacity(tokens: int) -> int:
    """How many of the tokens before it a block has room to choose."""
    return max(BLOCK, tokens // (MAX_SHARE * TILE) * TILE)


def encode(key: Tensor, code_type: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes `[batch, kv_heads, tokens, dim]` of keys less their mean, and the step of each head `[batch, kv_heads]`."""
    centred = key - key.mean(dim=2, keepdim=True, dtype=torch.float32).to(key.dtype)
    least = max(1e-20, 2 * PEAK / torch.finfo(key.dtype).max)  # for scales that are numbers of the dtype
    peaks = centred.abs().amax(dim=(2, 3)).float().clamp_min(least)
    scales = (PEAK / peaks).to(key.dtype)
    codes = centred.mul_(scales[:, :, None, None])
    return codes.to(code_type).contiguous(), 1 / scales.float()


def find_probabilities(
    queries: Tensor, codes: Tensor, step: Tensor, begin: int, *, scaling: float, threshold: float, sinks: int,
    stride: int,
) -> Tensor:  # fmt: skip
    """In `SHARES`, what a block of queries `[heads, queries, dim]` that begins after `begin` tokens reads each of these
    by: `[heads, begin]`. The heads' codes `[tokens, dim]` have one `step`."""
    size, step = queries.shape[1], scaling * step
    queries = queries.to(torch.promote_types(queries.dtype, torch.float32))
    later = torch.ones(size, size, dtype=torch.bool, device=queries.device).triu(1)
    unit = (queries.abs().amax(dim=(1, 2), keepdim=True) * step / PEAK).clamp_min(LEAST_UNIT * math.log(2))
    coded = (queries * (step / unit)).to(codes.dtype).to(queries.dtype)
    scores = unit * (coded @ codes[: begin + size].to(queries.dtype).T)
    far, near = scores[:, :, :begin], scores[:, :, begin:].masked_fill(later, -torch.inf)
    sampled = far[:, :, FIRST + stride // 2 :: stride] + math.log(stride)
    total = torch.cat([near, far[:, :, :FIRST], sampled], dim=2).logsumexp(dim=2, keepdim=True)
    shares = (far - total).amax(dim=1).exp()
    parts = (SHARES * shares * max(begin, FEW) / threshold).clamp(SHARES * FLOOR, SHARES).ceil()
    parts[:, :sinks] = SHARES
    return parts
