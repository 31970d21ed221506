"""Projections of latents: a plain weight's, those that a module is asked for, and modules that do something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from latents import SPLIT, dynamic, note_ways
from models import exact, forced, prompt, tiny
from torch import Tensor, nn

from qada_cache.attention.latent import LatentLayer
from qada_cache.versions import pass_cache


class Adapted(nn.Module):
    """A projection with low-rank weights beside its own, as peft's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.base_layer = base
        self.down = nn.Parameter(0.3 * torch.randn(2, base.in_features, generator=made))
        self.up = nn.Parameter(0.3 * torch.randn(base.out_features, 2, generator=made))

    def forward(self, given: Tensor) -> Tensor:
        return self.base_layer(given) + given @ self.down.mT @ self.up.mT


class Rounded(nn.Linear):
    """A projection of int8 weights."""

    def forward(self, given: Tensor) -> Tensor:
        scales = self.weight.abs().amax(-1, keepdim=True) / 127
        return nn.functional.linear(given, (self.weight / scales).round() * scales)


def change_projection(module: nn.Module, how: str) -> None:
    projection = module.kv_b_proj
    if how == "adapted":
        module.kv_b_proj = Adapted(projection)
    elif how == "quantised":
        projection.__class__ = Rounded
    elif how == "hooked":
        projection.register_forward_pre_hook(lambda _, given: (given[0] + 0.1,))
    elif how == "its own forward":
        own = projection.forward
        projection.forward = lambda given: 1.5 * own(given)
    elif how == "bias":
        projection.bias = nn.Parameter(torch.linspace(-1, 1, projection.out_features))
    elif how == "parametrised":
        nn.utils.parametrizations.weight_norm(projection)


@pytest.mark.parametrize("how", ["adapted", "quantised", "hooked", "its own forward", "bias", "parametrised"])
def test_projections_that_are_no_plain_weight(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, model = note_ways(monkeypatch, "cheaper"), tiny("deepseek_v3")
    for layer in model.model.layers:
        change_projection(layer.self_attn, how)
    ids = prompt(sum(SPLIT))[0]
    wanted, cache = forced(model, ids, SPLIT, dynamic(model)), exact(model)
    torch.testing.assert_close(forced(model, ids, SPLIT, cache), wanted, rtol=0, atol=1e-3)
    assert set(found) == {"absorbed", "expanded"}
    assert [layer.reads_weight for layer in cache.layers] == [how == "bias"] * 2


def test_an_adapter_comes_while_a_text_is_held() -> None:
    model, ids = tiny("deepseek_v3"), prompt(sum(SPLIT))[0]
    cache, plain = exact(model), dynamic(model)
    with torch.no_grad():
        for each in (cache, plain):
            model(ids[:, :100], **pass_cache(each))
        for layer in model.model.layers:
            change_projection(layer.self_attn, "adapted")
        got, wanted = (model(ids[:, 100:103], **pass_cache(each)).logits for each in (cache, plain))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("part", ["nope", "rotary", "value", "layout"])
def test_other_keys_than_those_of_the_latents_are_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys or values that a module's own code changes after they were expanded are refused. If only the weight has
    another layout, the module itself expands latents."""
    model, ids = tiny("deepseek_v3"), prompt(60)[0]
    kind = type(model.model.layers[0].self_attn)
    original = kind.expand_kv
    in_forward = [False]

    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = original(self, kv_nope, k_rot)
        if part == "layout":
            return torch.cat([values, keys[..., 8:]], dim=-1), keys[..., :8]
        if in_forward[0]:
            changed = {"nope": keys[..., :8], "rotary": keys[..., 8:], "value": values}[part]
            changed *= 2
        return keys, values

    forward = kind.forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        in_forward[0] = True
        return forward(self, *args, **kwargs)

    def attended(*args: Any, **kwargs: Any) -> Any:
        in_forward[0] = False
        return check(*args, **kwargs)

    check = LatentLayer.check_module
    monkeypatch.setattr(kind, "expand_kv", expand_kv)
    monkeypatch.setattr(kind, "forward", noted)
    monkeypatch.setattr(LatentLayer, "check_module", attended)
    if part == "layout":
        wanted = forced(model, ids, [40, 1], dynamic(model))
        torch.testing.assert_close(forced(model, ids, [40, 1], exact(model)), wanted, rtol=0, atol=1e-3)
        return
    error = (RuntimeError, "computes attention in a way") if part == "rotary" else (NotImplementedError, "other keys")
    with pytest.raises(error[0], match=error[1]):
        forced(model, ids, [40, 1], exact(model))
