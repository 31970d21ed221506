"""Scores that a model caps by `softcap * tanh(s / softcap)`, as Gemma 2 does, everywhere that scores are taken."""

from __future__ import annotations

import math

import pytest
import torch
from models import SMALL, exact, generate, logits_of, prompt, tiny
from torch import Tensor
from transformers import DynamicCache, Gemma2ForCausalLM

from qada_cache import QAdACache
from qada_cache.criterion import score_moments
from qada_cache.kernels import partial_attention
from qada_cache.sketch import Layout
from qada_cache.sketch.codec import estimate_scores
from qada_cache.sketch.selection import select_tokens
from qada_cache.storage.bulk import Bulk
from qada_cache.storage.bulk_sketch import BulkSketch
from qada_cache.storage.placement import Placement

SOFTCAP = 3.0


def capped(scores: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(scores.double() / SOFTCAP)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_partial_attention(kernels: str, causal: bool) -> None:
    """Partial attention with a soft cap equals float64, in blocks of queries and of keys."""
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 600, 16, generator=made) for _ in range(3))
    scores = capped(query.double() @ key.double().mT * 2.0)
    if causal:
        scores = scores.masked_fill(torch.ones(600, 600, dtype=torch.bool).triu(1), -math.inf)
    out, lse = partial_attention(query, key, value, scaling=2.0, causal=causal, softcap=SOFTCAP, kernels=kernels)
    assert (scores.logsumexp(dim=-1) - lse).abs().max() < 1e-5
    assert (scores.softmax(dim=-1) @ value.double() - out).abs().max() < 1e-5


@pytest.mark.parametrize("mean", [-6.0, 0.0, 2.0])
def test_moments_of_scores_that_lie_close_together(mean: float) -> None:
    made = torch.Generator().manual_seed(1)
    keys = 0.05 * torch.randn(4000, 8, generator=made, dtype=torch.float64) + mean / 8
    query = torch.ones(1, 1, 1, 8)
    centre, covariance = keys.mean(dim=0), torch.cov(keys.T, correction=0)
    found = score_moments(
        query, centre.float()[None, None], covariance.float()[None, None], scaling=1.0, softcap=SOFTCAP
    )
    scores = capped(keys.sum(dim=1))
    assert found[0].item() == pytest.approx(scores.mean().item(), abs=0.01)
    assert found[1].item() == pytest.approx(scores.var(correction=0).item(), rel=0.05)


def test_selection() -> None:
    """Tokens by their capped weight, and the line that values follow by scores that are not capped."""
    made = torch.Generator().manual_seed(2)
    keys, values = torch.randn(1, 1, 1100, 16, generator=made), torch.randn(1, 1, 1100, 16, generator=made)
    bulk = Bulk(keys[:, :, :0], values[:, :, :0], offloading=False, placement=Placement(0), layer=0)
    bulk.append(slice(0, 1), keys, values)
    sketch = BulkSketch(keys, values, Layout.from_bits(16, 4.0), None)
    sketch.append_from(bulk, slice(0, 1))
    query, log_buffer = 2 * torch.randn(2, 1, 16, generator=made), torch.tensor([[1.0], [2.0]])
    found = select_tokens(
        query,
        sketch.tensors[0, 0],
        1100,
        log_buffer=log_buffer,
        bulk_tokens=torch.tensor([1100]),
        flags=torch.ones(2, 1, dtype=torch.bool),
        scaling=1.0,
        token_threshold=2.0,
        softcap=SOFTCAP,
    )
    estimates = estimate_scores(query[:, 0], sketch.tensors[0, 0], 1100, scaling=1.0).double()
    weights = capped(estimates).exp()
    total = weights.sum(dim=1) + log_buffer[:, 0].double().exp()
    selected = (weights / total[:, None] >= 2.0 / 1100).any(dim=0)
    assert torch.equal(found.tokens[0], selected)
    assert 0 < int(selected.sum()) < 1100
    for head in range(2):
        left = weights[head] * ~selected
        assert found.log_unread[head, 0].item() == pytest.approx(math.log(0.9 * left.sum()), abs=1e-4)
        lifted = (left / left.sum() * (estimates[head] - estimates[head].mean())).sum()
        tilt = lifted / estimates[head].var(correction=0)
        assert found.tilt[head, 0].item() == pytest.approx(tilt.item(), rel=1e-3)


def test_the_cap_counts() -> None:
    """The soft cap changes a Gemma 2's logits here, so that other tests of it can fail."""
    model, other = tiny("gemma2"), tiny("gemma2", attn_logit_softcapping=None)
    ids = prompt(150)[0]
    with_cap, without = (generate(each, ids, DynamicCache(config=each.config)) for each in (model, other))
    assert (logits_of(with_cap) - logits_of(without)).abs().max() > 0.1


def test_what_sdpa_ignores_is_ignored() -> None:
    """As transformers before 5.23 does; newer ones have no "sdpa" for such models."""
    if not Gemma2ForCausalLM._supports_sdpa:
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            tiny("gemma2", attention="sdpa")
        return
    model, ids = tiny("gemma2", attention="sdpa"), prompt(150)[0]
    wanted = generate(model, ids, DynamicCache(config=model.config))
    assert (logits_of(generate(model, ids, exact(model))) - logits_of(wanted)).abs().max() < 1e-3


def test_decisions_are_audited() -> None:
    model = tiny("gemma2")
    cache = QAdACache(model, threshold=0.5, moments="current", token_threshold=0, audit_every=1, **SMALL)
    generate(model, prompt(150)[0], cache)
    audit = cache.stats().audit
    assert audit.decisions > 0
    assert audit.missed < 1e-6
    assert audit.recall == 1.0
