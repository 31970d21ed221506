"""Model families: exact where QAdACache supports them, one clear error where not, never a wrong answer."""

from __future__ import annotations

import pytest
import torch
from models import (
    EAGER,
    FAMILIES,
    LATENT,
    SMALL,
    assert_same,
    exact,
    generate,
    logits_of,
    prompt,
    tiny,
)
from transformers import (
    DynamicCache,
)
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from qada_cache import QAdACache
from qada_cache.attention.differential import DifferentialLayer
from qada_cache.attention.latent import LatentLayer
from qada_cache.kernels.cpu.compiler import has_compiler
from qada_cache.state.layer import QAdALayer

UNSUPPORTED = {
    "jetmoe": (RuntimeError, "jetmoe model computes attention in a way .*use DynamicCache"),
    "gptj": (NotImplementedError, "without transformers' AttentionInterface: use transformers.DynamicCache for gptj"),
}
SUPPORTED = [family for family in FAMILIES if family not in UNSUPPORTED]
LAYERS = {
    "afmoe": [DynamicSlidingWindowLayer, QAdALayer],
    "gemma2": [DynamicSlidingWindowLayer, QAdALayer],
    "gemma3": [DynamicSlidingWindowLayer, QAdALayer],
    "gpt_oss": [DynamicSlidingWindowLayer, QAdALayer],
    "gemma3n": [DynamicSlidingWindowLayer, QAdALayer],
    "gemma4": [DynamicSlidingWindowLayer, QAdALayer],
    "qwen3_next": [LinearAttentionLayer, QAdALayer],
    "mistral_sliding": [DynamicSlidingWindowLayer, DynamicSlidingWindowLayer],
    "diffllama": [DifferentialLayer, DifferentialLayer],
    "deepseek_v2": [LatentLayer, LatentLayer],
    "deepseek_v3": [LatentLayer, LatentLayer],
}
# Longer than the sliding windows (12) and the local tokens (20); the last row has no bulk until it grows one.
LENGTHS = (150, 47, 11)


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, name) for family in SUPPORTED for name in ("sdpa", "eager") if name == "eager" or family not in EAGER],
)
def test_threshold_one_is_dynamic_cache(family: str, attention: str) -> None:
    model = tiny(family, attention=attention)
    ids, mask = prompt(*LENGTHS)
    wanted = generate(model, ids, DynamicCache(config=model.config), tokens=12, attention_mask=mask)
    cache = exact(model)
    assert [type(layer) for layer in cache.layers[:2]] == LAYERS.get(family, [QAdALayer, QAdALayer])
    assert_same(model, generate(model, ids, cache, tokens=12, attention_mask=mask), wanted)
    if family != "mistral_sliding" and family not in LATENT:
        assert cache.stats().decisions > 0
        assert cache.stats().sparsity == 0.0


@pytest.mark.parametrize("family", SUPPORTED)
def test_turns_and_beams(family: str) -> None:
    """A short and a long second turn, in beam search, on one cache."""
    model = tiny(family)
    text, cache, plain = prompt(100)[0], exact(model), DynamicCache(config=model.config)
    for length in (7, 40):
        wanted = generate(model, text, plain, tokens=6)
        assert_same(model, generate(model, text, cache, tokens=6), wanted)
        text = torch.cat([wanted.sequences, prompt(length, seed=length)[0]], dim=1)
    wanted = generate(model, text[:, :90], DynamicCache(config=model.config), tokens=12, num_beams=3)
    assert_same(model, generate(model, text[:, :90], exact(model), tokens=12, num_beams=3), wanted)


@pytest.mark.parametrize("family", [family for family in SUPPORTED if family not in LATENT])
def test_config_works_like_model(family: str) -> None:
    """A cache built of a config works like one built of the model. In every family some heads are local, some not."""
    outputs, caches = [], []
    for how in ("model", "config"):
        model = tiny(family)
        given = {how: model if how == "model" else model.config, "moments": "current"}
        caches.append(QAdACache(**given, threshold=0.12, **SMALL))
        outputs.append(generate(model, prompt(150)[0], caches[-1]))
    assert torch.equal(logits_of(outputs[0]), logits_of(outputs[1]))
    assert str(caches[0]) == str(caches[1])
    if family != "mistral_sliding":
        assert 0.0 < caches[0].stats().sparsity < 1.0


@pytest.mark.parametrize(("logit", "sparsity"), [(40.0, 1.0), (-1e4, 0.0)])
def test_a_learned_sink_is_local_attention(logit: float, sparsity: float) -> None:
    """A head that gives the sink all of its attention is local, and misses none; a sink without attention changes
    nothing."""
    model, ids = tiny("gpt_oss"), prompt(150)[0]
    model.model.layers[1].self_attn.sinks.data.fill_(logit)
    wanted = generate(model, ids, DynamicCache(config=model.config))
    cache = QAdACache(model, threshold=0.95, moments="current", token_threshold=0, audit_every=3, **SMALL)
    got = generate(model, ids, cache)
    assert cache.stats().sparsity == sparsity
    assert cache.stats().audit.missed < 1e-6
    assert torch.allclose(logits_of(got), logits_of(wanted), atol=1e-4)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_tokens_are_selected_beside_a_learned_sink_and_by_soft_capped_scores(family: str) -> None:
    """All that the sketch finds in the bulk, at a threshold that hardly any token is below."""
    model, ids = tiny(family, max_position_embeddings=2048), prompt(1300)[0]
    wanted = generate(model, ids, DynamicCache(config=model.config), tokens=6)
    cache = QAdACache(model, threshold=1 - 1e-9, moments="current", token_threshold=1e-9, **SMALL)
    got = generate(model, ids, cache, tokens=6)
    assert cache.stats().sketch_read_bytes > 0
    plan = next(layer.plan for layer in cache.layers if isinstance(layer, QAdALayer))
    assert (plan.kernel is not None) == (family == "gpt_oss" and has_compiler())
    assert torch.allclose(logits_of(got), logits_of(wanted), atol=1e-3)


def test_triton_has_no_soft_caps() -> None:
    model = tiny("gemma2")
    with pytest.raises(NotImplementedError, match=r"no Triton kernel computes soft-capped scores \(softcap\)"):
        generate(model, prompt(60)[0], exact(model, kernels="triton", moments="current"))


def test_crops_of_a_hybrid_model() -> None:
    """Prompt lookup crops every step, which sliding layers allow only once they record their past."""
    model = tiny("gemma3", initializer_range=0.2, seed=3)  # which repeats itself, so that there is text to look up
    ids, options = prompt(150)[0], {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}
    wanted = generate(model, ids, DynamicCache(config=model.config), **options)
    cache = exact(model)
    assert_same(model, generate(model, ids, cache, **options), wanted)
    assert cache.stats().steps < 23  # some guess was accepted


@pytest.mark.parametrize(
    ("family", "lengths"), [("llama", (130, 77)), ("gemma3", (90,)), ("qwen3_next", (90,)), ("mistral_sliding", (90,))]
)
def test_a_cache_is_reset_whole(family: str, lengths: tuple[int, ...]) -> None:
    """A reset cache has no tokens and no counts, and takes a text of another batch size as a new one does."""
    model = tiny(family)
    cache = exact(model)
    generate(model, prompt(*lengths, seed=4)[0], cache)
    cache.reset()
    assert (cache.get_seq_length(), cache.stats().decisions, cache.stats().bulk_read_bytes) == (0, 0, 0)
    wanted = generate(model, prompt(150)[0], DynamicCache(config=model.config))
    assert_same(model, generate(model, prompt(150)[0], cache), wanted)


def test_no_full_attention_is_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cache = exact(tiny("mistral_sliding"))
    assert "mistral has no full-attention layers: QAdACache has nothing to do" in caplog.text
    assert cache.stats().layers == ()
    assert "0 of 2 layers" in repr(cache)
