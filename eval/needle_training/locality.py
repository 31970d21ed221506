"""What makes the needle model's heads local unless a question needs them: a sink, and penalties.

The penalties need scores and keys, so stages that use them run with an attention function of their own.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from eval.needle_training.texts import BOS, QUESTION_WORDS, SINKS, TOKEN, WINDOW, Stage

NAME = "needle_training"
FLOOR = 1e-2  # of the local share under the logarithm: a retrieval head may have next to none
FACT_TOKENS = 192  # in a needle prompt, whatever its length: 48 facts of four words


class LocalityPenalties:
    """An attention function that attends as usual and adds up, over the layers of one forward pass, what keeps
    attention local:

    `outside`: the mean of `-log(local share)`, the share of attention on sinks and window; questions weigh 0.3.

    and what trains eq. 7's Gaussian estimate of `A_bulk`, for a bulk of `tokens` tokens (`A_random` from the keys of
    the batch's random words, `A_own` from the text's own, weighed as a prompt of that length would hold them):

    `estimate`: the mean of `softplus(log A_random - log A_local + 1)` over the text's own queries, not the
    questions'. Of the query heads of a KV head only the one with the lowest estimate is penalised: the others are
    often called long-context for nothing, which is what group rules are for. What those save on this model is therefore
    trained in: an earlier one, with a tenth of the penalty on all heads alike and five times the weight on `found`, had
    them save nothing where each rule got its own least threshold.
    `found`, `hidden`: over the words asked for, and heads in proportion to the attention they send far, the means of
    `softplus(log A_local - log A_random + 1)` and `softplus(log A_own - log A_local - 1)`. A head that looks
    something up is to be found with the moments of random words, and to be missed with those of its own repetitive
    prompt: the paper's finding, here trained in.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        AttentionInterface.register(NAME, self.attend)
        AttentionMaskInterface.register(NAME, eager_mask)

    def begin(self, bulk: Tensor, noise: Tensor, tokens: int) -> None:
        """A forward pass follows; `bulk` is bool `[queries, keys]`, `noise` bool `[rows, keys]`."""
        self.bulk, self.noise, self.tokens = bulk, noise, tokens
        self.outside: list[Tensor] = []
        self.estimate: list[Tensor] = []
        self.asked: list[Tensor] = []  # per layer: the sums of `found` and `hidden`, and of the heads' weights

    def penalty(self) -> tuple[Tensor, float]:
        """The stage's weighted penalty of that pass, and `outside` to show."""
        outside = torch.stack(self.outside).mean()
        penalty = self.stage.locality * outside
        if self.stage.random_rows:
            found, hidden, far = torch.stack(self.asked).sum(dim=0)
            penalty = penalty + self.stage.estimate * torch.stack(self.estimate).mean()
            penalty = penalty + (self.stage.found * found + self.stage.hidden * hidden) / far
        return penalty, outside.item()

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """The signature transformers gives attention functions; `mask` is additive."""
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.matmul(query, keys.transpose(-1, -2)) * scaling + mask
        lowest = torch.finfo(scores.dtype).min
        log_local = scores.masked_fill(self.bulk, lowest).logsumexp(dim=-1)
        log_bulk = scores.masked_fill(~self.bulk, lowest).logsumexp(dim=-1)
        # Queries that have a bulk, of the rows that are texts.
        texts, late = slice(query.shape[0] - self.stage.random_rows), slice(SINKS + WINDOW, None)
        asked = QUESTION_WORDS * self.stage.questions
        share = torch.sigmoid(log_local - log_bulk)[texts]
        outside = -torch.log(share[:, :, late] + FLOOR)
        self.outside.append(0.7 * outside[..., :-asked].mean() + 0.3 * outside[..., -asked:].mean())
        if self.stage.random_rows:
            self._train_estimates(query[texts], key, log_local[texts], share, scaling)
        return torch.matmul(scores.softmax(dim=-1), values).transpose(1, 2).contiguous(), None

    def _train_estimates(self, query: Tensor, key: Tensor, log_local: Tensor, share: Tensor, scaling: float) -> None:
        """Add up `estimate`, `found` and `hidden`; `key` has the rows of random words as well, the rest has texts."""
        texts, asked = query.shape[0], QUESTION_WORDS * self.stage.questions
        words = key[texts:, :, SINKS:].transpose(0, 1).flatten(1, 2)[None]
        uniform = words.new_full((1, words.shape[2]), 1 / words.shape[2])
        log_random = self._log_bulk(query, words, uniform, scaling)

        own = slice(SINKS + WINDOW, -asked)
        # Clamped: early estimates can be off by hundreds, and would drown everything else.
        excess = softplus((log_random - log_local)[..., own].clamp(max=30) + 1)
        self.estimate.append(excess.unflatten(1, (key.shape[1], -1)).amin(dim=2).mean())

        asking, body = slice(-asked + QUESTION_WORDS - 1, None, QUESTION_WORDS), slice(SINKS, -asked + 1)
        noise = self.noise[:texts, body].float()
        facts = FACT_TOKENS / self.tokens
        weights = (1 - facts) * noise / noise.sum(dim=-1, keepdim=True)
        weights = weights + facts * (1 - noise) / (1 - noise).sum(dim=-1, keepdim=True)
        log_own = self._log_bulk(query[:, :, asking], key[:texts, :, body], weights, scaling)
        far, local = (1 - share[..., asking]).detach(), log_local[..., asking].detach()
        found = far * softplus((local - log_random[..., asking]).clamp(max=30) + 1)
        hidden = far * softplus((log_own - local).clamp(max=30) - 1)
        self.asked.append(torch.stack([found.sum(), hidden.sum(), far.sum()]))

    def _log_bulk(self, query: Tensor, keys: Tensor, weights: Tensor, scaling: float) -> Tensor:
        """Eq. 7's `log A_bulk` `[rows, heads, queries]`.

        Args:
            query: `[rows, heads, queries, dim]`.
            keys: `[rows or 1, kv_heads, tokens, dim]`, whose mean and covariance are taken.
            weights: `[rows or 1, tokens]`, of those keys; they sum to 1.
            scaling: multiplies the scores.
        """
        mean = torch.einsum("bt,bhtd->bhd", weights, keys)
        centred = (keys - mean[:, :, None]) * weights[:, None, :, None].sqrt()
        covariance = torch.matmul(centred.transpose(-1, -2), centred)
        group = query.shape[1] // keys.shape[1]
        mean, covariance = mean.repeat_interleave(group, dim=1), covariance.repeat_interleave(group, dim=1)
        score_mean = torch.matmul(query, mean[..., None])[..., 0] * scaling
        score_variance = (torch.matmul(query, covariance) * query).sum(dim=-1) * scaling**2
        return math.log(self.tokens) + score_mean + score_variance / 2


@torch.no_grad()
def install_sink(model: LlamaForCausalLM, score: float = 14.0) -> None:
    """Make every query of the first layer score `<s>` with about `score`, and other words with noise around 0.

    The first layer sees only words, and as trained so far spreads its attention evenly over all of them: gradients
    of a penalty then have nothing to hold on to. Its slowest rotary frequencies, which hardly turn with distance, are
    given up for a constant query and a key that only `<s>` answers to; training goes on from there.
    """
    layer, dim = model.model.layers[0], model.config.head_dim
    attention, half = layer.self_attn, dim // 2
    sink = layer.input_layernorm(model.model.embed_tokens.weight)[TOKEN[BOS]]
    slow = [index for index in range(dim) if index % half >= half - 4]
    for head in range(model.config.num_key_value_heads):
        rows = [head * dim + index for index in slow]
        attention.k_proj.weight[rows], attention.k_proj.bias[rows] = sink / sink.square().sum(), 0.0
    for head in range(model.config.num_attention_heads):
        rows = [head * dim + index for index in slow]
        attention.q_proj.weight[rows], attention.q_proj.bias[rows] = 0.0, score * dim**0.5 / len(slow)
