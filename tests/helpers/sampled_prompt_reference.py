"""A prompt read by a sample, in float64: a second definition, a step at a time, which shares no code with the first.

Probabilities are in 256ths. Steps are apart as a sum of probabilities that is off by one moves all that follows it.
A block is so many queries that read together, at most `size`, from its first, `begin`, on.
"""

import torch
from torch import Tensor

FIRST = 64  # tokens that are all scored for the sum that shares are of
FEW = 1024


def probabilities(
    query: Tensor, key: Tensor, begin: int, size: int, *, scaling: float, threshold: float, sinks: int, floor: float,
    stride: int,
) -> Tensor:  # fmt: skip
    """Float64 256ths, before they are rounded up, that a block of queries `[tokens, dim]` gives each token before it.

    Shares are of their own block's tokens, the `FIRST` ones, and one of each `stride` others for all of these.
    """
    own = torch.arange(begin, min(begin + size, len(query)))
    centred = key.double() - key.double().mean(0)
    scores = scaling * query[own].double() @ centred.T
    near = scores[:, begin : begin + size].masked_fill(own > own[:, None], -torch.inf)
    seen = torch.cat([near, scores[:, : min(FIRST, begin)]], 1)
    sample = torch.arange(begin)[FIRST + stride // 2 :: stride]
    met = torch.cat([seen, scores[:, sample] + torch.tensor(stride).log()], 1).logsumexp(1)
    shares = (scores[:, :begin] - met[:, None]).exp().amax(0)
    found = (256 * shares * max(begin, FEW) / threshold).clamp(min=256 * floor, max=256)
    found[:sinks] = 256
    return found


def sample(probabilities: Tensor, block: int, head: int) -> list[int]:
    """The tokens that are taken by whole 256ths: those that carry the sum over a multiple of 256."""
    passed, taken = (159 * block + 97 * head) % 256, []
    for token, share in enumerate(probabilities.tolist()):
        if (passed + share) // 256 > passed // 256:
            taken.append(token)
        passed += share
    return taken


def attend(
    query: Tensor, key: Tensor, value: Tensor, begin: int, size: int, chosen: dict[int, int], scaling: float
) -> Tensor:
    """A block's outputs, where tokens before it are read as often as 256 over what `chosen` has for them."""
    own = torch.arange(begin, min(begin + size, len(query)))
    scores = scaling * query[own].double() @ key.double().T
    lift = torch.full((len(key),), -torch.inf, dtype=torch.float64)
    for token, share in chosen.items():
        lift[token] = torch.tensor(256 / share).log()
    lift = lift.repeat(len(own), 1)
    lift[:, begin : begin + size] = torch.zeros(len(own), len(own)).masked_fill(own > own[:, None], -torch.inf)
    return (scores + lift).softmax(-1) @ value.double()
