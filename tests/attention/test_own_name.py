"""Models keep the name of their own attention: those that ask for it compute what they did, with any cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from models import EAGER, FAMILIES, exact, forced, generate, logits_of, prompt, tiny
from test_families import SUPPORTED
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from qada_cache import QAdACache

SPARSE: dict[str, dict[str, Any]] = {
    "DeepseekV32": {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
    "GlmMoeDsa": {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
}

UNTOUCHED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from models import EAGER, FAMILIES, exact, forced, prompt, tiny
from transformers import DynamicCache

ids, mask = prompt(60, 41)
names = [(family, name) for family in FAMILIES for name in ("sdpa", "eager") if name == "eager" or family not in EAGER]
models = {key: tiny(key[0], attention=key[1]) for key in names}


def logits(model):
    with_cache = forced(model, ids, [48, 5, 1], DynamicCache(config=model.config), mask)
    return torch.cat([with_cache, forced(model, ids, [60], None, mask)])


before = {key: logits(model) for key, model in models.items()}
kept = []
for model in (models["llama", "sdpa"], models["gemma3", "eager"], models["gpt_oss", "eager"]):
    kept.append(exact(model, moments="current"))
    forced(model, ids, [48, 5, 1], kept[-1], mask)
assert [key for key, model in models.items() if not torch.equal(logits(model), before[key])] == []
for key, model in models.items():
    if key[0] in sys.argv[2:]:
        kept.append(exact(model))
        assert model.config._attn_implementation == key[1], key
        assert torch.equal(logits(model), before[key]), key
print(len(models), len(kept))
"""


class CuriousAttention(LlamaAttention):
    """Sees less under the names that it knows."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = self.config._attn_implementation in ("eager", "sdpa")
        return super().forward(hidden_states * 0.5 if known else hidden_states, *args, **kwargs)


def both(model: PreTrainedModel) -> Tensor:
    """The model's own outputs, with DynamicCache and with no cache."""
    ids, mask = prompt(60, 41)
    with_cache = forced(model, ids, [48, 5, 1], DynamicCache(config=model.config), mask)
    return torch.cat([with_cache, forced(model, ids, [60], None, mask)])


def assert_served(model: PreTrainedModel) -> None:
    """As by DynamicCache, in a padded batch and several calls."""
    ids, mask = prompt(150, 61)
    wanted = forced(model, ids, [120, 5, 22, 1], DynamicCache(config=model.config), mask)
    cache = exact(model)
    got = forced(model, ids, [120, 5, 22, 1], cache, mask)
    assert (got - wanted)[mask.bool()].abs().max() < 1e-4
    assert cache.stats().decisions > 0


def test_models_compute_what_they_did_before_there_was_a_cache() -> None:
    """In a process that had none before, bit for bit: every family while others have one, and each with its own."""
    helpers, root = Path(__file__).parents[1] / "helpers", Path(__file__).parents[2]
    command = [sys.executable, "-c", UNTOUCHED, str(helpers), *SUPPORTED]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    served = [2 - (family in EAGER) for family in SUPPORTED]
    assert done.stdout.split() == [str(2 * len(FAMILIES) - len(EAGER)), str(3 + sum(served))]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_asks_for_the_name_is_served(attention: str) -> None:
    model = tiny(attention=attention)
    for layer in model.model.layers:
        layer.self_attn.__class__ = CuriousAttention
    before = both(model)
    assert_served(model)
    assert torch.equal(both(model), before)


@pytest.mark.parametrize("how", ["model", "config"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("prefix", SPARSE)
def test_models_with_an_indexer_are_served_or_keep_their_own_layers(prefix: str, attention: str, how: str) -> None:
    """The second in older transformers, which cache expanded keys of them."""
    if not hasattr(transformers, f"{prefix}ForCausalLM"):
        pytest.skip(f"this transformers has no {prefix}")
    with patch.dict(FAMILIES, {prefix: (prefix, {**FAMILIES["deepseek_v3"][1], **SPARSE[prefix]})}):
        model = tiny(prefix, attention=attention)
    before = both(model)
    ids, mask = prompt(60, 41)
    wanted = forced(model, ids, [48, 5, 1], DynamicCache(config=model.config), mask)
    cache = QAdACache(**{how: model if how == "model" else model.config}, threshold=1.0, moments="current")
    got, real = forced(model, ids, [48, 5, 1], cache, mask), mask.bool()
    if cache.stats().layers:
        assert (got - wanted)[real].abs().max() <= 1e-4 * wanted[real].abs().max()
    else:
        assert torch.equal(got, wanted)
    assert torch.equal(both(model), before)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_is_served_and_its_attention_beside_the_table_is_refused(attention: str) -> None:
    """It has a numerical option for eager attention alone, which asks no table."""
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, initializer_range=0.35)
    model = GPT2LMHeadModel._from_config(config, attn_implementation=attention).eval()
    assert_served(model)
    if attention == "eager":
        for block in model.transformer.h:
            block.attn.reorder_and_upcast_attn = True
        with pytest.raises(RuntimeError, match="gpt2 model computes attention in a way"):
            generate(model, prompt(60)[0], exact(model))
        got = generate(model, prompt(60)[0], DynamicCache(config=model.config), tokens=2)
        assert logits_of(got).isfinite().all()
