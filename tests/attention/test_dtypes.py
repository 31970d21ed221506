"""Half precision; tokens of one dtype and a model of another: one clear error, no read past a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import exact, forced, prompt, tiny
from transformers import DynamicCache

from qada_cache import QAdACache

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_file_of_another_dtype(dtype: torch.dtype, family: str, tmp_path: Path) -> None:
    model, text = tiny(family, dtype=dtype), prompt(160)[0]
    cache, path = exact(model), tmp_path / "cache.safetensors"
    forced(model, text[:, :150], [150], cache)
    cache.save(path)
    name = str(dtype).removeprefix("torch.")
    other = tiny(family)
    with pytest.raises(ValueError, match=f"saved for a model in {name}, this model is in float32: load it with a mo"):
        QAdACache.load(path, other)
    assert other.config._attn_implementation == "sdpa"
    wanted = forced(model, text[:, 150:], [1], cache)
    assert torch.equal(forced(model, text[:, 150:], [1], QAdACache.load(path, model)), wanted)


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_file_of_another_dtype_by_config(tokens: int, tmp_path: Path) -> None:
    """A config does not say what its model was converted to: the first use does."""
    model, other, text = tiny(dtype=torch.bfloat16), tiny(), prompt(190)[0]
    cache = exact(model)
    forced(model, text[:, :150], [150], cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = QAdACache.load(tmp_path / "cache.safetensors", config=other.config)
    with pytest.raises(RuntimeError, match=r"holds keys and values in torch.bfloat16 and was given torch.float32: use"):
        forced(other, text[:, 150 : 150 + tokens], [tokens], loaded)
    loaded.reset()
    forced(other, text[:, :150], [150], loaded)


@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_model_converted_between_turns(tokens: int) -> None:
    """Refused before anything is taken in: converted back, the cache goes on."""
    model, text = tiny(dtype=torch.bfloat16), prompt(150 + 2 * tokens)[0]
    cache, twin = exact(model), exact(model)
    for filled in (cache, twin):
        forced(model, text[:, :150], [150], filled)
    model.float()
    with pytest.raises(RuntimeError, match=r"in torch.bfloat16 and was given torch.float32: .* or reset\(\) it"):
        forced(model, text[:, 150 : 150 + tokens], [tokens], cache)
    assert cache.get_seq_length() == 150
    model.bfloat16()
    rest = text[:, 150:]
    assert torch.equal(forced(model, rest, [tokens], cache), forced(model, rest, [tokens], twin))
    cache.reset()
    model.float()
    got, wanted = (forced(model, text, [150, tokens], used) for used in (cache, DynamicCache(config=model.config)))
    assert (got - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_low_precision_differs_as_attention_implementations_do(dtype: torch.dtype) -> None:
    """Near-ties may fall otherwise than with DynamicCache, as they do with another attention implementation."""
    ours = eager = 0.0
    for seed in range(4):
        ids = prompt(190, seed=seed)[0]
        models = [
            tiny(attention=name, dtype=dtype, seed=seed, initializer_range=0.15) for name in ("sdpa", "eager", "sdpa")
        ]
        caches = [*(DynamicCache(config=model.config) for model in models[:2]), exact(models[2], moments="current")]
        plain, other, got = (
            forced(model, ids, [150, 1], cache)[:, 150:].float() for model, cache in zip(models, caches, strict=True)
        )
        ours += (got - plain).abs().mean().item()
        eager += (other - plain).abs().mean().item()
    assert 0.0 < ours <= 1.2 * eager
