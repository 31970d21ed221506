"""Attention of a prompt by a sample of its tokens, in float64: a second definition that shares no code with the first.

Probabilities are in 256ths. Each step is a function of its own, so that tests can compare steps one by one: one
probability that is off by 1/256 would change the sample from there on. A block is at most `size` queries that read
together, from query `begin` on.
"""

import torch
from torch import Tensor

FIRST = 64  # first tokens, all of which count in a query's sum, see `probabilities`
FEW = 1024  # tokens: a share is compared with an even one of at least so many, see `probabilities`


def probabilities(
    query: Tensor, key: Tensor, begin: int, size: int, *, scaling: float, threshold: float, sinks: int, floor: float,
    stride: int,
) -> Tensor:  # fmt: skip
    """Probabilities float64 `[begin]`, in 256ths and before they are rounded up, with which a block reads each token
    before it. `query` and `key` are one head's `[tokens, dim]`.

    A token's share is of a sum over the block's own tokens, the `FIRST` ones, and one in `stride` of the others, which
    counts for `stride`.
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
    """The tokens that are taken: those whose probability, in whole 256ths, carries the running sum over a multiple of
    256. The sum begins at an offset of the block and the head."""
    passed, taken = (159 * block + 97 * head) % 256, []
    for token, share in enumerate(probabilities.tolist()):
        if (passed + share) // 256 > passed // 256:
            taken.append(token)
        passed += share
    return taken


def attend(
    query: Tensor, key: Tensor, value: Tensor, begin: int, size: int, chosen: dict[int, int], scaling: float
) -> Tensor:
    """A block's outputs `[queries, value_dim]`, over its own tokens and the `chosen` ones before it. `chosen` has these
    tokens' probabilities in 256ths, and each counts 256 / probability times."""
    own = torch.arange(begin, min(begin + size, len(query)))
    scores = scaling * query[own].double() @ key.double().T
    lift = torch.full((len(key),), -torch.inf, dtype=torch.float64)
    for token, share in chosen.items():
        lift[token] = torch.tensor(256 / share).log()
    lift = lift.repeat(len(own), 1)
    lift[:, begin : begin + size] = torch.zeros(len(own), len(own)).masked_fill(own > own[:, None], -torch.inf)
    return (scores + lift).softmax(-1) @ value.double()
