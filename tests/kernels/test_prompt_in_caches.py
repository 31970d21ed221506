"""The kernel for prompts in a whole cache, and where the model's own attention serves instead."""

from __future__ import annotations

import pytest
import torch
from compilers import needs_compiler, needs_vectors
from models import exact, forced, tiny, tiny_like
from models import prompt as words
from test_prompt import PADDED, padding, short  # noqa: F401 - a fixture
from transformers import DynamicCache

from qada_cache.kernels.cpu import prompt
from qada_cache.versions import pass_cache

pytestmark = [needs_compiler, needs_vectors]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call of the kernel has had."""
    calls, original = list[int](), prompt.prompt_attention
    monkeypatch.setattr(prompt, "prompt_attention", lambda *a, **k: calls.append(a[0].shape[2]) or original(*a, **k))
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("calls", [[300, 1], [120, 90, 90, 1], [70, 230, 1]], ids=str)
def test_in_a_cache(calls: list[int], dtype: torch.dtype, served: list[int]) -> None:
    """Prompts, chunks and long turns: as near to float64 as with DynamicCache, and by the kernel."""
    model = tiny("llama", head_dim=32).to(dtype)
    ids = words(301)[0]
    wanted = forced(tiny_like(model, torch.float64), ids, calls, DynamicCache())
    with torch.no_grad():
        plain = forced(model, ids, calls, DynamicCache(config=model.config))
        assert not served
        got = forced(model, ids, calls, exact(model))
    assert set(calls) - {1} <= set(served)
    own, error = (plain - wanted).abs(), (got - wanted).abs()
    assert error.mean() <= 1.1 * own.mean()


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_a_padded_batch_in_a_cache(side: str, served: list[int]) -> None:
    """Logits of real tokens, and at the prompt's end, as near to float64 as with DynamicCache, by the kernel: a prompt
    and two more calls. From the prompt's end `generate` goes on, padding or not."""
    model = tiny("llama", head_dim=32).bfloat16()
    mask = torch.cat([padding(side), torch.ones(3, 80, dtype=torch.bool)], dim=1)
    ids = words(380, 380, 380)[0]
    calls = [300, 79, 1]
    wanted = forced(tiny_like(model, torch.float64), ids, calls, DynamicCache(), mask)
    with torch.no_grad():
        plain = forced(model, ids, calls, DynamicCache(config=model.config), mask)
        assert not served
        got = forced(model, ids, calls, exact(model), mask)
    assert served[:3] == [len(real) for real in PADDED[side]]
    mask[:, 299] = True
    own, error = ((each - wanted)[mask].abs() for each in (plain, got))
    assert (got - wanted)[:, 299].abs().max() <= 2 * (plain - wanted)[:, 299].abs().max()
    assert got.isfinite().all()
    assert error.mean() <= 1.1 * own.mean()


@pytest.mark.parametrize("form", ["bool", "numbers"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_mask_of_one_s_own(is_causal: bool, form: str, served: list[int]) -> None:
    """The kernel computes a causal mask of the caller's, as near to float64 as with DynamicCache. The model's own
    attention computes one in which two tokens see each other."""
    model = tiny("llama", head_dim=32).bfloat16()
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()
    mask[..., 280, 281] = not is_causal
    if form == "numbers":
        mask = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, -torch.inf)
    ids = words(300)[0]
    with torch.no_grad():
        wanted = tiny_like(model, torch.float64)(ids, attention_mask=mask if form == "bool" else mask.double()).logits
        plain, got = (
            model(ids, attention_mask=mask, **pass_cache(used)).logits
            for used in (DynamicCache(config=model.config), exact(model))
        )
    assert bool(served) is is_causal
    assert (got - wanted).abs().mean() <= 1.1 * (plain - wanted).abs().mean()
    assert torch.equal(got, plain) or is_causal


@pytest.mark.parametrize("why", ["torch", "gradients", "eager"])
def test_where_the_model_s_own_attention_serves(why: str, served: list[int]) -> None:
    layers = 1 if why == "gradients" else 2
    model = tiny(
        "llama", num_hidden_layers=layers, head_dim=32, attention="eager" if why == "eager" else "sdpa"
    ).bfloat16()
    ids = words(150)[0]
    cache = exact(model, kernels="torch" if why == "torch" else "auto")
    for name, weight in model.named_parameters():  # keys that have gradients are refused
        weight.requires_grad_(why == "gradients" and "q_proj" in name and "layers.0" in name)
    with torch.set_grad_enabled(why == "gradients"):
        plain, ours = (model(ids, **pass_cache(used)).logits for used in (DynamicCache(config=model.config), cache))
    assert not served
    assert torch.equal(ours, plain)
    assert ours.requires_grad == (why == "gradients")
