"""Models whose own code asks for the name of their attention: building a cache must not change what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import EAGER, FAMILIES, exact, forced, prompt, tiny
from test_families import SUPPORTED
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from qada_cache import QAdACache

SPARSE: dict[str, dict[str, Any]] = {
    "DeepseekV32": {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
    "GlmMoeDsa": {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
}


class CuriousAttention(LlamaAttention):
    """Sees less under the names that it knows."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = self.config._attn_implementation in ("eager", "sdpa")
        return super().forward(hidden_states * 0.5 if known else hidden_states, *args, **kwargs)


class WellBehavedAttention(LlamaAttention):
    """Reads the name in every way that makes no difference."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, print)
        assert callable(interface), f"{self.config._attn_implementation} is none"
        if self.config._attn_implementation == "flex_attention":
            hidden_states = hidden_states * 0.5
        return super().forward(hidden_states, *args, **kwargs)


class AliasingAttention(LlamaAttention):
    """Gives the name another one before it asks."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = self.config._attn_implementation
        return super().forward(hidden_states * 0.5 if name == "sdpa" else hidden_states, *args, **kwargs)


def with_attention(kind: type[LlamaAttention], attention: str) -> PreTrainedModel:
    model = tiny(attention=attention)
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    return model


def both(model: PreTrainedModel) -> Tensor:
    """The model's own outputs, with DynamicCache and with no cache."""
    ids, mask = prompt(60, 41)
    with_cache = forced(model, ids, [48, 5, 1], DynamicCache(config=model.config), mask)
    return torch.cat([with_cache, forced(model, ids, [60], None, mask)])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SUPPORTED)
def test_building_a_cache_changes_no_supported_model(family: str, attention: str) -> None:
    if attention == "sdpa" and family in EAGER:
        pytest.skip("transformers has no other attention for it")
    model = tiny(family, attention=attention)
    before = both(model)
    exact(model)
    assert model.config._attn_implementation == attention
    assert torch.equal(both(model), before)


@pytest.mark.parametrize("kind", [CuriousAttention, AliasingAttention])
def test_a_model_that_asks_for_the_name_is_left_alone(kind: type[LlamaAttention]) -> None:
    model = with_attention(kind, "sdpa")
    before = both(model)
    with pytest.raises(NotImplementedError, match=rf"llama asks .*'sdpa' \({kind.__name__}, line \d+ .*DynamicCache"):
        exact(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(both(model), before)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_reading_the_name_to_no_effect_is_no_obstacle(attention: str) -> None:
    model = with_attention(WellBehavedAttention, attention)
    before = both(model)
    exact(model)
    assert torch.equal(both(model), before)


@pytest.mark.parametrize("how", ["model", "config"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("prefix", SPARSE)
def test_sparse_attention_models_are_left_alone(prefix: str, attention: str, how: str) -> None:
    if not hasattr(transformers, f"{prefix}ForCausalLM"):
        pytest.skip(f"this transformers has no {prefix}")
    FAMILIES.setdefault(prefix, (prefix, {**FAMILIES["deepseek_v3"][1], **SPARSE[prefix]}))
    model = tiny(prefix, attention=attention)
    before = both(model)
    name = model.config.model_type
    with pytest.raises(NotImplementedError, match=f"use transformers.DynamicCache for {name}$"):
        QAdACache(**{how: model if how == "model" else model.config})
    assert model.config._attn_implementation == attention
    assert torch.equal(both(model), before)


def test_another_name_is_a_way_out() -> None:
    """GPT-2 has a numerical option for eager attention alone."""
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, initializer_range=0.35)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    with pytest.raises(NotImplementedError, match="DynamicCache for gpt2, or load it with attn_implementation='sdpa'"):
        exact(model)
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    exact(model)


def test_code_without_source_is_taken_to_read_nothing() -> None:
    model = tiny()
    kind = type("Unsourced", (LlamaForCausalLM,), {"__module__": "nowhere"})
    model.__class__ = kind
    exact(model)
