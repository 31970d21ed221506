"""A sketch of the bulk: keys in few bits, the scores they give, which tokens are read by those, and what is made of
the rest.

A key is centred, rotated and coded in `bits` a value with a scale of its own: `k ~ c + R^T (scale * odd)`, where `odd`
are odd integers and `R` is a signed Hadamard matrix, which leaves no channel standing out. A query is rotated and
rounded to 8 bits, so that a score takes integer products alone and every implementation finds the same.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

BITS = (1, 2, 4)
MIN_TOKENS = 1024  # a bulk of fewer is read whole, which takes no longer than to choose
CENTRE_TOKENS = 256  # the centre is the mean of the bulk's first ones, and never changes
# For a Gaussian of deviation 1: the step of the uniform quantizer that is best, and the squared error it leaves.
STEPS = {1: 1.5958, 2: 0.9957, 4: 0.3352}
ERRORS = {1: 0.3634, 2: 0.1188, 4: 0.01154}
# Of the estimated attention to what is not read, as much counts, for the mean value: all of it would draw too much to
# the mean, as the heavier ones of these tokens are no average ones; none leaves their mass to the tokens that are read.
REST_WEIGHT = 0.5
QUERY_LEVELS = 127  # a query's largest value
# Half the variance of what estimates are off by, in nats, by bits: where it is more, on average over a bulk's tokens,
# they tell too little of which tokens matter, and nothing would say so. What one bit leaves out is no Gaussian.
MAX_SPREAD = {1: 1.75, 2: 3.0, 4: 3.0}


def code_bytes(dim: int, bits: int) -> int:
    """Bytes of one key's codes."""
    return dim * bits // 8


def spread_of(bits: int) -> float:
    """Half the squared error of a coded value, in units of its key's squared scale (half a step)."""
    return 0.5 * ERRORS[bits] / (STEPS[bits] / 2) ** 2


@functools.cache
def _rotation(dim: int) -> Tensor:
    block = dim & -dim  # the largest power of two that divides it
    made: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # torch's defaults are the user's
    hadamard = torch.ones(1, 1, **made)
    while len(hadamard) < block:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator("cpu").manual_seed(0), **made) * 2.0 - 1
    return torch.kron(torch.eye(dim // block, **made), hadamard / math.sqrt(block)) * signs


@functools.cache
@torch.inference_mode(False)  # it is used outside of it as well
def rotation(dim: int, device: torch.device) -> Tensor:
    """The orthogonal `R` `[dim, dim]` float32: of Hadamard blocks where `dim` is not a power of two."""
    return _rotation(dim).to(device)


def encode(keys: Tensor, centre: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Code keys.

    Args:
        keys: `[..., tokens, dim]`, any floating dtype; `dim * bits` a multiple of 8.
        centre: `[..., dim]` float32, what is subtracted first.
        bits: of `BITS`.

    Returns:
        codes uint8 `[..., tokens, dim * bits / 8]`: byte `j` holds, from its lowest bits on, the values `j`,
        `j + dim * bits / 8`, and so on; and scales bfloat16 `[..., tokens]`, which leave the least squared error.
    """
    dim, levels = keys.shape[-1], 2**bits
    turned = torch.matmul(keys.float() - centre.unsqueeze(-2), rotation(dim, keys.device).mT)
    step = STEPS[bits] * turned.square().mean(dim=-1, keepdim=True).sqrt()
    tiny = torch.finfo(torch.float32).tiny
    index = torch.floor(turned / step.clamp_min(tiny)).clamp(-levels // 2, levels // 2 - 1) + levels // 2
    odd = 2 * index - (levels - 1)
    scales = (turned * odd).sum(dim=-1) / odd.square().sum(dim=-1)
    planes = index.to(torch.uint8).unflatten(-1, (8 // bits, code_bytes(dim, bits)))
    codes = planes[..., 0, :].clone()
    for plane in range(1, 8 // bits):
        codes |= planes[..., plane, :] << (plane * bits)
    return codes, scales.to(torch.bfloat16)


def decode(codes: Tensor, bits: int) -> Tensor:
    """The odd integers `[..., tokens, dim]` float32 of codes `[..., tokens, dim * bits / 8]`."""
    levels = 2**bits
    planes = [(codes >> (plane * bits)) & (levels - 1) for plane in range(8 // bits)]
    return 2 * torch.cat(planes, dim=-1).float() - (levels - 1)


def rounded_query(query: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[..., dim]` float32 rotated and in integers `[..., dim]` of at most 127, float32, and their unit."""
    turned = torch.matmul(query, rotation(query.shape[-1], query.device).mT)
    unit = turned.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / QUERY_LEVELS
    return torch.round(turned / unit), unit


def estimated_scores(query: Tensor, codes: Tensor, scales: Tensor, centre: Tensor, *, scaling: float) -> Tensor:
    """What coded keys are expected to weigh, as scores.

    What a code leaves of a key is as likely to point one way as another, so a score is off by a Gaussian of variance
    `sigma^2 = scaling^2 |q|^2 e^2`, `e^2` the squared error of a value; the mean of its exponential is that of
    `score + sigma^2 / 2`, which is what is returned. Without it, all that is far would seem lighter than it is.

    Args:
        query: `[..., queries, dim]` float32.
        codes, scales: of keys, as `encode` makes them.
        centre: `[..., dim]` float32.
        scaling: multiplies the scores.

    Returns:
        `[..., queries, tokens]` float32.
    """
    bits = codes.shape[-1] * 8 // query.shape[-1]
    integers, unit = rounded_query(query)
    products = torch.matmul(integers, decode(codes, bits).mT)  # exact: integers below 2 ** 24
    middle = torch.matmul(query, centre.unsqueeze(-1)) * scaling
    spread = spread_of(bits) * scaling**2 * query.square().sum(dim=-1, keepdim=True)
    scale = scales.float().unsqueeze(-2)
    return middle + scale * (scaling * unit * products + spread * scale)


def too_rough(query: Tensor, mean_square: Tensor, bits: int, *, scaling: float) -> Tensor:
    """The queries that estimates are too rough for, so that they read all: `sigma^2 / 2 > MAX_SPREAD[bits]`.

    Scores that lie far apart are the ones that few tokens stand out by, and what stands out of estimates may be nothing
    but their error; see `estimated_scores` for `sigma`, and for what may have any leading dimensions.

    Args:
        query: `[..., queries, dim]`.
        mean_square: `[...]` float32, mean of the squares of a bulk's scales.
        bits: of its codes.
        scaling: multiplies the scores.

    Returns:
        bool `[..., queries]`.
    """
    spread = spread_of(bits) * scaling**2 * query.float().square().sum(dim=-1)
    return spread * mean_square.unsqueeze(-1) > MAX_SPREAD[bits]


def chosen_tokens(
    query: Tensor,
    codes: Tensor,
    scales: Tensor,
    centre: Tensor,
    *,
    log_near: Tensor,
    bulk_tokens: Tensor,
    flags: Tensor,
    scaling: float,
    token_threshold: float,
) -> tuple[Tensor, Tensor]:
    """The tokens of a KV head's bulk that are read for each query: any that one of its long-context heads asks for.

    A head asks for what gets at least `token_threshold` times as much of its attention as if the bulk got all of it,
    evenly: `exp(s_t) / (A_near + sum_t exp(s_t)) >= token_threshold / T_bulk`, by estimates of the scores `s_t`.

    Args:
        query: `[group, queries, dim]`.
        codes, scales, centre: of the head's bulk `[tokens, *]`, `[tokens]`, `[dim]`, see `encode`.
        log_near: `[group, queries]` float32, log-sum-exp of a query's scores of what is near: `log A_near`.
        bulk_tokens: int64 `[queries]`, `T_bulk`.
        flags: bool `[group, queries]`, the long-context heads.
        scaling: multiplies the scores.
        token_threshold: above 0.

    Returns:
        bool `[queries, tokens]`; and `[group, queries]` float32, the log of what the rest counts: `REST_WEIGHT` times
        the sum of exponentials of the estimated scores of tokens that are not read.
    """
    scores = estimated_scores(query.flatten(0, 1).float(), codes, scales, centre, scaling=scaling)
    scores = scores.unflatten(0, query.shape[:2])
    log_all = torch.logaddexp(log_near, scores.logsumexp(dim=-1))
    least = log_all + math.log(token_threshold) - torch.log(bulk_tokens.float())
    chosen = ((scores >= least.unsqueeze(-1)) & flags.unsqueeze(-1)).any(dim=0)
    return chosen, scores.masked_fill(chosen, -torch.inf).logsumexp(dim=-1) + math.log(REST_WEIGHT)
