"""Bad input and wrong use: one clear exception each, and nothing half-done by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import SMALL, exact, forced, generate, prompt, tiny
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderConfig,
    MllamaTextConfig,
    PreTrainedModel,
    T5Config,
)

from qada_cache import QAdACache
from qada_cache.versions import pass_cache


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


def test_models_of_other_kinds() -> None:
    sizes = {"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
    sizes |= {"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = BartForConditionalGeneration(BartConfig(**sizes))
    with pytest.raises(NotImplementedError, match=r"decoder-only models: use transformers.DynamicCache for bart"):
        QAdACache(bart)
    assert bart.config._attn_implementation == "sdpa"
    with pytest.raises(NotImplementedError, match=r"decoder-only models: use transformers.DynamicCache for t5"):
        QAdACache(config=T5Config())
    composed = EncoderDecoderConfig.from_encoder_decoder_configs(BartConfig(**sizes), tiny().config)
    with pytest.raises(NotImplementedError, match=r"decoder-only models: .* for encoder-decoder"):
        QAdACache(config=composed)  # whose decoder alone would be served
    with pytest.raises(NotImplementedError, match=r"images' keys: use transformers.DynamicCache for mllama_text_model"):
        QAdACache(config=MllamaTextConfig())
    model = tiny()
    model.config._attn_implementation = "sparse"  # as if loaded with it, where its library is installed
    with pytest.raises(ValueError, match=r"cannot stand in for .*'sparse': .* eager, sdpa, .* flash"):
        QAdACache(model)
    assert model.config._attn_implementation == "sparse"


def test_another_model(model: PreTrainedModel) -> None:
    """Never wrong tokens, whichever model it is, and whether or not that one has a cache of its own."""
    other, text = tiny(seed=1), prompt(150)[0]
    cache = exact(model)
    generate(model, text, cache)
    refusal = pytest.raises(RuntimeError, match=r"another model.*: build one QAdACache per model")
    more = torch.cat([text, prompt(60, seed=2)[0]], dim=1)
    wanted = forced(model, more, [172, 38], DynamicCache(config=model.config))[:, 173:]
    for tokens in (1, 37):
        twin = copy.deepcopy(cache)
        with refusal, torch.no_grad():
            other(more[:, 173 : 173 + tokens], **pass_cache(twin))
        with refusal:
            generate(other, text, exact(model))
        assert twin.get_seq_length() == cache.get_seq_length() == 173
    exact(other)
    with refusal:
        forced(other, text[:, :5], [5], cache)
    cache.reset()
    with refusal:  # also an empty one
        generate(other, text, cache)
    cache.reset()
    for layers in (1, 3):
        another = tiny(num_hidden_layers=layers)
        exact(another)
        with refusal:
            generate(another, text, exact(model))
    wanted = generate(model, text, DynamicCache(config=model.config))
    assert torch.equal(generate(model, text, cache).sequences, wanted.sequences)


@pytest.mark.parametrize(("mine", "theirs"), [("gemma3", "llama"), ("llama", "gemma3"), ("llama", "mistral_sliding")])
def test_another_family(mine: str, theirs: str) -> None:
    """Layers of another kind than the model's: the model's full-attention layers would read a sliding window."""
    cache, other = exact(tiny(mine)), tiny(theirs)
    exact(other)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"model|sliding window"):
        generate(other, prompt(150)[0], cache)


@pytest.mark.parametrize("attention_name", ["sdpa", "eager"])
def test_attention_weights_are_refused(attention_name: str) -> None:
    model, ids = tiny(attention=attention_name), prompt(50)[0]
    refusal = pytest.raises(NotImplementedError, match=r"cannot return attention weights.*drop output_attentions=True")
    with refusal:
        generate(model, ids, exact(model), output_attentions=True)
    with refusal, torch.no_grad():
        model(ids, **pass_cache(exact(model)), output_attentions=True)
    if attention_name == "eager":  # transformers refuses to set it for sdpa
        asking = tiny(attention="eager")
        asking.config.output_attentions = True
        with refusal:
            generate(asking, ids, exact(asking))


def test_training_is_refused(model: PreTrainedModel) -> None:
    ids, cache = prompt(50)[0], exact(model)
    with pytest.raises(RuntimeError, match=r"inference only: call the model under torch.no_grad\(\)"):
        model(ids, **pass_cache(cache))
    model.train()
    with pytest.raises(RuntimeError, match=r"inference only: call model.eval\(\)"), torch.no_grad():
        model(ids, **pass_cache(cache))
    model.eval()
    got = forced(model, ids, [50], cache)  # both were refused before anything was stored
    assert (got - forced(model, ids, [50], None)).abs().max() < 1e-4


@pytest.mark.parametrize(("rows", "dtype"), [(2, torch.float32), (1, torch.float64)])
def test_a_refused_first_call_leaves_an_empty_cache(model: PreTrainedModel, rows: int, dtype: torch.dtype) -> None:
    """Neither its rows nor its dtype bind the next call."""
    cache, ids = exact(model), prompt(50)[0]
    model.to(dtype)
    with pytest.raises(NotImplementedError, match="cannot return attention weights"), torch.no_grad():
        model(ids.repeat(rows, 1), **pass_cache(cache), output_attentions=True)
    model.float()
    got = forced(model, ids, [40, 1], cache)
    assert (got - forced(model, ids, [50], None)).abs().max() < 1e-4


def test_a_refused_call_of_a_cache_that_was_emptied_keeps_its_rows(model: PreTrainedModel) -> None:
    """As `DynamicCache`: other layers have them, too."""
    cache, ids = exact(model), prompt(50, 50)[0]
    forced(model, ids, [50], cache)
    cache.crop(-50)
    with pytest.raises(NotImplementedError, match="cannot return attention weights"), torch.no_grad():
        model(ids, **pass_cache(cache), output_attentions=True)
    with pytest.raises(RuntimeError, match="holds 2 rows and was given 1"):
        forced(model, ids[:1], [50], cache)
    assert (forced(model, ids, [50], cache) - forced(model, ids, [50], None)).abs().max() < 1e-4


@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("llama", "layers.1.self_attn.q_proj"),
        ("gpt_oss", "layers.1.self_attn.sinks"),
        ("deepseek_v3", "layers.1.self_attn.kv_b_proj"),
        ("gemma3n", "layers.3.self_attn.q_proj"),
    ],
)
def test_gradients_that_pass_by_the_keys_are_refused(family: str, part: str, tokens: int) -> None:
    """No key that is stored has any: they are of queries, of learned sinks, and of what expands latents."""
    model, ids = tiny(family), prompt(900 + tokens)[0]
    for name, weight in model.named_parameters():
        weight.requires_grad_(part in name or "lm_head" in name)
    cache = exact(model)
    forced(model, ids[:, :900], [898, 1], cache)
    with pytest.raises(RuntimeError, match=r"inference only: call the model under torch.no_grad\(\)"):
        model(ids[:, 900:], **pass_cache(cache))


def test_a_cache_is_not_a_list(model: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="cannot be unpacked into keys and values"):
        list(exact(model))
    with pytest.raises(ValueError, match="crop takes a negative count of tokens to remove, got 3"):
        exact(model).crop(3)
    for count in (None, -1.5):
        with pytest.raises(TypeError, match=f"crop takes a negative count of tokens to remove, got {count}"):
            exact(model).crop(count)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_layers_are_no_tensors(name: str, model: PreTrainedModel) -> None:
    """Model code that takes them for DynamicCache's, as mllama's does, failed on None."""
    cache = exact(model)
    layer = cache.layers[1]
    assert getattr(layer, name) is None
    in_words = pytest.raises(AttributeError, match=rf"the {name} of a QAdACache layer.* use .*DynamicCache for llama")
    with in_words:
        setattr(layer, name, torch.zeros(1, 2, 3, 8))
    forced(model, prompt(60)[0], [50, 1], cache)
    for used in (layer, copy.deepcopy(cache).layers[1]):
        with in_words:
            getattr(used, name).numel()
        assert not hasattr(used, name)
        assert getattr(used, name, "none") == "none"
    cache.reset()
    assert getattr(layer, name) is None


def missing(mask: Tensor) -> None:
    return None


def unpadded(mask: Tensor) -> Tensor:
    return torch.ones_like(mask)


WRONG_MASKS = [(family, wrong) for family in ("llama", "qwen3_next", "gemma3") for wrong in (missing, unpadded)]


@pytest.mark.parametrize(("family", "wrong"), WRONG_MASKS)
def test_masks_that_do_not_fit(family: str, wrong: Callable[[Tensor], Any]) -> None:
    """Refused; and what was refused is either undone or the cache says that it is unusable from here on."""
    model, (ids, mask) = tiny(family), prompt(170, 120)
    cache, plain = exact(model), DynamicCache(config=model.config)
    wanted = forced(model, ids, [150, 20], plain, mask)[:, 150:]
    forced(model, ids[:, :150], [150], cache, mask)
    with pytest.raises(ValueError, match=r"attention mask .*does not agree with the tokens"), torch.no_grad():
        model(ids[:, 150:], **pass_cache(cache), attention_mask=wrong(mask))
    if family == "llama":
        with torch.no_grad():
            got = model(ids[:, 150:], **pass_cache(cache), attention_mask=mask).logits
        assert (got - wanted)[mask[:, 150:].bool()].abs().max() < 1e-3
    else:  # a layer of transformers' own had taken the tokens in already
        with pytest.raises(RuntimeError, match=r"interrupted.*reset\(\)"), torch.no_grad():
            model(ids[:, 150:], **pass_cache(cache), attention_mask=mask)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])  # the last two begin with another kind of layer
def test_changed_attention_implementation(family: str) -> None:
    model = tiny(family)
    text, cache = prompt(150)[0], exact(model)
    generate(model, text, cache)
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match=r"was changed after this QAdACache was built \(to 'eager'\): build a new"):
        generate(model, prompt(180)[0], cache)
    wanted = generate(model, text, DynamicCache(config=model.config))
    assert torch.equal(generate(model, text, exact(model)).sequences, wanted.sequences)


def test_config_that_is_not_the_models_own(model: PreTrainedModel) -> None:
    cache = QAdACache(config=copy.deepcopy(model.config), **SMALL)
    with pytest.raises(RuntimeError, match=r"not this model's own: .* by QAdACache\(model\)"):
        generate(model, prompt(150)[0], cache)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("options", [{}, {"moments": "current"}, {"criterion": "dense"}])
@pytest.mark.parametrize("part", ["all", "one"])
def test_weights_that_were_never_loaded(part: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the meta device are refused before the model reads anything."""
    model = tiny()
    (model if part == "all" else model.model.layers[1].mlp).to("meta")
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("it was called"))
    with pytest.raises(ValueError, match=r"on the meta device, .*: load them first \(from_pretrained"):
        QAdACache(model, **options)
