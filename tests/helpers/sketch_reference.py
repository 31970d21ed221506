"""What a sketch says of its keys, in float64 and plain arithmetic."""

import math

import torch
from torch import Tensor

from qada_cache.kernels import sketch


def odd_values(codes: Tensor, *, dim: int) -> Tensor:
    """The odd integers `[tokens, dim]` float64 that codes `[tokens, bytes]` stand for."""
    size = codes.shape[1]
    bits = 8 * size // dim
    values = [
        [2 * ((row[d % size] >> (d // size * bits)) % 2**bits) - (2**bits - 1) for d in range(dim)]
        for row in codes.tolist()
    ]
    return torch.tensor(values, dtype=torch.float64).view(len(values), dim)


def estimates(*, query: Tensor, codes: Tensor, scales: Tensor, centre: Tensor, scaling: float) -> Tensor:
    """Scores `[heads, tokens]` that coded keys are expected to weigh, for `query` `[heads, dim]`."""
    dim = query.shape[1]
    turn, odd = sketch.rotation(dim, torch.device("cpu")).double(), odd_values(codes, dim=dim)
    keys = scales.double()[:, None] * odd  # centred and rotated
    error = sketch.spread_of(8 * codes.shape[1] // dim) * scales.double() ** 2  # half of that of a value, squared
    scores = []
    for head in query.double():
        turned = turn @ head
        unit = turned.abs().max() / 127
        score = keys @ (unit * torch.round(turned / unit)) + centre.double() @ head
        scores.append(scaling * score + error * scaling**2 * float(head @ head))
    return torch.stack(scores)


def log_shares(*, estimates: Tensor, log_near: Tensor, bulk_tokens: int) -> Tensor:
    """Log of how many times an even share of the bulk each token gets `[heads, tokens]`; `log_near` `[heads]`."""
    total = torch.logaddexp(log_near.double(), estimates.logsumexp(dim=1))
    return estimates - total[:, None] + math.log(bulk_tokens)
