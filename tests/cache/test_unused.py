"""A cache that `generate` was given and the model does not use is told, and no other."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext, suppress
from typing import Any, cast

import pytest
import torch
from models import exact, forced, generate, logits_of, prompt, tiny
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    IdeficsConfig,
    IdeficsForVisionText2Text,
    LogitsProcessor,
    Phi3ForCausalLM,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
)

from eval import families
from qada_cache import QAdACache
from qada_cache.said_once import warn_once
from qada_cache.versions import CACHE, pass_cache

TEXT = prompt(60)[0]
UNUSED = "generate was given a QAdACache that this"


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    warn_once.cache_clear()


SWITCH: dict[str, Any] = {  # frequencies that change behind 62 tokens
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 62,
    "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip


# Older transformers give Phi 3 the newest tokens alone where it drops a cache, as 5.24 does with Phi 4.
PREPARE = inspect.unwrap(cast(Any, Phi3ForCausalLM).prepare_inputs_for_generation)
READS_AGAIN = "next_sequence_length" in PREPARE.__code__.co_consts


def phi() -> PreTrainedModel:
    """A model that drops its cache where a text passes 62 tokens."""
    return tiny("phi3", original_max_position_embeddings=62, rope_parameters=SWITCH)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.parametrize("lengths", [(60, 49), (70, 57)], ids=["across", "above"])
def test_a_cache_is_filled_again(
    lengths: tuple[int, ...], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A cache is filled again if the model's frequencies change, and in the next turn. `generate` goes on with the
    cache that it was given."""
    model = phi()
    ids, mask = prompt(*lengths[: 1 if "prompt_lookup_num_tokens" in options else 2])
    cache, theirs = exact(model), DynamicCache(config=model.config)
    if lengths[0] < 62 and not READS_AGAIN:
        with pytest.raises(RuntimeError, match=r"of 6\d tokens: cache\.reset\(\)"):
            generate(model, ids, cache, attention_mask=mask, tokens=10, **options)
        return
    got = generate(model, ids, cache, attention_mask=mask, tokens=10, **options)
    wanted = generate(model, ids, theirs, attention_mask=mask, tokens=10, **options)
    assert torch.equal(got.sequences, wanted.sequences)
    assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-3
    assert cache.get_seq_length() == lengths[0] + 9
    assert cache.stats().decisions > 0
    assert not caplog.records


def test_a_turn_across_the_change(caplog: pytest.LogCaptureFixture) -> None:
    model = phi()
    cache = exact(model)
    first = generate(model, TEXT[:, :40], cache, tokens=4).sequences
    text = torch.cat([first, TEXT[:, :30]], dim=1)
    if not READS_AGAIN:
        with pytest.raises(RuntimeError, match=r"of 74 tokens: cache\.reset\(\)"):
            generate(model, text, cache, tokens=6)
        return
    got = generate(model, text, cache, tokens=6)
    assert torch.equal(got.sequences, generate(model, text, None, tokens=6).sequences)
    assert cache.get_seq_length() == 44 + 30 + 5
    assert not caplog.records


@pytest.mark.parametrize("model_type", ["phimoe", "phi4_multimodal"])
def test_its_kin(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    """Related models' frequencies change behind 100 tokens, too. Phi 4 gives no text to read again: it raises instead
    of answering wrongly."""
    model, options = families.build(model_type)[0], {"tokens": 10, "eos_token_id": None}
    for tokens in families.TEXTS:
        cache, ids = exact(model, moments="current"), prompt(tokens)[0]
        if tokens < families.LONGEST_SHORT and not (READS_AGAIN and model_type == "phimoe"):
            with pytest.raises(RuntimeError, match=r"reads 1 of 101 tokens: cache\.reset\(\)"):
                generate(model, ids, cache, **options)
            continue
        got = generate(model, ids, cache, **options)
        wanted = generate(model, ids, DynamicCache(config=model.config), **options)
        assert torch.equal(got.sequences, wanted.sequences)
        assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-3
        assert cache.get_seq_length() == tokens + 9
        assert cache.stats().decisions > 0
    assert UNUSED not in caplog.text


def test_the_model_reads_its_last_token_alone() -> None:
    """Phi 4's does where it drops a cache, and goes on without the text."""
    model = phi()
    prepare = type(model).prepare_inputs_for_generation

    def drop(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        made = prepare(self, input_ids, **kwargs)
        return made if input_ids.shape[1] <= 62 else {**made, "input_ids": input_ids[:, -1:], "position_ids": None}

    cache = exact(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "prepare_inputs_for_generation", drop)
        with pytest.raises(RuntimeError, match=r"of 62 tokens.*reads 1 of 63 tokens: cache\.reset\(\)"):
            generate(model, TEXT, cache, tokens=6)
    assert cache.get_seq_length() == 62
    cache.reset()
    text = prompt(63)[0]
    got = generate(model, text, cache, tokens=3)
    assert torch.equal(got.sequences, generate(model, text, None, tokens=3).sequences)


def test_a_cache_that_the_model_drops(caplog: pytest.LogCaptureFixture) -> None:
    """A cache that was built without the model, and that the model drops, gives one warning, with the way out."""
    model = phi()
    for _ in range(2):
        cache = QAdACache(config=model.config, threshold=1.0, moments="current")
        got = generate(model, TEXT, cache, tokens=6)
        assert cache.get_seq_length() == 62
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{UNUSED} phi3 model does not use" in said
    assert "original_max_position_embeddings (62)" in said
    assert torch.equal(got.sequences, generate(model, TEXT, None, tokens=6).sequences)
    caplog.clear()
    warn_once.cache_clear()
    cache, text = QAdACache(config=model.config, threshold=1.0, moments="current"), prompt(70)[0]
    with torch.no_grad():
        model(text[:, :-1], **pass_cache(cache))
    got = generate(model, text, cache, tokens=6)
    assert torch.equal(got.sequences, generate(model, text, None, tokens=6).sequences)
    assert cache.get_seq_length() == 75
    assert not caplog.records


def test_a_model_that_leaves_it_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A model that leaves the cache out of its inputs, for whatever reason, gets one warning."""
    model = tiny()
    prepare = type(model).prepare_inputs_for_generation

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        return {**prepare(self, *args, **kwargs), **pass_cache(None)}

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", without)
    generate(model, TEXT, exact(model), tokens=3)
    assert caplog.text.count(UNUSED) == len(caplog.records) == 1
    assert "original_max_position_embeddings" not in caplog.text


def test_a_custom_function_that_leaves_it_out(caplog: pytest.LogCaptureFixture) -> None:
    def answer(model: PreTrainedModel, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return model(input_ids).logits.argmax(dim=-1)

    model = tiny()
    for _ in range(2):
        generate(model, TEXT, exact(model), tokens=3, custom_generate=answer)
    assert caplog.text.count(UNUSED) == len(caplog.records) == 1


@pytest.mark.parametrize("how", ["given", "config"])
def test_use_cache_is_false(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """`generate` then gives any cache the whole text at every step but the first, which masks may show."""
    model, options = tiny(), {"use_cache": False} if how == "given" else {}
    model.generation_config.use_cache = how != "config"
    cache = exact(model)
    generate(model, TEXT, cache, tokens=1, **options)
    assert cache.get_seq_length() == 60
    assert not caplog.records
    with suppress(ValueError):  # of the oldest transformers' masks
        generate(model, TEXT, exact(model), tokens=6, **options)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "use_cache=False, by which it does not use the cache" in said[0]


def test_the_newest_name() -> None:
    """Older transformers pass `cache=` on to attention and read without it: there it is refused with their name."""
    cache = exact(model := tiny())
    told = pytest.raises(TypeError, match=f"no keyword cache=: .* {CACHE}=$")
    with torch.no_grad(), nullcontext() if CACHE == "cache" else told:
        model(TEXT, cache=cache)
        assert cache.get_seq_length() == 60


def encoder_decoder() -> PreTrainedModel:
    sizes: dict[str, Any] = {"vocab_size": 97, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return BartForConditionalGeneration(BartConfig(**sizes, eos_token_id=None)).eval()


OTHERS = {
    "without attention": lambda: RwkvForCausalLM(RwkvConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2)).eval(),
    "encoder and decoder": encoder_decoder,
    "that drops caches": lambda: tiny("phi3", original_max_position_embeddings=50),
    "of the same config": lambda: tiny(seed=1),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_model(kind: str) -> None:
    """Refused before it could leave the cache out."""
    cache = exact(tiny())
    with pytest.raises(RuntimeError, match=r"another model.*: build one QAdACache per model"):
        generate(OTHERS[kind](), TEXT, cache, tokens=3)
    assert cache.get_seq_length() == 0


class Guidance(LogitsProcessor):
    """Asks a cache for its length, and runs the model without it."""

    def __init__(self, model: PreTrainedModel, cache: QAdACache) -> None:
        self.model, self.cache = model, cache

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        assert self.cache.get_seq_length()
        self.model(input_ids)
        return scores


USES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("llama", {}),
    "sampled": ("llama", {"do_sample": True, "num_return_sequences": 2}),
    "beams": ("llama", {"num_beams": 3}),
    "chunks": ("llama", {"prefill_chunk_size": 16}),
    "last token alone in a chunk": ("llama", {"prefill_chunk_size": 59}),
    "guidance": ("llama", {"guidance_scale": 1.5}),
    "lookup": ("llama", {"prompt_lookup_num_tokens": 3}),
    "sliding first": ("gemma3", {}),
    "linear first": ("qwen3_next", {}),
    "nothing to serve": ("mistral_sliding", {}),
    "phi below its length": ("phi3", {"original_max_position_embeddings": 500}),
}


@pytest.mark.parametrize("use", USES)
def test_ordinary_use(use: str, caplog: pytest.LogCaptureFixture) -> None:
    family, options = USES[use]
    sizes = {name: options[name] for name in options if name.startswith("original")}
    model = tiny(family, **sizes)
    cache = exact(model)
    caplog.clear()  # of a cache that serves no layer
    for text in (TEXT, torch.cat([TEXT, prompt(9, seed=2)[0]], dim=1)):
        cache.reset()
        generate(model, text, cache, tokens=4, **{name: options[name] for name in options.keys() - sizes.keys()})
        assert cache.get_seq_length() > 60
    assert UNUSED not in caplog.text


def test_other_caches_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    """Assistants, processors and calls of the user that run the model, or others, without the cache."""
    model, other = tiny(), tiny(seed=3)
    cache, spare = exact(model), exact(model)
    for assistant in (other, model):
        generate(model, TEXT, cache, tokens=6, assistant_model=assistant)
        cache.reset()
    generate(model, TEXT, cache, tokens=3, logits_processor=[Guidance(model, cache)])
    forced(model, prompt(20, seed=2)[0], [7, 1], cache)
    for _ in range(2):
        assert spare.get_seq_length() == 0  # asked, and never given to anybody
        forced(model, TEXT, [50, 1], DynamicCache(config=model.config))
        generate(model, TEXT, None, tokens=3)
        generate(model, TEXT, copy.deepcopy(spare), tokens=3)
        with torch.no_grad():
            model(TEXT, use_cache=False)
    assert UNUSED not in caplog.text


def test_attention_to_images_is_none_of_the_caches(caplog: pytest.LogCaptureFixture) -> None:
    """Idefics attends to images' keys before the first layer that caches, by modules of its decoder's config."""
    vision = {"embed_dim": 16, "image_size": 32, "patch_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"vocab_size": 97, "additional_vocab_size": 0, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "cross_layer_interval": 2, "use_resampler": False}
    config = IdeficsConfig(**sizes, vision_config=vision | {"intermediate_size": 24}, eos_token_id=None, pad_token_id=0)
    model = IdeficsForVisionText2Text._from_config(config).eval()
    told = {"pixel_values": torch.randn(1, 1, 3, 32, 32), "image_attention_mask": torch.ones(1, 60, 1).long()}
    cache = exact(model, moments="current")
    generate(model, TEXT, cache, tokens=4, **told)
    assert cache.get_seq_length() == 63
    assert UNUSED not in caplog.text
