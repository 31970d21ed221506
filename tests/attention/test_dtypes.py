"""Half precision; tokens of one dtype and a model of another: one clear error, no read past a tensor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from decode_scene import Scene, step_of
from models import exact, forced, prompt, tiny
from torch import Tensor
from transformers import DynamicCache

from qada_cache import QAdACache
from qada_cache.kernels import cpu
from qada_cache.kernels.cpu import compiled_decode
from qada_cache.kernels.operands import check

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


def test_kernel_of_parts_serves_tensors_that_agree_only() -> None:
    query, key, value = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1024, 32), torch.randn(1, 2, 1024, 16)
    assert cpu.supports(query, key, value)
    for wrong in (
        (query.bfloat16(), key, value),
        (query, key.half(), value),
        (query, key, value.half()),
        (query, key.to("meta"), value),
        (query, key, value.to("meta")),
        (query[:, :1], key, value),
        (query, key[..., :16], value),
        (query, key, value[:, :, :-1]),
        (query, key.mT.contiguous().mT, value),
        (query, key[:, :, ::2], value[:, :, ::2]),
    ):
        assert not cpu.supports(*wrong)


# Of what `Scene` says of a call, in each of the ways that a kernel would read something else or elsewhere.
WRONG = {
    "query": [Tensor.double, lambda t: t[:, :, :, :16], lambda t: t[:-1], lambda t: t.repeat(1, 1, 2, 1)],
    "near_keys": [Tensor.half, lambda t: t[..., :16], lambda t: t[:, :1], lambda t: t.to("meta"), lambda t: t[:-1]],
    "near_values": [Tensor.half, lambda t: t[:, :, 1:], lambda t: t.mT.contiguous().mT],
    "bulk_keys": [Tensor.half, lambda t: t[:, :, 1:], lambda t: t[:-1], lambda t: t.to("meta")],
    "bulk_values": [Tensor.half, lambda t: t[..., :16], lambda t: t.mT.contiguous().mT],
    "log_bulk": [Tensor.double, lambda t: t[:-1], lambda t: t[:, :, :1], lambda t: t.to("meta")],
    "local": [Tensor.int, lambda t: t[..., 1:], lambda t: t.repeat(2, 1, 1, 1)],
    "pending": [Tensor.int, lambda t: t[..., 1:]],
    "bulk_tokens": [Tensor.int, lambda t: t[:-1]],
    "bulk_lengths": [Tensor.int, lambda t: t[:-1], lambda t: t + 10**6, lambda t: t - 10**6],
    "decided": [Tensor.int, lambda t: t.repeat(3, 1, 1)],
}


@pytest.mark.parametrize("name", WRONG)
def test_kernels_of_a_step_refuse_tensors_that_do_not_agree(name: str) -> None:
    scene = Scene(padding=(0,))
    given = scene.arguments("cpu") | scene.decision_arguments()
    check(*step_of(**given))
    for change in WRONG[name]:
        wrong = given | {name: change(given[name])}
        with pytest.raises(ValueError, match="cannot read these tensors as those of one layer"):
            check(*step_of(**wrong))
        with pytest.raises(ValueError, match="cannot read these tensors as those of one layer"):
            compiled_decode.fused_decode(*step_of(**wrong))


@pytest.mark.parametrize(
    ("change", "found", "wanted"),
    [
        ({"bulk_values": torch.half}, "bulk_values is float16", "not torch.float32 ["),
        ({"log_bulk": torch.double}, "log_bulk is float64", "not float32 ["),
        ({"decided": torch.int}, "decided is int32", "not bool ["),
    ],
)
def test_an_error_names_the_tensor(change: dict[str, torch.dtype], found: str, wanted: str) -> None:
    """What it is, and what it should be."""
    scene = Scene(padding=(0,))
    given = scene.arguments("cpu") | scene.decision_arguments()
    given |= {name: given[name].to(dtype) for name, dtype in change.items()}
    with pytest.raises(ValueError, match=f"{re.escape(found)}.*{re.escape(wanted)}"):
        check(*step_of(**given))


def test_other_strides_are_not_the_compiled_kernels() -> None:
    scene = Scene()
    given = scene.arguments("cpu") | scene.decision_arguments()
    for name in ("near_keys", "bulk_values"):
        shape = given[name].shape
        wrong = given | {name: torch.zeros(*shape[:2], 2 * shape[2], shape[3])[:, :, ::2]}
        with pytest.raises(ValueError, match=f"{name} is .* of strides .*, the last 2 dimensions contiguous"):
            compiled_decode.fused_decode(*step_of(**wrong))


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
