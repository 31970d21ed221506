"""Models as `torch.compile` and peft hand them out: served as the model that they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import SMALL, generate, logits_of, prompt, tiny
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from qada_cache import KeyMoments, QAdACache, prepare, restore_attention
from qada_cache.versions import pass_cache


class Peft(nn.Module):
    """Stands in for peft's `PeftModel`: it contains the model, and passes unknown attributes on to it."""

    def __init__(self, model: PreTrainedModel, *, is_prompt_learning: bool = False) -> None:
        super().__init__()
        self.base_model = SimpleNamespace(model=model)
        self.active_peft_config = SimpleNamespace(is_prompt_learning=is_prompt_learning, peft_type="PREFIX_TUNING")

    def get_base_model(self) -> PreTrainedModel:
        return self.base_model.model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*args, **kwargs)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


WRAPPINGS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "peft": Peft,
    "compiled": compiled,
    "peft, compiled": lambda model: compiled(Peft(model)),
}


@pytest.mark.parametrize("how", WRAPPINGS)
def test_wrapped_models_are_served(how: str, tmp_path: Path) -> None:
    model, ids = tiny(), prompt(150)[0]
    wanted = generate(model, ids, DynamicCache(config=model.config))
    wrapped = WRAPPINGS[how](model)
    prepare(wrapped, **SMALL)
    cache = QAdACache(wrapped, threshold=1.0, **SMALL)
    got = generate(wrapped, ids, cache)
    assert torch.equal(got.sequences, wanted.sequences)
    assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-4
    cache.save(tmp_path / "cache")
    assert QAdACache.load(tmp_path / "cache", wrapped).get_seq_length() == cache.get_seq_length()
    cache.reset()
    with torch.no_grad():  # called itself, compiled that is: `generate` of either is the model's own
        first = wrapped(ids, **pass_cache(cache), use_cache=True).logits[:, -1]
    assert (first - logits_of(wanted)[:, 0]).abs().max() < 1e-4
    restore_attention(wrapped)
    assert model.config._attn_implementation == "sdpa"


def test_moments_of_a_wrapped_model() -> None:
    model = tiny()
    ours, theirs = (KeyMoments.collect(used, tokens=60, progress=False) for used in (Peft(model), model))
    assert torch.equal(ours.mean, theirs.mean)


def test_prompt_learning_is_refused() -> None:
    """Prompt learning is refused. Prefix tuning, a kind of it, generates with a cache of its own, and would leave ours
    empty."""
    with pytest.raises(NotImplementedError, match=r"prompt learning \(PREFIX_TUNING\).*get_base_model\(\)"):
        QAdACache(Peft(tiny(), is_prompt_learning=True))
