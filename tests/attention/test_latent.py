"""Latent attention: what is cached is one latent a token, and every mode gives what `DynamicCache` gives."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from latents import SPLIT, assert_near, dynamic, note_ways
from models import LATENT, exact, forced, generate, logits_of, prompt, tiny
from stand_in import accelerator
from torch import nn
from transformers import PreTrainedModel

from qada_cache import QAdACache, profile, tuning
from qada_cache.attention import latent_attention
from qada_cache.attention.latent_attention import LatentAttention
from qada_cache.kernels.operands import Query
from qada_cache.kernels.reference import TOLERANCE
from qada_cache.versions import pass_cache


@pytest.fixture(params=LATENT)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("how", ["absorbed", "expanded", "cheaper"])
def test_turns_of_padded_rows(
    model: PreTrainedModel, how: str, offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the bulk lies on the device or not, cached tokens are expanded in blocks, or not at all."""
    monkeypatch.setattr(latent_attention, "EXPANDED", 1)
    monkeypatch.setattr(latent_attention, "MIN_BLOCK", 7)
    found = note_ways(monkeypatch, how)
    ids, mask = prompt(sum(SPLIT), 131)
    wanted = forced(model, ids, SPLIT, dynamic(model), mask)
    with accelerator() if offloaded else nullcontext():
        got = forced(model, ids, SPLIT, exact(model), mask)
    real = mask.bool()
    assert_near(model, got[real], wanted[real])
    assert set(found) == ({"absorbed", "expanded"} if how == "cheaper" else {how})


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("how", ["absorbed", "expanded"])
@pytest.mark.parametrize("kind", ["weight", "bias", "hook"])
@torch.no_grad()
def test_attention_is_that_of_float64(kind: str, how: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over latents that are expanded in float64; with a bias, too, and by what a module says that has a hook."""
    found = note_ways(monkeypatch, how)
    model = tiny("deepseek_v3", dtype=dtype, num_hidden_layers=1)
    module = model.model.layers[0].self_attn
    made = torch.Generator().manual_seed(0)
    if kind == "bias":
        module.kv_b_proj.bias = nn.Parameter(torch.randn(4 * 16, generator=made).to(dtype))
    if kind == "hook":
        module.kv_b_proj.register_forward_hook(lambda _, given, out: 2 * out)
    cache = exact(model)
    forced(model, prompt(150, 80)[0], [150], cache)
    layer = cache.layers[0]
    states = torch.randn(2, 4, 3, 16, generator=made).to(dtype)
    out, lse = LatentAttention(layer, layer.store, Query(states, 0.7), 11).attend(slice(0, 2), states)
    assert found == [how]
    # [2, 1, tokens, rank] and rope; [4, nope + value_dim, rank].
    held, rotary = layer.store.copy_tokens(slice(0, 2), 0, 150)[0].double().split([16, 8], dim=-1)
    weight = module.kv_b_proj.weight.double().view(4, 16, 16) * (2 if kind == "hook" else 1)
    bias = module.kv_b_proj.bias.double().view(4, 1, 16) if kind == "bias" else 0
    keys, values = (held @ weight.mT + bias).split(8, dim=-1)
    scores = 0.7 * states.double() @ torch.cat([keys, rotary.expand(-1, 4, -1, -1)], dim=-1).mT
    wanted = scores.softmax(-1) @ values
    assert layer.reads_weight == (kind != "hook")
    assert (out[..., :8] - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    assert not out[..., 8:].any()  # what attention was given was padded to so many channels
    assert (lse - scores.logsumexp(-1)).norm() <= TOLERANCE[dtype] * scores.logsumexp(-1).norm()


@pytest.mark.parametrize("how", ["model", "config"])
def test_a_default_cache_reads_everything(how: str) -> None:
    """It says so, and no pass over other tokens comes first."""
    model, ids = tiny("deepseek_v3"), prompt(300)[0]
    wanted = generate(model, ids, dynamic(model))
    calls: list[Any] = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    cache = QAdACache(**{how: model if how == "model" else model.config})
    assert not calls
    hook.remove()
    got = generate(model, ids, cache)
    assert torch.equal(got.sequences, wanted.sequences)
    assert_near(model, logits_of(got), logits_of(wanted))
    stats = cache.stats()
    assert (stats.layers, stats.decisions, stats.steps) == ((0, 1), 0, 0)
    assert stats.streamed_bytes > 0
    assert "323 tokens, no adaptive steps;" in str(stats)
    assert f"read 0.0 MiB, by exact calls {stats.streamed_bytes / 2**20:.1f} MiB" in str(stats)
    assert "criterion dense, moments none" in repr(cache)


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.5}, {"token_threshold": 2.0}, {"prefill_threshold": 1.0}, {"audit_every": 5},
        {"kernels": "triton"},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_ask_for_less_are_refused(options: dict[str, Any]) -> None:
    model = tiny("deepseek_v3")
    ((name, value),) = options.items()
    said = f"reads all tokens of latent attention, .* {name}={value!r} .* leave out {name}, or give [^,]*"
    decided = name in ("threshold", "token_threshold", "audit_every")
    said += ", or criterion='gaussian', by which heads decide$" if decided else "$"
    with pytest.raises(NotImplementedError, match=said):
        QAdACache(model, **options)
    if name != "prefill_threshold":  # which no fork changes
        with pytest.raises(NotImplementedError, match=said):
            exact(model).fork(**options)


def test_nothing_is_tuned() -> None:
    model = tiny("deepseek_v3")
    said = "all tokens of latent attention by default, which deepseek_v3 has: there are no thresholds to tune"
    with pytest.raises(NotImplementedError, match=said):
        tuning.tune(model, [], [], tuning.Budget(0.01))
    profiles = profile.profile(model, prompt(200)[0], new_tokens=2, chunk=100)
    assert [each.read_share for each in profiles] == [1.0, 1.0]


def test_other_tensors_than_latents_are_refused() -> None:
    cache = exact(tiny("deepseek_v3"))
    keys = torch.zeros(1, 4, 3, 16)
    with pytest.raises(NotImplementedError, match=r"layer 0 .* \[1, 4, 3, 16\] .* latents .*use transformers.Dynamic"):
        cache.update(keys, keys, 0)
    assert cache.get_seq_length() == 0


def test_other_calls_are_bit_identical() -> None:
    model, ids = tiny("deepseek_v3"), prompt(60)[0]
    before = [forced(model, ids, [40, 1], each) for each in (dynamic(model), None)]
    forced(model, ids, [40, 1], exact(model))
    for wanted, each in zip(before, (dynamic(model), None), strict=True):
        assert torch.equal(forced(model, ids, [40, 1], each), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    """Logits in half precision, and under autocast, are about as near to float32 as with `DynamicCache`."""
    ids = prompt(sum(SPLIT))[0]
    truth = forced(wide := tiny("deepseek_v3", initializer_range=0.1), ids, SPLIT, dynamic(wide))
    model = tiny("deepseek_v3", dtype=dtype, initializer_range=0.1)
    for each, context in ((model, nullcontext()), (wide, torch.autocast("cpu", dtype=dtype))):
        with context:
            off = [(forced(each, ids, SPLIT, made(each)) - truth).norm() for made in (dynamic, exact)]
        assert off[1] <= 1.2 * off[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_branches_of_a_draft(attention: str) -> None:
    """New tokens that see each other as a mask says."""
    model, ids = tiny("deepseek_v3", attention=attention), prompt(60)[0]
    shown = torch.ones(6, 60, dtype=torch.bool).tril(54)
    shown[4:, 56:58] = False
    mask = torch.where(shown, 0.0, torch.finfo(torch.float32).min)[None, None]
    found = []
    for cache in (dynamic(model), exact(model)):
        forced(model, ids[:, :54], [54], cache)
        with torch.no_grad():
            found.append(model(ids[:, 54:], attention_mask=mask, **pass_cache(cache)).logits)
    assert_near(model, found[1], found[0])
