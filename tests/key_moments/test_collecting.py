"""Key moments from forward passes: what the model does with positions, and the schemes against float64."""

from typing import Any

import pytest
import torch
import transformers
from models import prompt, tiny
from reference import key_moments, rotary_matrix
from test_rotation import SCHEMES
from torch import Tensor
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    Kosmos2Config,
    Kosmos2ForConditionalGeneration,
    PreTrainedModel,
)

from qada_cache import KeyMoments, QAdACache
from qada_cache.key_moments.rotation import find_rotations
from qada_cache.versions import pass_cache

PROBE = torch.tensor([5, 9, 23, 50])


def model_with(scheme: str, **changes: Any) -> PreTrainedModel:
    return tiny("llama", rope_parameters=dict(SCHEMES[scheme]), **changes)


def learned_positions() -> PreTrainedModel:
    """GPT-2 adds positions to the tokens: no rotation describes its keys."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, initializer_range=0.35)
    return GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").eval()


def true_keys(model: PreTrainedModel, ids: Tensor, positions: Tensor | None = None) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        place = {} if positions is None else {"position_ids": positions[None]}
        model(ids, **pass_cache(cache), **place)
    return cache


def assert_moments(made: KeyMoments, grid: int, layer: int, keys: Tensor, tolerance: float = 2e-6) -> None:
    for head, kept in enumerate(keys):
        mean, covariance = key_moments(keys=kept)
        scale = float(1 + kept.double().square().mean())
        assert float((made.mean[grid, layer, head] - mean).abs().max()) <= tolerance * scale
        assert float((made.covariance[grid, layer, head] - covariance).abs().max()) <= tolerance * scale


# -- asking the model ------------------------------------------------------------------------------------------------

HALF, WHOLE = "half", "interleaved"
FOUND = {  # layout and frequencies of the full-attention layers of each tiny family
    "llama": {0: (HALF, 4), 1: (HALF, 4)},
    "qwen3": {0: (HALF, 4), 1: (HALF, 4)},
    "phi3": {0: (HALF, 4), 1: (HALF, 4)},
    "gemma3": {1: (HALF, 4)},
    "glm4": {0: (WHOLE, 2), 1: (WHOLE, 2)},
    "smollm3": {0: (HALF, 4), 1: (HALF, 0)},
    "qwen3_next": {1: (HALF, 1)},
    "mistral_sliding": {},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FOUND)
def test_rotations_are_found(family: str, dtype: torch.dtype) -> None:
    found = find_rotations(tiny(family, dtype=dtype), PROBE, 1000)
    assert {index: (made.layout, len(made.frequencies)) for index, made in found.items()} == FOUND[family]


@pytest.mark.parametrize("longest", [400, 1100])  # below and beyond where longrope and dynamic models change
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rotations_turn_real_keys(scheme: str, longest: int) -> None:
    """The first layer's keys of one token at many positions, turned back, are one key."""
    model = model_with(scheme)
    positions = torch.tensor([0, 3, 100, longest])
    rotation = find_rotations(model, PROBE, longest + 1)[0]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.full((4, 1), 7), position_ids=positions[:, None], **pass_cache(cache))
    keys = cache.layers[0].keys[:, :, 0].transpose(0, 1).double()
    torch.testing.assert_close(rotation.rotate(keys, -positions), keys[:, :1].expand_as(keys), rtol=0, atol=1e-4)


def test_layers_of_different_types() -> None:
    """Full and sliding layers of one model may turn at different speeds: each gets its own."""
    model = tiny("gemma3", rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    })  # fmt: skip
    expected = tuple(1e6 ** (-index / 4) / 8 for index in range(4))
    assert find_rotations(model, PROBE, 200)[1].frequencies == pytest.approx(expected)


def test_learned_positions_are_no_rotation() -> None:
    assert find_rotations(learned_positions(), PROBE, 200) == {0: None, 1: None}


# -- schemes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "glm4", "smollm3"])
def test_analytic_keeps_the_keys_turned_back(family: str) -> None:
    """Beside float64, turned by matrices; and averaged over one position, they are that position's keys."""
    model, ids = tiny(family), prompt(111)[0]
    made = KeyMoments.collect(model, prompt=ids, scheme="analytic")
    assert (made.lengths, made.tokens, made.prompt, made.mean.dtype) == ((), 111, "custom", torch.float32)
    for layer, cached in enumerate(true_keys(model, ids).layers):
        rotation = made.rotations[layer]
        rotated = [
            cached.keys[0, :, position].double()
            @ rotary_matrix(
                dim=8, frequencies=rotation.frequencies, layout=rotation.layout, position=position
            )  # from the right: the matrix's inverse
            for position in range(16, 111)
        ]
        assert_moments(made, 0, layer, torch.stack(rotated, dim=1), 2e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_prompt_scheme_equals_float64(family: str) -> None:
    """The paper's scheme: the keys as they are, without the sinks', for the whole prompt and its halves."""
    model, ids = tiny(family), prompt(16 + 600)[0]
    made = KeyMoments.collect(model, prompt=ids, scheme="prompt", progress=False)
    assert made.lengths == (300, 600)
    served = 0
    for layer, cached in enumerate(true_keys(model, ids).layers):
        if family == "llama" or layer == 1:
            served += 1
            for grid, length in enumerate(made.lengths):
                assert_moments(made, grid, layer, cached.keys[0, :, 16 : 16 + length], 1e-5)
        else:  # a layer of another kind, which no cache asks about
            assert not made.mean[:, layer].any()
            assert not made.covariance[:, layer].any()
    assert served


@pytest.mark.parametrize("make", [tiny, learned_positions])
def test_spread_scheme_equals_float64(make: Any) -> None:
    """The same tokens over ever longer bulks, the sinks in their place."""
    model, ids = make(), prompt(16 + 112)[0]
    made = KeyMoments.collect(model, prompt=ids, scheme="spread" if make is tiny else "auto")
    assert made.lengths == ((112, 224, 448, 896) if make is tiny else (112, 224, 448))
    for grid, length in enumerate(made.lengths):
        spread = [round(index * (length - 1) / 111) for index in range(112)]
        positions = torch.tensor([*range(16), *(16 + position for position in spread)])
        for layer, cached in enumerate(true_keys(model, ids, positions).layers):
            assert_moments(made, grid, layer, cached.keys[0, :, 16:], 1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_analytic_describes_longer_prompts(scheme: str) -> None:
    """From 300 tokens, moments of 900 nearly as good as those of another prompt of 900, where 300 raw ones are not."""
    model = model_with(scheme)

    def covariance(seed: int, tokens: int, how: str) -> Tensor:
        return KeyMoments.collect(model, prompt=prompt(16 + tokens, seed=seed)[0], scheme=how).at(900)[1][0]

    true = covariance(5, 900, "prompt")
    errors = {
        name: float((found - true).norm() / true.norm())
        for name, found in {
            "other": covariance(6, 900, "prompt"),
            "short": covariance(6, 300, "analytic"),
            "raw": covariance(6, 300, "prompt"),
        }.items()
    }
    assert errors["short"] < 2 * errors["other"]
    assert errors["short"] < 0.8 * errors["raw"]


# -- what collecting leaves, and refuses -----------------------------------------------------------------------------


def test_the_model_is_left_as_it_was() -> None:
    model = tiny()
    model.train()
    model.lm_head.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = KeyMoments.collect(model, tokens=100)
    assert model.training
    assert model.model.layers[0].training
    assert not model.lm_head.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not made.mean.requires_grad
    with pytest.raises(ValueError, match="has 50 tokens and 99 were asked for"):
        KeyMoments.collect(model, prompt=prompt(50)[0], tokens=99)
    assert model.training


def test_origin() -> None:
    made = KeyMoments.collect(tiny(dtype=torch.bfloat16), seed=7, tokens=64)
    assert made.origin.items() >= {"dtype": "bfloat16", "scheme": "analytic", "seed": 7, "model": ""}.items()
    assert made.rope["rope_parameters"]["rope_theta"] == 10000.0
    assert made.mean.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": 16}, ValueError, r"tokens \(16\) must exceed sink_tokens \(16\)"),
        ({"prompt": torch.ones(1, 9).long()}, ValueError, r"tokens \(9\) must exceed sink_tokens"),
        ({"scheme": "guess"}, ValueError, "unknown scheme 'guess': use one of auto, analytic, spread, prompt"),
        ({"prompt": "wiki"}, ValueError, r"a prompt of text \(wiki\) needs the model's tokenizer"),
        ({"prompt": "Call me Ishmael."}, ValueError, r"\(Call me Ishmael.\) needs the model's tokenizer"),
        ({"tokenizer": torch.ones(1, 50)}, TypeError, "token ids are the prompt, not the tokenizer"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KeyMoments.collect(tiny(), **options)


def test_models_without_what_it_takes() -> None:
    with pytest.raises(TypeError, match="collected from a transformers model, got LlamaConfig"):
        KeyMoments.collect(tiny().config)
    with pytest.raises(ValueError, match="no full-attention layers"):
        KeyMoments.collect(tiny("mistral_sliding"))
    with pytest.raises(ValueError, match=r'layers \[0, 1\] of gpt2 turn .* not found out: use scheme="spread"'):
        KeyMoments.collect(learned_positions(), scheme="analytic")
    sizes = {"vocab_size": 97, "embed_dim": 32, "layers": 1, "ffn_dim": 48, "attention_heads": 4}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    reads_images = Kosmos2ForConditionalGeneration(Kosmos2Config(text_config=sizes, vision_config=vision)).eval()
    with pytest.raises(ValueError, match=r'Kosmos2.* does not read the text .*pixel_values.*: use moments="current"'):
        QAdACache(reads_images)


def test_learned_positions_end_to_end() -> None:
    """A cache for such a model gets moments too, from spread positions."""
    model = learned_positions()
    cache = QAdACache(model, moments="random-tokens", sink_tokens=4, local_tokens=20)
    assert cache.options.other_moments.origin["scheme"] == "spread"
    out = model.generate(prompt(90)[0], **pass_cache(cache), max_new_tokens=8, do_sample=False)
    assert out.shape == (1, 98)
    assert cache.stats().decisions == 7


def test_learned_positions_are_not_exceeded() -> None:
    """The longest bulk that tokens are spread over ends with the last position, sinks before it."""
    for tokens, lengths in ((272, (256,)), (264, (248, 496))):
        made = KeyMoments.collect(learned_positions(), prompt="random-tokens", tokens=tokens, progress=False)
        assert made.lengths == lengths


@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta", "Camembert", "RoCBert", "Ernie"])
def test_learned_positions(kind: str) -> None:
    """As many tokens as there are positions: RoBERTa's begin behind the padding token's. Not all have a first token."""
    options = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    options |= {"num_attention_heads": 4, "max_position_embeddings": 130, "pad_token_id": 1, "is_decoder": True}
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="sdpa").eval()
    moments = KeyMoments.collect(model, progress=False)
    assert moments.tokens == (128 if "oberta" in kind or kind == "Camembert" else 130)
    assert moments.covariance.diagonal(dim1=-2, dim2=-1).sum(dim=-1).gt(0).all()
