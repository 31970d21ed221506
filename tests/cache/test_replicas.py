"""A replica of the model, with a config of its own, used with the cache of the original: refused before any logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import exact, forced, prompt, tiny
from transformers import DynamicCache, PreTrainedModel

KINDS: dict[str, dict[str, Any]] = {
    "one layer": {"family": "llama", "num_hidden_layers": 1},
    "last layer full": {"family": "gemma3"},
    "two layers": {"family": "llama"},
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(**KINDS[request.param])


@pytest.mark.parametrize("filled", [0, 60])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("tokens", [1, 9, 30])
def test_a_replica(when: str, filled: int, tokens: int, model: PreTrainedModel) -> None:
    """Copied before the cache was built, its attention has the name of its own; the last cached layer has no other
    behind it that would notice."""
    text = prompt(90)[0]
    replica = copy.deepcopy(model)
    cache = exact(model)
    if when == "after":
        replica = copy.deepcopy(model)
    plain = DynamicCache(config=model.config)
    if filled:
        for used in (cache, plain):
            forced(model, text[:, :filled], [filled], used)
    with pytest.raises(RuntimeError, match="built for another model"):
        forced(replica, text[:, filled : filled + tokens], [tokens], cache)
    if model.config.model_type == "llama":  # whose layers all refuse before they keep anything
        assert cache.get_seq_length() == filled
        got, wanted = (forced(model, text[:, filled : filled + tokens], [tokens], used) for used in (cache, plain))
        assert (got - wanted).abs().max() < 1e-3
    with torch.no_grad():
        own = DynamicCache(config=model.config)
        got, wanted = (forced(each, text[:, :20], [20], copy.deepcopy(own)) for each in (replica, model))
    assert torch.equal(got, wanted)


def test_replicas_that_share_the_config(model: PreTrainedModel) -> None:
    """As `nn.DataParallel` makes them: with modules of their own."""
    text, cache = prompt(90)[0], exact(model)
    replica = copy.deepcopy(model, {id(model.config): model.config})
    forced(model, text[:, :60], [60], cache)
    with pytest.raises(RuntimeError, match="already holds tokens of another model"):
        forced(replica, text[:, 60:61], [1], cache)
