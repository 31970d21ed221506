"""Models with latent attention, and what every test of them compares with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import prompt, rounding
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qada_cache.attention.latent_attention import LatentAttention

SPLIT = [100, 30, 3, 1, 40, 1]  # tokens: a prompt, a long turn and a short one, a token, another long turn, a token


def dynamic(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def assert_near(model: PreTrainedModel, got: Tensor, wanted: Tensor) -> None:
    budget = 4 * rounding(model, prompt(sum(SPLIT))[0])
    assert budget < 1e-3  # or it would say nothing
    torch.testing.assert_close(got, wanted, rtol=0, atol=budget)


def note_ways(monkeypatch: pytest.MonkeyPatch, how: str) -> list[str]:
    """Attend to cached tokens in one way, whichever is cheaper. Returns how calls went about it."""
    found: list[str] = []
    for name in ("absorbed", "expanded"):
        original = getattr(LatentAttention, f"_attend_{name}")

        def noted(*given: Any, name: str = name, original: Callable = original) -> Any:
            found.append(name)
            return original(*given)

        monkeypatch.setattr(LatentAttention, f"_attend_{name}", noted)
    if how != "cheaper":
        monkeypatch.setattr(LatentAttention, "_is_cheaper_absorbed", lambda *_: how == "absorbed")
    return found
