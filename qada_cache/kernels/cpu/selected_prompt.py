"""Selected attention of a prompt on the CPU: a block of queries reads those keys that one of them selects.

The queries of a block and one head read *near* keys exactly: the sinks, and the windows of all queries, both in whole
segments. All other keys are *far*. A query selects a far key that gets `threshold` times an even share of the weight so
far: of near keys and, from the newest on, of tiles of far ones. The block reads all keys that any query selects. Unread
keys are replaced by an estimate of their weight, with values on the line of regression, as in decoding
(`sketch/selection.py`).

Six neighbouring queries estimate a quarter of a segment's keys, which counts for all of them. They estimate all if one
of them selects a key of the quarter, or if its mean score plus `REACH` (selecting.h) standard deviations would select.

Estimates of scores are products of bytes. A prompt is bound by arithmetic, and 8 bits cost no more than the sketch's
few: keys less the mean of their segment, and queries, rotated and rounded to 127 levels of their own largest number;
to 63 where the processor sums products in 16 bits, faster than in 32. Before, keys are multiplied by weights of their
channels, and queries divided (`describe_channels`). No query's output depends on later tokens.
"""

import ctypes
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...sketch.codec import MIN_ENERGY, MIN_VARIANCE, set_floor
from ...sketch.coded import find_block
from . import prompt
from .addresses import find_address
from .processor import MULTIPLIES_TILES

SOURCE = Path(__file__).with_name("selected_prompt.cpp")
SEGMENT = 64  # keys that share a centre, as many as a chunk of prompt.h
BLOCK = 66  # queries that read together, a multiple of a strip of prompt.h
MOST_SUM = 2**15 - 1  # of products of codes, where they are summed in 16 bits
MAX_DIM = 256  # channels: a thread's moments of a segment grow with their square, and would not fit into its stack
LEAST_FAR = 1024  # with fewer far keys a query reads all: to estimate takes as long


class Call(ctypes.Structure):
    """`Call` of selecting.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "weights", "spreads", "out", "unread")),
        *((name, ctypes.c_int64) for name in ("query_head", "query_token", "key_token", "value_token")),
        *((name, ctypes.c_int64) for name in ("out_head", "out_token", "group", "queries", "tokens", "start", "first")),
        *((name, ctypes.c_int64) for name in ("window", "narrow", "threads")),
        *((name, ctypes.c_double) for name in ("scaling", "threshold")),
    )


def serves(query: Tensor, value: Tensor) -> bool:
    """Whether `selected_attention` computes a call that `prompt.serves` admits, its build included."""
    sizes = query.shape[3], value.shape[3], query.dtype
    return selects_sizes(*sizes) and build_selecting(*sizes) is not None


def selects_sizes(dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for keys and values of so many channels, where selecting them pays: by tiles of AMX a
    key is read in the time that it takes to estimate it."""
    if dim % 4 or max(dim, value_dim) > MAX_DIM:
        return False
    return not (dtype == torch.bfloat16 and prompt.read_instructions() >= MULTIPLIES_TILES)


def define_selecting(dim: int, value_dim: int, dtype: torch.dtype) -> tuple[str, ...]:
    """The macros that `SOURCE` is built with."""
    ours = {"SEGMENT": SEGMENT, "BLOCK": BLOCK, "ROTATED": find_block(dim), "MOST_SUM": MOST_SUM}
    return *prompt.define(dim, value_dim, dtype), *(f"-D{name}={value}" for name, value in ours.items())


def build_selecting(dim: int, value_dim: int, dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernel for these sizes and a dtype, as by `prompt.build_kernel`."""
    return prompt.build_kernel(SOURCE, Call, define_selecting(dim, value_dim, dtype))


def find_selecting(tokens: int, *, sinks: int, window: int) -> slice:
    """The queries that select, none of a short prompt: those with `LEAST_FAR` far keys, less the last `window`."""
    start = _round_up(sinks) + LEAST_FAR + window - 1
    return slice(start, max(start, tokens - window))


def find_fewest(*, sinks: int, window: int) -> int:
    """The tokens of the shortest prompt of which a query selects."""
    return find_selecting(0, sinks=sinks, window=window).start + window + 1


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    threshold: float,
    sinks: int,
    window: int,
    out: Tensor,
    end: int = 0,
    energies: Tensor | None = None,
) -> int:
    """Causal attention of one row's prompt, or of a part of it, for calls that `prompt.serves` and `serves` admit: by
    selection for `find_selecting`, exact for the others.

    Args:
        query: `[1, heads, queries, dim]`, of the last tokens.
        key, value: `[1, kv_heads, tokens, dim or value_dim]`.
        scaling: of scores.
        threshold: times an even share, above 0.
        sinks, window: tokens, the query's own included.
        out: the query's dtype or float32 `[1, heads, queries, value_dim]`, written.
        end: tokens of the whole prompt, if there are more than `tokens`.
        energies: mean squares of the channels of queries, float32 `[kv_heads, dim]`; None if unknown.

    Returns the pairs of a query and a key that were computed, of `prompt.count_pairs`. MemoryError as
    `prompt.prompt_attention`.
    """
    group, tokens, before = query.shape[1] // key.shape[1], key.shape[2], key.shape[2] - query.shape[2]
    pairs = prompt.count_pairs(query, key)
    whole = find_selecting(max(tokens, end), sinks=sinks, window=window)
    selecting = slice(max(whole.start, before), min(whole.stop, tokens))
    if selecting.start >= selecting.stop:
        prompt.prompt_attention(query, key, value, scaling=scaling, causal=True, out=out)
        return pairs
    for exact in (slice(before, selecting.start), slice(selecting.stop, tokens)):
        if exact.start < exact.stop:  # all keys are packed first, even for no query
            seen, own = (key[:, :, : exact.stop], value[:, :, : exact.stop]), _move(exact, -before)
            prompt.prompt_attention(query[:, :, own], *seen, scaling=scaling, causal=True, out=out[:, :, own])
    for head in range(key.shape[1]):
        asking = slice(head * group, (head + 1) * group), _move(selecting, -before)
        one = query[0][asking], key[0, head, : selecting.stop], value[0, head, : selecting.stop]
        arguments: dict[str, Any] = {"scaling": scaling, "threshold": threshold}
        arguments |= {"first": (first := _round_up(sinks)), "window": window}
        arguments["weights"], arguments["spreads"] = describe_channels(
            key[0, head, first : first + LEAST_FAR], None if energies is None else energies[head]
        )
        pairs -= _attend_to_head(*one, start=selecting.start, out=out[0][asking], **arguments)
    return pairs


def describe_channels(keys: Tensor, energies: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights of channels, float32 `[dim]`, and the covariance of the first far keys `[tokens, dim]` within segments,
    float32 `[dim, padded]`, over their mean square length as they are coded.

    Weights are `(E / v)^(1/4)`, with `energies` `E` `[dim]` and variances `v`: rounding of keys and queries changes
    scores least by these. A model may have large keys and small queries in a channel, or the reverse. Ones, if no
    energies are known."""
    segments = keys.float().unflatten(0, (-1, SEGMENT))
    residuals = (segments - segments.mean(dim=1, keepdim=True)).flatten(0, 1)
    covariance = residuals.T @ residuals / len(residuals)
    variances, weights = covariance.diagonal(), torch.ones(keys.shape[1], dtype=torch.float32, device="cpu")
    if energies is not None:
        weights = set_floor(energies.cpu(), MIN_ENERGY) / set_floor(variances, MIN_VARIANCE)
        weights = weights.pow(0.25).contiguous()
    length = (variances * weights.square()).sum().clamp_min(torch.finfo(torch.float32).tiny)
    return weights, pad(covariance / length, (0, -len(weights) % 16)).contiguous()


def _move(span: slice, tokens: int) -> slice:
    return slice(span.start + tokens, span.stop + tokens)


def _round_up(tokens: int) -> int:
    return math.ceil(tokens / SEGMENT) * SEGMENT


def _attend_to_head(
    query: Tensor,  # `[group, queries, dim]`, from `start` on
    key: Tensor,  # `[tokens, dim]`
    value: Tensor,
    *,
    start: int,
    first: int,
    window: int,
    weights: Tensor,
    spreads: Tensor,
    scaling: float,
    threshold: float,
    out: Tensor,
) -> int:
    """Returns the pairs of a query and a far key that were not read."""
    queries, (tokens, dim), value_dim = query.shape[1], key.shape, value.shape[1]
    kernel = build_selecting(dim, value_dim, key.dtype)
    assert kernel is not None
    unread_pairs = torch.zeros((), dtype=torch.int64, device="cpu")
    addresses = (
        find_address("query", query, key.dtype, (*query.shape[:2], dim), packed=1),
        find_address("key", key, prompt.NUMBERS, (tokens, dim), packed=1),
        find_address("value", value, key.dtype, (tokens, value_dim), packed=1),
        find_address("weights", weights, torch.float32, (dim,)),
        find_address("spreads", spreads, torch.float32, (dim, dim + -dim % 16)),
        find_address("out", out, prompt.OUT, (*query.shape[:2], value_dim), packed=1),
        find_address("unread", unread_pairs, torch.int64, ()),
    )
    call = Call(
        *addresses,
        *(*query.stride()[:2], key.stride(0), value.stride(0), *out.stride()[:2]),
        *(query.shape[0], queries, tokens, start, first, window),
        *(out.dtype == torch.bfloat16, torch.get_num_threads(), scaling, threshold),
    )
    kernel.prompt_attention(ctypes.byref(call))
    return int(unread_pairs)
