"""Under autocast the model's layers run in bfloat16 and our scores and moments do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models import exact, forced, prompt, tiny
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qada_cache import KeyMoments, QAdACache
from qada_cache.key_moments.running import RunningMoments

SPLIT = [150, 40, 1, 8, 1]


@pytest.fixture
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def logits(model: PreTrainedModel, cache: QAdACache | DynamicCache) -> Tensor:
    """Logits of a prompt, a long turn, a short one, and single tokens, `[1, 210, vocabulary]`."""
    return forced(model, prompt(210)[0], SPLIT, cache)


@pytest.mark.usefixtures("autocast")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_threshold_one_is_dynamic_cache(family: str) -> None:
    """As near to one implementation of transformers' as that one is to the other."""
    found = {}
    for name in ("sdpa", "eager"):
        model = tiny(family, attention=name, initializer_range=0.1)
        found[name] = logits(model, DynamicCache(config=model.config))
    model = tiny(family, initializer_range=0.1)
    got = logits(model, exact(model))
    budget = (found["eager"] - found["sdpa"]).abs().max()
    assert 0 < budget < 0.5
    assert (got - found["sdpa"]).abs().max() <= 2 * budget
    sure = found["sdpa"].topk(2).values.diff().abs()[..., 0] > 4 * budget  # elsewhere rounding may decide
    assert sure.float().mean() > 0.1
    assert torch.equal(got.argmax(-1)[sure], found["sdpa"].argmax(-1)[sure])


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_attention_over_the_cache_is_float32(tokens: int) -> None:
    """Our attention function gives the same float32 outputs of the same float32 tensors, inside autocast or outside."""
    model = tiny()
    made = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, heads, tokens, 8, generator=made) for heads in (4, 2, 2))
    found = []
    for enabled in (False, True):
        cache = exact(model)
        forced(model, prompt(150)[0], [150], cache)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), torch.no_grad():
            tagged, _ = cache.layers[0].update(key, value)
            out, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](model.model.layers[0].self_attn, query, tagged, value, None)
        found.append(out)
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], found[1])


def test_a_cache_is_of_one_autocast() -> None:
    """A model keeps its dtype, and gives keys of another one."""
    model, ids = tiny(), prompt(40)[0]
    cache = exact(model)
    forced(model, ids, [40], cache)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="under the autocast"):
        forced(model, ids[:, :1], [1], cache)


@pytest.mark.usefixtures("autocast")
def test_running_moments_are_float32() -> None:
    keys = torch.randn(1, 2, 700, 16, generator=torch.Generator().manual_seed(0)) + 5
    running = RunningMoments(1, 2, 16, keys.device)
    for block in keys.split(300, dim=2):
        running.update(slice(0, 1), block)
    mean, centred = keys.double().mean(2), keys.double() - keys.double().mean(2, keepdim=True)
    assert (running.mean.double() - mean).abs().max() < 1e-5
    with torch.autocast("cpu", enabled=False):
        covariance = centred.mT @ centred / 700
    assert (running.covariance.double() - covariance).abs().max() < 1e-5


@pytest.mark.parametrize("scheme", ["analytic", "spread"])
def test_collected_moments_do_not_hang_on_autocast(scheme: str) -> None:
    model, ids = tiny(), prompt(120)[0][0]
    wanted = KeyMoments.collect(model, None, ids, scheme=scheme, progress=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = KeyMoments.collect(model, None, ids, scheme=scheme, progress=False)
    assert torch.equal(got.mean, wanted.mean)
    assert torch.equal(got.covariance, wanted.covariance)
