"""Attention over parts of the keys: a reference, faster paths with the same signature, and the choice.

Two are ours, for CPUs: for few queries and for many. The others are torch's fused operators behind
`scaled_dot_product_attention`: they alone return the log-sum-exp. They are private to torch and may change with any
release. So each is tried against plain torch when a device first meets a dtype and head size, and is used only if it
agrees.
"""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from ..said_once import warn_once
from . import cpu, reference
from .cpu import prompt
from .reference import TOLERANCE, find_fault, merge_partials, softmax_average

__all__ = ["merge_partials", "partial_attention", "softmax_average"]

logger = logging.getLogger(__name__)

# The path without a fused kernel takes a block of queries at a time, and of keys as many as it can hold in float32:
# scores, which it has up to four times over, keys and values. Few queries so take few launches, whatever the context.
QUERY_BLOCK, KEY_BLOCK = 512, 256  # at most; at least
HELD = 1 << 26  # numbers, 256 MiB
MIN_SPLIT_TOKENS = 2048  # keys of fewer tokens are not worth splitting among workers
SPLIT_QUERIES = 64  # more queries than these make enough work for all of them by themselves
# More numbers of a head's queries leave the first cache no room for keys in our kernel for few, so that torch's, which
# multiplies matrices, is up to 2.5 times as fast. It computes float16 by conversions.
MOST_NUMBERS, MULTIPLIED = 2048, (torch.float32, torch.bfloat16)
TRIED_TOKENS = 2111  # so that keys are split, and their last blocks are ragged


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`reference.partial_attention` in bounded memory: by our kernel or torch's where they serve, as they do without a
    mask `[batch or 1, 1, queries, tokens]`, else block by block. `tokens` may be 0, `kernels` is one of
    `choice.KINDS`."""
    if softcap is None and mask is None:
        wide = query.dtype in MULTIPLIED and query.shape[2] * query.shape[3] > MOST_NUMBERS
        ours = kernels != "torch" and not causal and cpu.supports(query, key, value)
        ours = ours and not (wide and find_operator(query, key, value))
        if ours and (found := cpu.compiled_partial_attention(query, key, value, scaling=scaling)) is not None:
            return found
        if kernels != "torch" and prompt.serves(query, key, value, causal=causal):
            return prompt.attend_part(query, key, value, scaling=scaling, causal=causal)
        if (operator := find_operator(query, key, value)) is not None:
            return _attend(operator, query, key, value, scaling, causal)
    out = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float32)
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
    at_once = tokens = max(1, min(QUERY_BLOCK, query.shape[-2]))
    if not causal:  # else a query's own token lies in a block on the diagonal
        numbers = query.shape[:-2].numel() * (4 * at_once + key.shape[-1] + value.shape[-1])
        tokens = max(KEY_BLOCK, HELD // numbers)
    for first in range(0, query.shape[-2], at_once):
        queries = slice(first, min(first + at_once, query.shape[-2]))
        seen = queries.stop if causal else key.shape[-2]
        for start in range(0, seen, tokens):
            keys = slice(start, min(start + tokens, seen))
            block = query[..., queries, :], key[..., keys, :], value[..., keys, :]
            shown = None if mask is None else mask[..., queries, keys]
            diagonal = causal and start == first
            part = reference.partial_attention(*block, scaling=scaling, mask=shown, causal=diagonal, softcap=softcap)
            out[..., queries, :], lse[..., queries] = merge_partials(out[..., queries, :], lse[..., queries], *part)
    return out, lse


class Operator(NamedTuple):
    """One of torch's."""

    name: str  # in `torch.ops.aten`
    given: tuple[Any, ...]  # what it is told between `value` and whether it is causal
    serves: Callable[[Tensor, Tensor, Tensor], bool]  # whether torch says that it is made for tensors like these
    # Of a device: each takes whole heads. 1: the operator splits the keys of a head by itself.
    workers: Callable[[torch.device], int]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
        """`out` in the query's dtype, `lse` float32."""
        operator = getattr(torch.ops.aten, self.name)
        out, lse, *_ = operator(query, key, value, *self.given, causal, scale=scaling)
        queries = query.shape[2]
        return out, lse if lse.shape[2] == queries else lse[..., :queries]  # an operator may round their number up


def _flash_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    # Other sizes are padded in front of the operator.
    return query.shape[3] % 8 == 0 and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, False))


# By type of device, the better one first. The second of a GPU has float32, older GPUs, and values of another size.
OPERATORS = {
    "cpu": (
        Operator(
            "_scaled_dot_product_flash_attention_for_cpu",
            (0.0,),
            serves=lambda query, _, value: query.shape[3] == value.shape[3],
            workers=lambda _: torch.get_num_threads(),
        ),
    ),
    "cuda": (
        Operator("_scaled_dot_product_flash_attention", (0.0,), _flash_serves, workers=lambda _: 1),
        Operator(
            "_scaled_dot_product_efficient_attention",
            (None, True, 0.0),
            serves=lambda query, key, value: can_use_efficient_attention(
                SDPAParams(query, key, value, None, 0.0, False, False)
            ),
            workers=lambda device: torch.cuda.get_device_properties(device).multi_processor_count,
        ),
    ),
}


def find_operator(query: Tensor, key: Tensor, value: Tensor) -> Operator | None:
    """The one of torch's operators that computes this call (shapes as for `partial_attention`), if any does."""
    if (
        query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and query.numel() > 0  # without queries the CPU's operator ends the process
        and key.numel() > 0
        # The CPU's operator takes other strides, and reads by these.
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    ):
        return _choose_operator(query.device, query.dtype, query.shape[3], value.shape[3])
    return None


def _attend(
    operator: Operator, query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`partial_attention` by an operator; `out` is rounded to the input dtype, as by SDPA.

    Most operators give a worker, a thread or a processor of a GPU, whole heads. When a decode step reads few of them,
    some would wait, so the keys are split as well, into parts that are merged by their log-sum-exps.
    """
    splits = 1 if causal else _count_splits(query, key, operator.workers(query.device))
    if splits == 1:
        out, lse = operator.attend(query, key, value, scaling, causal)
        return out.float(), lse
    tokens = key.shape[2] // splits * splits  # fewer than `splits` are left over
    keys, values = (tensor[0, :, :tokens].unflatten(1, (splits, -1)) for tensor in (key, value))
    out, lse = operator.attend(query[0].unsqueeze(1).expand(-1, splits, -1, -1), keys, values, scaling, False)
    weights = lse.softmax(dim=1)
    out, lse = (out.float() * weights.unsqueeze(-1)).sum(dim=1)[None], lse.logsumexp(dim=1)[None]
    if tokens < key.shape[2]:
        rest, rest_lse = operator.attend(query, key[:, :, tokens:], value[:, :, tokens:], scaling, False)
        out, lse = merge_partials(out, lse, rest.float(), rest_lse)
    return out, lse


def _count_splits(query: Tensor, key: Tensor, workers: int) -> int:
    """Into how many parts to split the keys of one row, so that every worker gets the same number of them."""
    if query.shape[0] != 1 or query.shape[2] > SPLIT_QUERIES or key.shape[2] < MIN_SPLIT_TOKENS:
        return 1
    return workers // math.gcd(workers, query.shape[1])


@functools.cache
def _choose_operator(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> Operator | None:
    """The first of the device's operators that serves and agrees with plain torch; a warning names the others once."""
    if dtype not in TOLERANCE:
        return None
    sample = _make_sample(dtype, dim, value_dim)
    for operator in OPERATORS.get(device.type, ()):
        if not operator.serves(*(tensor.to(device) for tensor in sample)):
            continue
        if (wrong := _find_fault(operator, sample, device)) is None:
            return operator
        warn_once(
            logger,
            f"torch's {operator.name} is not used on {device} for {dtype} and head dimensions {dim} and {value_dim}, "
            f"plainer operations serve: {wrong}",
        )
    return None


def _make_sample(dtype: torch.dtype, dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Five queries, each with a token of its own that gets much of its attention, the first and the last among them.
    Keys and values have room for more tokens than `TRIED_TOKENS`, as the bulk's buffers do, which is nan."""
    made = torch.Generator("cpu").manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, *shape, generator=made, dtype=torch.float32, device="cpu")
        for shape in ((5, dim), (TRIED_TOKENS + 9, dim), (TRIED_TOKENS + 9, value_dim))
    )
    key[:, :, [0, 255, 256, TRIED_TOKENS - 2, TRIED_TOKENS - 1]] = query
    for buffer in (key, value):
        buffer[:, :, TRIED_TOKENS:] = torch.nan
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _find_fault(operator: Operator, sample: tuple[Tensor, Tensor, Tensor], device: torch.device) -> str | None:
    """An operator's fault over the keys of a sample, and causally over fewer of them (see `find_fault`)."""
    scaling = 8 / sample[0].shape[3]  # the score of a query and its own token is then about 8

    def compute(attend: Callable, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        whole = attend(query, key[:, :, :TRIED_TOKENS], value[:, :, :TRIED_TOKENS], scaling, False)
        causal = attend(key[:, :, :70], key[:, :, :70], value[:, :, :70], scaling, True)
        return tuple(part.cpu() for out, lse in (whole, causal) for part in (out.to(query.dtype), lse))

    tried = functools.partial(_attend, operator)
    return find_fault(
        lambda: compute(tried, *(tensor.to(device) for tensor in sample)), compute(_attend_plainly, *sample)
    )


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`out` and `lse`, computed in float64, as no setting of torch lowers its precision."""
    scores = torch.matmul(query.double(), key.double().mT) * scaling
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").triu(1), -torch.inf)
    return torch.matmul(scores.softmax(dim=-1), value.double()), scores.logsumexp(dim=-1).float()
