"""A prompt of which each block of queries reads a random sample of tokens: sizes of blocks, and the probabilities of
tokens, by torch. `triton/selected_prompt.py` describes the method, and uses these.
"""

import math

import torch
from torch import Tensor

BLOCK = 128  # queries that share a sample
SHORT, SHORT_BLOCK = 8192, 64  # prompts of fewer tokens, and their block: smaller blocks err less there, by fewer pairs
BROAD = 128  # channels: heads with more have short blocks
SHARES = 256  # a probability is a whole number of parts in so many
FLOOR = 1 / 64  # least probability
FEW = 1024  # tokens: an even share is 1 of so many where there are fewer
FIRST = 64  # a prompt's first tokens, sinks among them, are all scored for the sum of weights that shares refer to
LEAST_STRIDE, SCORED, MOST_STRIDE = 16, 1024, 64  # of the other tokens, one in a stride is scored: about `SCORED`
NEXT_BLOCK, NEXT_HEAD = 159, 97  # the sampling offset, modulo SHARES, grows so much from a block or head to the next
MAX_SHARE = 2  # a block that selects more than one token in so many reads all tokens
TILE = 64  # most selected tokens that are read at once: lists have room for a multiple
# In float16, sums of products of codes over 256 channels, and the log of a sum over all possible tokens, must not
# overflow. So codes are at most `PEAK`, and a unit of the sums at least `LEAST_UNIT`.
PEAK, LEAST_UNIT = 15.0, 1 / 256


def find_block(tokens: int, dim: int) -> int:
    """The queries of a block, in a prompt of so many tokens with heads of up to `dim` channels."""
    return SHORT_BLOCK if tokens < SHORT or dim > BROAD else BLOCK


def find_sum_stride(tokens: int) -> int:
    """The stride at which tokens behind a prompt's `FIRST` are scored for the sum of weights that shares refer to."""
    return min(max(LEAST_STRIDE, tokens // SCORED), MOST_STRIDE)


def find_whole(queries: int, window: int, block: int) -> int:
    """The first block that reads all tokens: blocks of the last `window` queries. `queries` are from the first block to
    the prompt's end."""
    return min(-(-max(0, queries - window) // block), (queries - 1) // block)


def find_capacity(tokens: int) -> int:
    """The room of a block's list of selected tokens, if the prompt has so many."""
    return max(BLOCK, tokens // (MAX_SHARE * TILE) * TILE)


def encode(key: Tensor, code_type: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes `[batch, kv_heads, tokens, dim]` of keys less their mean, and each head's step `[batch, kv_heads]`: a code
    times the step is a centred key."""
    centred = key - key.mean(dim=2, keepdim=True, dtype=torch.float32).to(key.dtype)
    least = max(1e-20, 2 * PEAK / torch.finfo(key.dtype).max)  # so that `scales` do not overflow their dtype
    peaks = centred.abs().amax(dim=(2, 3)).float().clamp_min(least)
    scales = (PEAK / peaks).to(key.dtype)
    codes = centred.mul_(scales[:, :, None, None])
    return codes.to(code_type).contiguous(), 1 / scales.float()


def find_probabilities(
    queries: Tensor, codes: Tensor, step: Tensor, begin: int, *, scaling: float, threshold: float, sinks: int,
    stride: int,
) -> Tensor:  # fmt: skip
    """The probabilities, times `SHARES`, by which a block reads each of the `begin` tokens before it: `[heads, begin]`.

    `queries` are `[heads, queries, dim]`. The heads share `codes` `[tokens, dim]`, which have one `step`.
    """
    size, step = queries.shape[1], scaling * step
    queries = queries.to(torch.promote_types(queries.dtype, torch.float32))
    later = torch.ones(size, size, dtype=torch.bool, device=queries.device).triu(1)
    unit = (queries.abs().amax(dim=(1, 2), keepdim=True) * step / PEAK).clamp_min(LEAST_UNIT * math.log(2))
    query_codes = (queries * (step / unit)).to(codes.dtype).to(queries.dtype)
    scores = unit * (query_codes @ codes[: begin + size].to(queries.dtype).T)
    far, near = scores[:, :, :begin], scores[:, :, begin:].masked_fill(later, -torch.inf)
    sampled = far[:, :, FIRST + stride // 2 :: stride] + math.log(stride)
    total = torch.cat([near, far[:, :, :FIRST], sampled], dim=2).logsumexp(dim=2, keepdim=True)
    shares = (far - total).amax(dim=1).exp()
    probabilities = (SHARES * shares * max(begin, FEW) / threshold).clamp(SHARES * FLOOR, SHARES).ceil()
    probabilities[:, :sinks] = SHARES
    return probabilities
