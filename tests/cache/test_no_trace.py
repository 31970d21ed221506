"""Building and using QAdACaches leaves no trace on the model, on other caches or on saved files (invariant 8)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, exact, generate, logits_of, prompt, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, StaticCache

from qada_cache import QAdACache, restore_attention

OTHERS = {
    "no cache": lambda model: None,
    "dynamic": lambda model: DynamicCache(config=model.config),
    "dynamic without config": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=220),
}
# Without a config DynamicCache itself cannot serve linear attention.
PAIRS = [(family, other) for family in ("llama", "gemma3") for other in OTHERS]
PAIRS += [("qwen3_next", other) for other in OTHERS if other != "dynamic without config"]


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(attention=request.param)


def adaptive(model: PreTrainedModel, threshold: float = 0.12) -> QAdACache:
    return QAdACache(model, threshold=threshold, **SMALL)


def run(model: PreTrainedModel, cache: Cache | None, *lengths: int, **options: Any) -> Tensor:
    """Raw logits of a padded batch of greedy generation."""
    ids, mask = prompt(*(lengths or (150, 61)))
    return logits_of(generate(model, ids, cache, attention_mask=mask, tokens=8, **options))


@pytest.mark.parametrize(("family", "other"), PAIRS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_caches_are_bit_identical(family: str, attention: str, other: str) -> None:
    model = tiny(family, attention=attention)
    before = run(model, OTHERS[other](model))
    adaptive(model)
    assert torch.equal(run(model, OTHERS[other](model)), before)
    run(model, adaptive(model))
    assert torch.equal(run(model, OTHERS[other](model)), before)


def test_forward_without_cache_is_bit_identical(model: PreTrainedModel) -> None:
    """Losses and gradients in training, custom 4-D masks, and attention weights where the model gives them."""
    ids = prompt(60)[0]
    mask = torch.ones(60, 60).tril().bool()[None, None]
    mask = mask if model.config._attn_implementation == "sdpa" else torch.where(mask, 0.0, torch.finfo().min)

    def everything() -> list[Tensor]:
        model.train().zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        model.eval()
        results = [loss.detach(), *(weight.grad.clone() for weight in model.parameters())]
        with torch.no_grad():
            results.append(model(ids, attention_mask=mask).logits)
            if model.config._attn_implementation == "eager":
                results += model(ids, output_attentions=True).attentions
        return results

    before = everything()
    run(model, adaptive(model))
    after = everything()
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))


def test_caches_used_in_turn(model: PreTrainedModel) -> None:
    """Two of ours with different settings and a DynamicCache, a few tokens each, round and round."""
    makers = [adaptive, lambda model: adaptive(model, 0.0), exact, OTHERS["dynamic"]]
    texts = [prompt(150, seed=seed)[0] for seed in range(len(makers))]
    alone = [generate(model, text, make(model), tokens=24) for text, make in zip(texts, makers, strict=True)]
    caches = [make(model) for make in makers]
    logits: list[list[Tensor]] = [[] for _ in makers]
    for _ in range(4):
        for index, cache in enumerate(caches):
            output = generate(model, texts[index], cache, tokens=6)
            texts[index] = output.sequences
            logits[index].append(logits_of(output))
    for got, text, wanted in zip(logits, texts, alone, strict=True):
        assert torch.equal(text, wanted.sequences)
        torch.testing.assert_close(torch.cat(got, dim=1), logits_of(wanted), rtol=0, atol=1e-4)
    assert not torch.equal(texts[0][:, 150:], texts[3][:, 150:])


def test_one_model_assists_itself_with_another_cache(model: PreTrainedModel) -> None:
    """The assistant's own DynamicCache and our cache alternate within one call of generate()."""
    ids, assistant = prompt(150)[0], copy.deepcopy(model)
    wanted = generate(model, ids, DynamicCache(config=model.config))
    cache = exact(model)
    for helper in (model, assistant):
        cache.reset()
        got = generate(model, ids, cache, assistant_model=helper)
        assert torch.equal(got.sequences, wanted.sequences)
    assert cache.stats().steps < 23


def test_saved_model_is_the_same(model: PreTrainedModel, tmp_path: Path) -> None:
    before = run(model, None)
    model.save_pretrained(tmp_path / "before")
    run(model, adaptive(model))
    model.save_pretrained(tmp_path / "after")
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "after").iterdir())
    assert "config.json" in files
    for name in files:
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "before" / name).read_bytes(), name
    assert "qada" not in repr(model.config)

    attention = model.config._attn_implementation
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after", attn_implementation=attention).eval()
    assert loaded.config._attn_implementation == attention
    assert torch.equal(run(loaded, None), before)
    torch.testing.assert_close(run(loaded, exact(loaded)), before, rtol=0, atol=1e-4)


def test_restore_attention(model: PreTrainedModel) -> None:
    name = model.config._attn_implementation
    before = run(model, None)
    wanted, old = run(model, adaptive(model)), adaptive(model)
    run(model, old)
    assert model.config._attn_implementation == name
    restore_attention(model)
    assert model.config._attn_implementation == name
    assert torch.equal(run(model, None), before)
    with pytest.raises(RuntimeError, match=f"attention implementation was restored .*{name}.*build a new QAdACache"):
        run(model, old)
    with pytest.raises(RuntimeError, match="build a new QAdACache"):
        generate(model, prompt(170)[0], old)
    assert torch.equal(run(model, adaptive(model)), wanted)  # a new one switches it on again
    restore_attention(model.config)  # the config does as well, and twice is once
    restore_attention(model.config)
    assert model.config._attn_implementation == name


def test_restore_attention_of_a_model_never_switched() -> None:
    for attention in ("eager", "flex_attention"):
        model = tiny(attention=attention)
        restore_attention(model)
        assert model.config._attn_implementation == attention


def test_copy_of_a_model(model: PreTrainedModel) -> None:
    wanted = run(model, adaptive(model))
    plain = run(model, None)
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin, None), plain)
    assert torch.equal(run(twin, adaptive(twin)), wanted)
    restore_attention(twin)  # touches the copy only
    assert torch.equal(run(model, adaptive(model)), wanted)


def test_model_built_from_a_switched_config(model: PreTrainedModel) -> None:
    plain, wanted = run(model, None), run(model, adaptive(model))
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(run(twin, None), plain)
    assert torch.equal(run(twin, adaptive(twin)), wanted)


def test_two_models_in_one_process() -> None:
    first, second = tiny(attention="sdpa"), tiny("gemma3", attention="eager")
    plain = [run(first, None), run(second, None)]
    alone = [run(first, adaptive(first)), run(second, adaptive(second))]
    caches = [adaptive(first), adaptive(second)]
    for _ in range(2):
        for index, model in enumerate((first, second)):
            caches[index].reset()
            assert torch.equal(run(model, caches[index]), alone[index])
            assert torch.equal(run(model, None), plain[index])
