"""The choice of a Triton kernel that reads a prompt by selection; it is tried before its first use on a device."""

import functools
import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..said_once import warn_once
from .choice import AUTO_DEVICES, explain_unsupported
from .reference import find_fault, has_gradients, partial_attention
from .sampled_prompt import BLOCK, SHARES, SHORT, encode, find_block, find_probabilities

logger = logging.getLogger(__name__)
MAX_DIM = 256  # channels of a head: a program holds a block of queries and blocks of keys
MIN_TOKENS = 1024  # of a prompt; selecting saves no time in a shorter one
# Tokens and thresholds of a trial: at the low threshold every token is read.
TRIED_TOKENS, LOW_THRESHOLD, HIGH_THRESHOLD = 300, 1e-9, 100.0


def find_selected_attention(
    query: Tensor, key: Tensor, value: Tensor, kernels: str, lengths: Iterable[int], *, past: int = 0
) -> Callable[..., Tensor] | None:
    """`triton.selected_prompt.selected_attention` if it computes such a prompt, or such a chunk of one; else None, and
    the prompt is read exactly.

    Shapes are as there, but `key` and `value` do not have the first `past` tokens yet. `lengths` are tokens of rows'
    whole prompts, without padding. `kernels` is one of `choice.KINDS`.
    """
    if kernels == "torch" or (kernels == "auto" and query.device.type not in AUTO_DEVICES):
        return None
    heads, queries, dim = query.shape[1:]
    tokens = past + key.shape[2]
    packed = all(tensor.stride(3) == 1 for tensor in (query, key, value))
    if not packed or tokens < max(MIN_TOKENS, queries) or has_gradients(query, key, value):
        return None
    if (reason := explain_unsupported(query, key, value, None)) is None:
        if (query.dtype.itemsize > 2 and query.device.type == "cuda") or max(dim, value.shape[3]) > MAX_DIM:
            reason = f"its kernel has 16-bit heads of up to {MAX_DIM} channels, not {query.dtype} ones of {dim}"
        else:
            from .triton import selected_prompt

            if tokens > selected_prompt.MAX_TOKENS:
                reason = f"its kernel has up to {selected_prompt.MAX_TOKENS} tokens, not {tokens}"
            else:
                sizes = {"group": heads // key.shape[1], "dim": dim, "value_dim": value.shape[3]}
                blocks = {find_block(length, max(dim, value.shape[3])) for length in lengths}
                faults = (_find_prompt_fault(query.device, query.dtype, **sizes, block=block) for block in blocks)
                reason = next(filter(None, faults), None)
        if reason is None:
            return selected_prompt.selected_attention
    warn_once(logger, f"prompts are read exactly on {query.device} whatever prefill_threshold is: {reason}")
    return None


@functools.cache
def _find_prompt_fault(
    device: torch.device, dtype: torch.dtype, *, group: int, dim: int, value_dim: int, block: int
) -> str | None:
    """The fault of `selected_attention` on this device, as `reference.find_fault` says it. At `LOW_THRESHOLD` it is
    tried on a short prompt, or the beginning of one, of which it reads everything. At `HIGH_THRESHOLD` one block's
    probabilities are compared, which rounding of codes may change a little."""
    from .triton import selected_prompt

    generator = torch.Generator("cpu").manual_seed(0)
    shapes = (2 * group, dim), (2, dim), (2, value_dim)
    call = [
        torch.randn(1, heads, TRIED_TOKENS, size, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for heads, size in shapes
    ]
    keys, values = (part.repeat_interleave(group, dim=1) for part in call[1:])
    end, code_type = SHORT if block == BLOCK else TRIED_TOKENS, selected_prompt.find_code_type(dtype, device)
    scoring = {"scaling": dim**-0.5, "sinks": 1}
    sharing = scoring | {"threshold": HIGH_THRESHOLD, "stride": 16}

    def compute() -> tuple[Tensor, ...]:
        query, key, value = (part.to(device) for part in call)
        out = query.new_zeros(*query.shape[:3], value_dim)
        reading = scoring | {"threshold": LOW_THRESHOLD, "window": 1, "end": end}
        pairs = selected_prompt.selected_attention(query, key, value, out=out, **reading)
        coded = encode(key, code_type)
        shares = selected_prompt.find_shares(query, *coded, 1, 1, **sharing, block=block)[:, 0, :block]
        return out.cpu(), pairs.cpu(), ((shares.cpu().float() + 1) / SHARES).to(torch.bfloat16)

    expected = partial_attention(call[0], keys, values, scaling=dim**-0.5, causal=True)[0]
    pairs = torch.tensor(group * TRIED_TOKENS * (TRIED_TOKENS + 1), dtype=torch.int64, device="cpu")
    codes, steps = encode(call[1], code_type)
    shares = [
        find_probabilities(queries, codes[0, head], steps[0, head], block, **sharing)
        for head, queries in enumerate(call[0][0, :, block : 2 * block].split(group))
    ]
    return find_fault(compute, (expected.to(dtype), pairs, (torch.cat(shares) / SHARES).to(torch.bfloat16)))
