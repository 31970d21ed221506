"""Attention over parts of the keys: a reference, faster paths with the same signature, and the choice.

Two are ours, for CPUs: one for few queries, one for many. The others are torch's fused operators behind
`scaled_dot_product_attention`: they alone return the log-sum-exp. They are private to torch and may change with any
release. So each is compared with plain torch when a device first meets a dtype and head size, and is used only if it
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

# The path without a fused kernel computes blocks of `QUERY_BLOCK` queries by `KEY_BLOCK` keys or more. A block takes as
# many keys as fit into `MAX_BLOCK_NUMBERS` float32 numbers: up to four copies of its scores, its keys and its values.
# So few queries take few launches, however long the context.
QUERY_BLOCK, KEY_BLOCK = 512, 256
MAX_BLOCK_NUMBERS = 1 << 26  # 256 MiB
MIN_SPLIT_TOKENS = 2048  # keys of fewer tokens are not worth splitting among workers
SPLIT_QUERIES = 64  # with more queries than these, every worker has enough to do without splitting keys
# If a head's queries are more numbers than `MAX_QUERY_NUMBERS`, our kernel for few queries has no room for keys in the
# first cache. Torch's then multiplies matrices, up to 2.5 times as fast, in the dtypes `MULTIPLIED`; it converts
# float16.
MAX_QUERY_NUMBERS, MULTIPLIED = 2048, (torch.float32, torch.bfloat16)
TRIED_TOKENS = 2111  # of a trial: keys are split, and the last block of each part is not full


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
    """`reference.partial_attention` in bounded memory: by our kernel or torch's, else block by block.

    No kernel takes a `mask` `[batch or 1, 1, queries, tokens]` or a `softcap`. `tokens` may be 0. `kernels` is one of
    `choice.KINDS`.
    """
    if softcap is None and mask is None:
        wide = query.dtype in MULTIPLIED and query.shape[2] * query.shape[3] > MAX_QUERY_NUMBERS
        ours = kernels != "torch" and not causal and cpu.supports(query, key, value)
        ours = ours and not (wide and find_operator(query, key, value))
        if ours and (computed := cpu.compiled_partial_attention(query, key, value, scaling=scaling)) is not None:
            return computed
        if kernels != "torch" and prompt.serves(query, key, value, causal=causal):
            return prompt.attend_part(query, key, value, scaling=scaling, causal=causal)
        if (operator := find_operator(query, key, value)) is not None:
            return _attend(operator, query, key, value, scaling, causal)
    out = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float32)
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
    query_block = key_block = max(1, min(QUERY_BLOCK, query.shape[-2]))
    if not causal:  # causal blocks are square: a query's own token lies in a block on the diagonal
        key_numbers = query.shape[:-2].numel() * (4 * query_block + key.shape[-1] + value.shape[-1])
        key_block = max(KEY_BLOCK, MAX_BLOCK_NUMBERS // key_numbers)
    for first in range(0, query.shape[-2], query_block):
        queries = slice(first, min(first + query_block, query.shape[-2]))
        seen = queries.stop if causal else key.shape[-2]
        for start in range(0, seen, key_block):
            keys = slice(start, min(start + key_block, seen))
            block = query[..., queries, :], key[..., keys, :], value[..., keys, :]
            block_mask = None if mask is None else mask[..., queries, keys]
            diagonal = causal and start == first
            part = reference.partial_attention(
                *block, scaling=scaling, mask=block_mask, causal=diagonal, softcap=softcap
            )
            out[..., queries, :], lse[..., queries] = merge_partials(out[..., queries, :], lse[..., queries], *part)
    return out, lse


class Operator(NamedTuple):
    """One of torch's fused attention operators."""

    name: str  # in `torch.ops.aten`
    given: tuple[Any, ...]  # its arguments between `value` and `is_causal`
    serves: Callable[[Tensor, Tensor, Tensor], bool]  # whether torch allows it for this query, key and value
    # The threads or processors of a device, each of which takes whole heads; 1 if the operator splits a head's keys.
    workers: Callable[[torch.device], int]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
        """`out` in the query's dtype, `lse` float32."""
        operator = getattr(torch.ops.aten, self.name)
        out, lse, *_ = operator(query, key, value, *self.given, causal, scale=scaling)
        queries = query.shape[2]
        # An operator may round the number of queries up.
        return out, lse if lse.shape[2] == queries else lse[..., :queries]


def _flash_serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    # SDPA pads other sizes before it calls the operator.
    return query.shape[3] % 8 == 0 and can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, False))


# By type of device, the faster one first. The second one for GPUs also takes float32, older GPUs, and values of another
# size than keys.
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
    """The first of torch's operators that computes this call, or None. Shapes are as for `partial_attention`."""
    if (
        query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device
        and query.numel() > 0  # without queries the CPU's operator ends the process
        and key.numel() > 0
        # The CPU's operator accepts other strides, but reads channels as if they were contiguous.
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    ):
        return _choose_operator(query.device, query.dtype, query.shape[3], value.shape[3])
    return None


def _attend(
    operator: Operator, query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`partial_attention` by an operator; `out` is rounded to the input dtype, as by SDPA.

    Most operators give whole heads to each worker, a thread or a processor of a GPU. When a decode step reads few
    heads, some workers would be idle. So keys are split as well, into parts that are merged by their log-sum-exps.
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
    """The number of parts to split the keys of one row into, so that every worker gets as many parts as the others."""
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
    """Five queries, and keys and values of `TRIED_TOKENS` tokens. Five tokens, the first and the last among them, have
    a query as their key, and get much of its attention. Like the bulk's buffers, keys and values have room for more
    tokens; these are nan."""
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
    """The fault of an operator over all keys of a sample, or causally over 70 of them, as `find_fault` says it."""
    scaling = 8 / sample[0].shape[3]  # the score of a query and its own token is then about 8

    def compute(attend: Callable, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        whole = attend(query, key[:, :, :TRIED_TOKENS], value[:, :, :TRIED_TOKENS], scaling, False)
        causal = attend(key[:, :, :70], key[:, :, :70], value[:, :, :70], scaling, True)
        return tuple(part.cpu() for out, lse in (whole, causal) for part in (out.to(query.dtype), lse))

    fused = functools.partial(_attend, operator)
    return find_fault(
        lambda: compute(fused, *(tensor.to(device) for tensor in sample)), compute(_attend_plainly, *sample)
    )


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`out` and `lse`, computed in float64: no setting of torch lowers its precision."""
    scores = torch.matmul(query.double(), key.double().mT) * scaling
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").triu(1), -torch.inf)
    return torch.matmul(scores.softmax(dim=-1), value.double()), scores.logsumexp(dim=-1).float()
