"""Many ways of deciding at once on the needle model: one batch row each, over one prompt's keys that all rows share.

What `QAdACache` could not be asked for yet (blended moments, a threshold for every layer) is tried here first, and
sweeps take seconds instead of minutes. Decisions and outputs are those of a `QAdACache` (see tests/test_trials.py),
with the prompt's own moments frozen when the questions begin, as with `update_moments=False`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from qada_cache import KeyMoments
from qada_cache.criterion import gaussian_log_bulk, logit, pool_score_moments, score_moments
from qada_cache.needle import NeedlePrompt

NAME = "needle_trials"
SINKS, WINDOW = 16, 112
RULES = ("head", "mean", "all")


@dataclass(frozen=True)
class Way:
    """One way of deciding.

    Args:
        rule: as `QAdACache`'s `group_rule`.
        thresholds: one for every layer.
        weight: of the prompt-agnostic moments, against the prompt's own.
        name: what a table calls it.
    """

    rule: str
    thresholds: tuple[float, ...]
    weight: float = 1.0
    name: str = ""


@dataclass
class Outcome:
    """Of one way: questions asked and answered right; KV-head decisions and how many read the bulk, by layer; and
    query heads that stayed local, of all."""

    asked: int
    right: int
    kv_heads: list[int]
    kv_read: list[int]
    heads: int
    local: int

    @property
    def recall(self) -> float:
        """The share of questions answered right."""
        return self.right / self.asked

    @property
    def read(self) -> float:
        """The share of KV heads whose bulk was read."""
        return sum(self.kv_read) / sum(self.kv_heads)

    @property
    def sparsity(self) -> float:
        """The share of query heads that stayed local."""
        return self.local / self.heads

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.asked + other.asked,
            self.right + other.right,
            [a + b for a, b in zip(self.kv_heads, other.kv_heads, strict=True)],
            [a + b for a, b in zip(self.kv_read, other.kv_read, strict=True)],
            self.heads + other.heads,
            self.local + other.local,
        )


class Trials:
    """An attention function for one prompt and several ways, row by row of the batch.

    Args:
        context: the prompt's keys and values by layer, `[1, kv_heads, tokens, dim]`.
        ways: what the rows decide by.
        moments: prompt-agnostic ones.
    """

    def __init__(self, context: list[tuple[Tensor, Tensor]], ways: Sequence[Way], moments: KeyMoments) -> None:
        self.context, self.moments = context, moments
        self.limits = torch.tensor([[logit(threshold) for threshold in way.thresholds] for way in ways]).T
        self.weights = torch.tensor([way.weight for way in ways]).view(-1, 1, 1)
        self.rules = torch.tensor([RULES.index(way.rule) for way in ways]).view(-1, 1, 1, 1)
        self.own = [own_moments(keys[:, :, SINKS:-WINDOW]) for keys, _ in context]
        shape = len(context), len(ways)
        self.read, self.local = torch.zeros(shape), torch.zeros(shape)
        self.decided = 0  # queries
        AttentionInterface.register(NAME, self.attend)

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """The signature transformers gives attention functions; `key` and `value` are the questions' alone."""
        layer: int = module.layer_idx  # type: ignore[assignment]  # for mypy all of a module's are tensors
        far_keys, far_values = self.context[layer]
        (rows, heads, queries, dim), kv_heads, tokens = query.shape, key.shape[1], far_keys.shape[2]
        query = query.reshape(rows, kv_heads, -1, dim)  # query heads of a group one after the other
        position = tokens + torch.arange(key.shape[2] - queries, key.shape[2])
        assert key.shape[2] < WINDOW  # all of the questions are in the window
        at = torch.arange(tokens)
        bulk = (at >= SINKS) & (position[:, None] - at >= WINDOW)
        edge = torch.cat([at[:SINKS], at[-WINDOW:]])
        later = tokens + torch.arange(key.shape[2]) > position[:, None]
        near_keys = torch.cat([far_keys[:, :, edge].expand(rows, -1, -1, -1), key], dim=2)
        near_values = torch.cat([far_values[:, :, edge].expand(rows, -1, -1, -1), value], dim=2)
        scores = torch.matmul(query, near_keys.mT).view(rows, kv_heads, -1, queries, near_keys.shape[2]) * scaling
        scores = scores.masked_fill(torch.cat([bulk[:, edge], later], dim=1), -torch.inf)
        local = scores.logsumexp(dim=-1)

        bulk_tokens = position + 1 - SINKS - WINDOW
        flags = self._long_context(layer, local - self._log_bulk(layer, query, bulk_tokens, scaling).view(local.shape))
        self.read[layer] += flags.any(dim=2).sum(dim=(1, 2))
        self.local[layer] += (~flags).sum(dim=(1, 2, 3))
        self.decided += queries if layer == 0 else 0
        output = torch.matmul(scores.softmax(dim=-1).flatten(2, 3), near_values).view(*local.shape, dim)
        self._read_bulk(layer, query.view(*local.shape, dim), bulk, flags, local, output, scaling)
        return output.view(rows, heads, queries, dim).transpose(1, 2).contiguous(), None

    def _read_bulk(
        self, layer: int, query: Tensor, bulk: Tensor, flags: Tensor, local: Tensor, output: Tensor, scaling: float
    ) -> None:
        """Merge the attention of flagged heads over `bulk` `[queries, tokens]` into `output`, theirs without it."""
        keys, values = self.context[layer]
        for head in range(keys.shape[1]):
            row = flags[:, head].any(dim=(1, 2)).nonzero()[:, 0]
            if not len(row):
                continue
            scores = torch.matmul(query[row, head], keys[0, head].T).mul_(scaling).masked_fill_(~bulk, -torch.inf)
            total = scores.logsumexp(dim=-1)
            far = torch.matmul(scores.sub_(total.unsqueeze(-1)).exp_(), values[0, head])
            share = torch.sigmoid(total - local[row, head]) * flags[row, head]
            output[row, head] += share.unsqueeze(-1) * (far - output[row, head])

    def _log_bulk(self, layer: int, query: Tensor, bulk_tokens: Tensor, scaling: float) -> Tensor:
        """Eq. 7's estimate from the moments of a mixture: agnostic ones with the row's weight, else the prompt's."""
        ((mean, covariance),) = self.moments.layer(layer, [int(bulk_tokens[-1])], query.device)
        agnostic = score_moments(query, mean, covariance, scaling=scaling)
        own = score_moments(query, *self.own[layer], scaling=scaling)
        pooled = pool_score_moments(self.weights, *agnostic, 1 - self.weights, *own)
        return gaussian_log_bulk(*pooled, bulk_tokens.repeat(query.shape[2] // len(bulk_tokens)))

    def _long_context(self, layer: int, margin: Tensor) -> Tensor:
        """What each row's rule makes of `log A_local - log A_bulk` `[rows, kv_heads, group, queries]`."""
        limit = self.limits[layer].view(-1, 1, 1, 1)
        flags = margin < limit
        mean = (margin.sigmoid().mean(dim=2, keepdim=True) < limit.sigmoid()).expand_as(flags)
        every = flags.all(dim=2, keepdim=True).expand_as(flags)
        return torch.where(self.rules == 0, flags, torch.where(self.rules == 1, mean, every))


def own_moments(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `[1, kv_heads, dim]` and covariance of keys `[1, kv_heads, tokens, dim]`."""
    mean = keys.mean(dim=2)
    centred = keys - mean.unsqueeze(2)
    return mean, torch.matmul(centred.mT, centred) / keys.shape[2]


@torch.no_grad()
def read_context(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: NeedlePrompt
) -> list[tuple[Tensor, Tensor]]:
    """The prompt's keys and values by layer, read with full attention."""
    cache = DynamicCache(config=model.config)
    model.model(tokenizer(prompt.context, return_tensors="pt").input_ids, past_key_values=cache)
    return [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[misc]  # None only before the first update


@torch.no_grad()
def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: NeedlePrompt,
    context: list[tuple[Tensor, Tensor]],
    ways: Sequence[Way],
    moments: KeyMoments,
) -> list[Outcome]:
    """The prompt's questions asked one after the other, in every way; `context` is what `read_context` gave."""
    trials, before = Trials(context, ways, moments), model.config._attn_implementation
    model.set_attn_implementation(NAME)
    cache = DynamicCache(config=model.config)
    last, right = torch.empty(len(ways), 0, dtype=torch.long), torch.zeros(len(ways), dtype=torch.long)
    tokens = context[0][0].shape[2]
    for question, answer in zip(prompt.questions, prompt.answers, strict=True):
        asked = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        ids = torch.cat([last, asked.expand(len(ways), -1)], dim=1)
        positions = tokens + cache.get_seq_length() + torch.arange(ids.shape[1])[None]
        last = model(ids, position_ids=positions, past_key_values=cache).logits[:, -1:].argmax(-1)
        right += last[:, 0] == tokenizer.convert_tokens_to_ids(answer)
    model.set_attn_implementation(before)
    config, queries = model.config, trials.decided
    return [
        Outcome(
            len(prompt.questions),
            int(right[row]),
            [queries * config.num_key_value_heads] * len(context),
            [int(count) for count in trials.read[:, row]],
            queries * config.num_attention_heads * len(context),
            int(trials.local[:, row].sum()),
        )
        for row in range(len(ways))
    ]
