"""Teacher forcing through a QAdACache: the tokens and calls of log-likelihood requests."""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from qada_cache import CacheStats, QAdACache
from qada_cache.key_moments.rotation import list_changes, read_rope_settings
from qada_cache.models import forgets_states
from qada_cache.state.layer import QAdALayer, find_adaptive_tokens

logger = logging.getLogger(__name__)

Forward = Callable[..., Tensor]  # QAdALM._forward


class Row(NamedTuple):
    """Tokens of one row of a batch; the requests that share them differ in the last token they score, if at all."""

    prefix: tuple[int, ...]  # token ids that are prefilled, exactly: the context but for its last token
    queries: tuple[int, ...]  # token ids read query-adaptively: that token, and the continuation but for its last
    requests: list[tuple[int, list[int]]]  # `(index, continuation)`; the last queries score a continuation's tokens
    whole: bool = False  # the queries are all tokens, which one exact call reads


def find_change(model: PreTrainedModel) -> int | None:
    """The most tokens that a model reads by its first rotary frequencies; None, if it has no others."""
    config = model.config.get_text_config(decoder=True)
    changes = list_changes(read_rope_settings(config), range(config.num_hidden_layers))
    return min(changes.values(), default=None)


def find_first_position(model: PreTrainedModel) -> int:
    """The position of a text's first token: RoBERTa and models like it have those up to padding's id for padding."""
    tables = (part for name, part in model.named_modules() if name.endswith(".position_embeddings"))
    return max((1 + part.padding_idx for part in tables if getattr(part, "padding_idx", None) is not None), default=0)


def reads_by_column(cache: QAdACache) -> bool:
    """Whether a model has layers of a kind of its own (DeepSeek V4). These compress blocks of columns, so that padding
    on the left changes what is read."""
    others = [type(layer) for layer in cache.layers if not isinstance(layer, QAdALayer)]
    return any(kind.__module__ != DynamicLayer.__module__ for kind in others)


def make_rows(requests: Sequence[tuple[list[int], list[int]]], max_length: int, change: int | None = None) -> list[Row]:
    """Requests `(context, continuation)`, token ids both, as rows: longest first, those with equal prefixes together.

    A row longer than `max_length` loses its oldest tokens, with a warning, as in lm-eval. AssertionError, as there, if
    a context or a continuation is empty, or a continuation longer than `max_length`.

    A model may have other rotary frequencies for more than `change` tokens. A cache would go on with keys of the first
    ones where a row's queries pass that length. Such rows are read whole, with a warning.
    """
    by_tokens: dict[tuple[bool, tuple[int, ...], tuple[int, ...]], list[tuple[int, list[int]]]] = {}
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
        whole = change is not None and split <= change < len(tokens)
        split = 0 if whole else split
        by_tokens.setdefault((whole, tokens[:split], tokens[split:]), []).append((index, continuation))
    rows = [Row(prefix, queries, same, whole) for (whole, prefix, queries), same in by_tokens.items()]
    if count := sum(row.whole for row in rows):
        logger.warning(
            f"{count} of {len(rows)} texts pass {change} tokens, where this model's rotary frequencies change, behind "
            "their prompt: these are read exactly, as a whole, and no head decides"
        )
    return sorted(rows, key=lambda row: (-len(row.prefix), row.prefix, -len(row.queries), row.queries))


def make_batches(
    rows: Sequence[Row], choose_size: Callable[[int, Sequence[int]], int], change: int | None = None
) -> list[list[Row]]:
    """The rows in batches: those that are read whole alone, others with those by the same rotary frequencies.
    `choose_size` is given the place of a batch's first row, and for each place the most tokens of a row from there."""
    batches, start = [[row] for row in rows if row.whole], 0
    rows = [row for row in rows if not row.whole]
    most = list(accumulate((len(row.prefix) + len(row.queries) for row in reversed(rows)), max))[::-1]

    def is_long(row: Row) -> bool:
        return change is not None and len(row.prefix) > change

    while start < len(rows):
        size = choose_size(start, most)
        batches.append([row for row in rows[start : start + size] if is_long(row) == is_long(rows[start])])
        start += len(batches[-1])
    return batches


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
            cache = prefilled.pop() if batch is same[-1] else prefilled[0].fork()  # whose counters are at zero
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
    if batch[0].whole:
        most = ids.shape[1]
    elif forgets_states(cache._shared.model.config):
        most = 1
    for start in range(0, ids.shape[1], most):
        stop = min(start + most, ids.shape[1])
        log_probabilities = forward(cache, ids[:, start:stop], torch.cat([prefix_mask, mask[:, :stop]], dim=1))
        for row, scores, greedy in zip(batch, log_probabilities, log_probabilities.argmax(dim=-1), strict=True):
            for index, continuation in row.requests:
                unscored = len(row.queries) - len(continuation)  # 0, but of a row that is read whole
                begin = max(start, unscored)
                given = continuation[begin - unscored : stop - unscored]
                wanted = torch.tensor(given, dtype=torch.long, device=ids.device)
                here = slice(begin - start, begin - start + len(wanted))
                parts.setdefault(index, []).append(scores[here].gather(-1, wanted[:, None]).squeeze(-1))
                agrees[index] = agrees.get(index, True) and greedy[here].equal(wanted)
    return [(index, float(torch.cat(scored).sum()), agrees[index]) for index, scored in parts.items()]
