"""What makes the needle model's heads local unless a question needs them: a sink, and two penalties.

The penalties need scores and keys, so stages that use them run with an attention function of their own.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from eval.needle_texts import BOS, QUESTION_WORDS, SINKS, TOKEN, WINDOW, Stage

NAME = "needle_training"
FLOOR = 1e-2  # of the local share under the logarithm: a retrieval head may have next to none


class LocalityPenalties:
    """An attention function that attends as usual and adds up, over the layers of one forward pass:

    `outside`: the mean of `-log(local share)`, the share of attention on sinks and window; questions weigh 0.3.
    `estimate`: the mean of `softplus(log A_bulk - log A_local + 1)` with eq. 7's Gaussian estimate of `A_bulk`, from
    the keys of the batch's random words and for a bulk of `tokens` tokens; over the text's own queries only, not the
    questions': a head that a question needs may be found out.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        AttentionInterface.register(NAME, self.attend)
        AttentionMaskInterface.register(NAME, eager_mask)

    def begin(self, bulk: Tensor, tokens: int) -> None:
        """A forward pass follows; `bulk` is bool `[queries, keys]`."""
        self.bulk, self.log_tokens = bulk, math.log(tokens)
        self.outside: list[Tensor] = []
        self.estimate: list[Tensor] = []

    def penalty(self) -> tuple[Tensor, float]:
        """The stage's weighted penalty of that pass, and `outside` to show."""
        outside = torch.stack(self.outside).mean()
        penalty = self.stage.locality * outside
        if self.stage.gaussian:
            penalty = penalty + self.stage.gaussian * torch.stack(self.estimate).mean()
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
        share = torch.sigmoid(log_local - log_bulk)[texts, :, late]
        outside = -torch.log(share + FLOOR)
        self.outside.append(0.7 * outside[..., :-asked].mean() + 0.3 * outside[..., -asked:].mean())
        if self.stage.gaussian:
            log_estimate = self._estimate(query[texts, :, late], key[-self.stage.random_rows :], group, scaling)
            # Clamped: early estimates can be off by hundreds, and would drown everything else.
            excess = softplus((log_estimate - log_local[texts, :, late]).clamp(max=30) + 1)
            self.estimate.append(excess[..., :-asked].mean())
        return torch.matmul(scores.softmax(dim=-1), values).transpose(1, 2).contiguous(), None

    def _estimate(self, query: Tensor, random_keys: Tensor, group: int, scaling: float) -> Tensor:
        """Eq. 7's `log A_bulk` `[rows, heads, queries]` from keys `[rows, kv_heads, tokens, dim]` of random words."""
        keys = random_keys[:, :, SINKS:].transpose(0, 1).flatten(1, 2)
        mean = keys.mean(dim=1)
        centred = keys - mean[:, None]
        covariance = torch.matmul(centred.transpose(-1, -2), centred) / keys.shape[1]
        mean, covariance = mean.repeat_interleave(group, dim=0), covariance.repeat_interleave(group, dim=0)
        score_mean = torch.einsum("bhnd,hd->bhn", query, mean) * scaling
        score_variance = (torch.matmul(query, covariance) * query).sum(dim=-1) * scaling**2
        return self.log_tokens + score_mean + score_variance / 2


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
