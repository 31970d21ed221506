"""Attention of the newest tokens over themselves, causally, and over all tokens before them, in one call.

Torch's flash attention computes this: it takes fewer KV heads than query heads, and aligns a causal mask with the last
token. Both are tried before their first use on a device, as in `kernels/__init__.py`. On CPUs our kernel for prompts
computes it.
"""

import functools
import logging

import torch
from torch import Tensor

from ..said_once import warn_once
from . import Operator, find_operator, partial_attention
from .cpu import prompt
from .reference import find_fault, merge_partials

logger = logging.getLogger(__name__)

NAME = "_scaled_dot_product_flash_attention"  # the one operator for such calls
TRIED = 5, 300  # queries and tokens of a trial


def attend_to_all(query: Tensor, key: Tensor, value: Tensor, *, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of `query` `[batch, heads, queries, dim]` over `key` `[batch, kv_heads, tokens, dim]` and `value`
    (`value_dim`), `heads` a multiple of `kv_heads`. If `causal`, the last `queries` tokens are the queries' own.

    Returns `out` `[batch, heads, queries, value_dim]`, float32 or in the query's dtype, and `lse` float32.
    """
    group, queries = query.shape[1] // key.shape[1], query.shape[2]
    if prompt.serves(query, key, value, causal=causal):
        return prompt.attend_part(query, key, value, scaling=scaling, causal=causal)
    if (operator := _find_grouped(query, key, value)) is not None:
        return operator.attend(query, key, value, scaling, causal)
    past = key.shape[2] - (queries if causal else 0)
    over_past = None
    if past:
        out, lse = partial_attention(
            query.reshape(len(query), key.shape[1], group * queries, -1),
            key[:, :, :past],
            value[:, :, :past],
            scaling=scaling,
        )
        over_past = out.reshape(*query.shape[:3], -1), lse.reshape(query.shape[:3])
    if not causal:
        assert over_past is not None
        return over_past
    new = (part[:, :, past:].repeat_interleave(group, dim=1) for part in (key, value))
    over_new = partial_attention(query, *new, scaling=scaling, causal=True)
    return over_new if over_past is None else merge_partials(*over_past, *over_new)


def _find_grouped(query: Tensor, key: Tensor, value: Tensor) -> Operator | None:
    """Flash attention, if it takes these tensors and agrees with plain torch; else None."""
    operator = find_operator(query, key, value)
    if operator is None or operator.name != NAME:
        return None
    return operator if _agrees(operator, query.device, query.dtype, query.shape[3]) else None


@functools.cache
def _agrees(operator: Operator, device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether the operator agrees with plain torch in such calls; if not, a warning says so once."""
    if (wrong := find_grouped_fault(operator, device, dtype, dim)) is None:
        return True
    warn_once(
        logger,
        f"torch's {operator.name} is not used on {device} for {dtype}, head dimension {dim} and fewer KV heads than "
        f"query heads, plainer operations serve: {wrong}",
    )
    return False


def find_grouped_fault(operator: Operator, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """The operator's fault in such calls, as `reference.find_fault` says it."""
    generator, (queries, tokens) = torch.Generator("cpu").manual_seed(0), TRIED
    query, key, value = (
        torch.randn(2, heads, count, dim, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for heads, count in ((6, queries), (2, tokens), (2, tokens))
    )
    key[:, :, -queries:] = query[:, ::3]  # a query's own token, and those of the next ones, get much of its attention
    scaling, expected = 8 / dim, []
    for causal in (True, False):
        scores = query.double() @ key.double().repeat_interleave(3, dim=1).mT * scaling
        if causal:
            hidden = torch.ones(queries, tokens, dtype=torch.bool, device="cpu").triu(tokens - queries + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        out = scores.softmax(dim=-1) @ value.double().repeat_interleave(3, dim=1)
        expected += [out.to(dtype), scores.logsumexp(dim=-1).float()]

    def compute() -> tuple[Tensor, ...]:
        states, keys, values = (part.to(device) for part in (query, key, value))
        results = [operator.attend(states, keys, values, scaling, causal) for causal in (True, False)]
        return tuple(part.cpu() for out, lse in results for part in (out.to(dtype), lse))

    return find_fault(compute, tuple(expected))
