"""Teacher forcing through a QAdACache: the tokens and calls of log-likelihood requests."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qada_cache import CacheStats, QAdACache
from qada_cache.state.layer import find_adaptive_tokens

logger = logging.getLogger(__name__)

Forward = Callable[..., Tensor]  # QAdALM._forward


class Row(NamedTuple):
    """Tokens of one row of a batch; the requests that share them differ in the last token they score, if at all."""

    prefix: tuple[int, ...]  # token ids that are prefilled, exactly: the context but for its last token
    queries: tuple[int, ...]  # token ids read query-adaptively: that token, and the continuation but for its last
    requests: list[tuple[int, list[int]]]  # `(index, continuation)`; query `i` scores token `i` of a continuation


def make_rows(requests: Sequence[tuple[list[int], list[int]]], max_length: int) -> list[Row]:
    """Requests `(context, continuation)`, token ids both, as rows: longest first, those with equal prefixes together.

    A row longer than `max_length` loses its oldest tokens, with a warning, as in lm-eval. AssertionError, as there, if
    a context or a continuation is empty, or a continuation longer than `max_length`.
    """
    by_tokens: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, list[int]]]] = {}
    for index, (context, continuation) in enumerate(requests):
        if not context or not 0 < len(continuation) <= max_length:
            raise AssertionError(
                f"request {index} has a context of {len(context)} tokens and a continuation of {len(continuation)}: "
                f"both take one at least, and a continuation at most the {max_length} of the model's length"
            )
        if (over := len(context) + len(continuation) - max_length - 1) > 0:
            logger.warning(
                f"request {index} ({len(context)} tokens of context, {len(continuation)} of continuation) exceeds the "
                f"model's length of {max_length} tokens: the first {over} are cut off"
            )
        tokens = tuple((context + continuation)[-(max_length + 1) : -1])
        split = len(tokens) - len(continuation)
        by_tokens.setdefault((tokens[:split], tokens[split:]), []).append((index, continuation))
    rows = [Row(prefix, queries, same) for (prefix, queries), same in by_tokens.items()]
    return sorted(rows, key=lambda row: (-len(row.prefix), row.prefix, -len(row.queries), row.queries))


def pad(sequences: Sequence[Sequence[int]], device: torch.device, *, side: str) -> tuple[Tensor, Tensor]:
    """Token ids int64 `[rows, longest]`, padded with 0 on that side, and their mask."""
    ids = [torch.tensor(tokens, dtype=torch.long, device=device) for tokens in sequences]
    mask = [torch.ones_like(row) for row in ids]
    return pad_sequence(ids, batch_first=True, padding_side=side), pad_sequence(mask, True, padding_side=side)


def score(
    batches: Sequence[Sequence[Row]],
    forward: Forward,
    prefill: Callable[[Tensor, Tensor], QAdACache],  # token ids of prefixes and their mask, as by `pad`
    device: torch.device,
) -> Iterator[tuple[CacheStats, list[tuple[int, float, bool]]]]:
    """Totals of each batch's cache, and for each request `(index, log-likelihood, whether greedy decoding agrees)`. A
    prefix is read once per batch however many rows share it, and once for neighbouring batches of the same prefixes."""
    for prefixes, group in groupby(batches, key=lambda batch: list(dict.fromkeys(row.prefix for row in batch))):
        ids, mask = pad(prefixes, device, side="left")
        prefilled, same = [prefill(ids, mask)], list(group)
        for batch in same:
            cache = prefilled.pop() if batch is same[-1] else copy.deepcopy(prefilled[0])
            places = [prefixes.index(row.prefix) for row in batch]
            if places != list(range(len(prefixes))):
                cache.reorder_cache(torch.LongTensor(places))  # repeats rows, in every kind of layer
            scores, stats = _score_batch(batch, mask[places], forward, cache), cache.stats(gather=True)
            del cache  # before the next prefix is read: no two caches need room at once
            yield stats, scores


def _score_batch(
    batch: Sequence[Row], prefix_mask: Tensor, forward: Forward, cache: QAdACache
) -> list[tuple[int, float, bool]]:
    """Read the rows' queries, in calls that heads decide for: longer ones would be exact attention."""
    ids, mask = pad([row.queries for row in batch], prefix_mask.device, side="right")
    parts: dict[int, list[Tensor]] = {}
    agrees: dict[int, bool] = {}
    most = find_adaptive_tokens(cache.layers, cache.options.window)
    for start in range(0, ids.shape[1], most):
        stop = min(start + most, ids.shape[1])
        log_probabilities = forward(cache, ids[:, start:stop], torch.cat([prefix_mask, mask[:, :stop]], dim=1))
        for row, scores, greedy in zip(batch, log_probabilities, log_probabilities.argmax(dim=-1), strict=True):
            for index, continuation in row.requests:
                wanted = torch.tensor(continuation[start:stop], dtype=torch.long, device=ids.device)
                parts.setdefault(index, []).append(scores[: len(wanted)].gather(-1, wanted[:, None]).squeeze(-1))
                agrees[index] = agrees.get(index, True) and greedy[: len(wanted)].equal(wanted)
    return [(index, float(torch.cat(scored).sum()), agrees[index]) for index, scored in parts.items()]
