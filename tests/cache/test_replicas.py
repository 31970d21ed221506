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
    "one eager layer": {"family": "llama", "num_hidden_layers": 1, "attention": "eager"},
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(**KINDS[request.param])


@pytest.mark.parametrize(
    ("when", "filled"), [("before", 0), ("after", 0), ("before", 60), ("after", 60), ("sharing the config", 60)]
)
@pytest.mark.parametrize("tokens", [1, 9, 30])
def test_a_replica(when: str, filled: int, tokens: int, model: PreTrainedModel) -> None:
    """Copied before the cache was built, its attention has the name of its own; `nn.DataParallel` copies modules under
    one config, under which an empty cache serves any. The last cached layer has no other behind it that would notice.
    """
    text = prompt(90)[0]
    replica = copy.deepcopy(model)
    cache = exact(model, moments="current")
    if when != "before":
        replica = copy.deepcopy(model, {id(model.config): model.config} if when == "sharing the config" else None)
    plain = DynamicCache(config=model.config)
    if filled:
        for used in (cache, plain):
            forced(model, text[:, :filled], [filled], used)
    part = text[:, filled : filled + tokens]
    with pytest.raises(RuntimeError, match=r"(of|for) another model"):
        forced(replica, part, [tokens], cache)
    if model.config.model_type == "llama":  # whose layers all refuse before they keep anything
        assert cache.get_seq_length() == filled
        got, wanted = (forced(model, part, [tokens], used) for used in (cache, plain))
        assert (got - wanted).abs().max() < 1e-3
    else:  # a layer of transformers' own had taken the tokens in
        with pytest.raises(RuntimeError, match=r"interrupted.*reset\(\)"):
            forced(model, part, [tokens], cache)
    with torch.no_grad():
        own = DynamicCache(config=model.config)
        got, wanted = (forced(each, text[:, :20], [20], copy.deepcopy(own)) for each in (replica, model))
    assert torch.equal(got, wanted)
