"""Models whose layers differ in kind or size, and those that are not served."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    SMALL,
    exact,
    forced,
    generate,
    logits_of,
    prompt,
    tiny,
    uneven,
)
from test_families import UNSUPPORTED
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GotOcr2Config,
    GotOcr2ForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    xLSTMConfig,
)

from qada_cache import KeyMoments, PrefixStore, QAdACache, StaticHeads, prepare
from qada_cache.attention import support
from qada_cache.state.layer import QAdALayer
from qada_cache.versions import CACHE, CACHE_NAMES


@pytest.mark.parametrize("length", [9, 150])
@pytest.mark.parametrize("how", ["model", "config"])
@pytest.mark.parametrize("family", UNSUPPORTED)
def test_unsupported_models_raise(family: str, how: str, length: int) -> None:
    model, (error, message) = tiny(family), UNSUPPORTED[family]
    ids = prompt(length)[0]
    wanted = generate(model, ids, DynamicCache(config=model.config))
    if family == "gptj" and model._can_set_attn_implementation():  # since transformers 5.24
        got = generate(
            model, ids, QAdACache(**{how: model if how == "model" else model.config}, threshold=1.0, **SMALL)
        )
        assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-4
        return
    if family == "gptj" and how == "config":  # a config does not say how its model computes attention: only use does
        error, message = RuntimeError, "gptj model computes attention in a way .*use DynamicCache"
    with pytest.raises(error, match=message):
        generate(model, ids, QAdACache(**{how: model if how == "model" else model.config}, threshold=1.0, **SMALL))
    # The way out that the message names works, on the same model.
    got = generate(model, ids, DynamicCache(config=model.config))
    assert torch.equal(logits_of(got), logits_of(wanted))


def test_one_layer_of_lost_keys_is_noticed() -> None:
    """With one layer no later layer can notice: the first call is exact, the next one raises."""
    model = tiny("jetmoe", num_hidden_layers=1)
    with pytest.raises(RuntimeError, match="jetmoe model computes attention in a way"):
        generate(model, prompt(40)[0], exact(model), tokens=3)


def gemma4(**changes: Any) -> PreTrainedModel:
    """Whose full-attention layers may have heads of another size and number than its sliding ones."""
    options = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 12}
    options |= {"vocab_size_per_layer_input": 97, "layer_types": ["sliding_attention", "full_attention"] * 2}
    options |= {"hidden_size_per_layer_input": 8, "eos_token_id": None, "initializer_range": 0.35}
    config = Gemma4TextConfig(**options, **changes)
    torch.manual_seed(0)
    return Gemma4ForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def test_gemma4_with_and_without_shared_layers() -> None:
    """Its config lists how every layer shares, which is no sharing where none of them reuses another's keys."""
    for shared in (0, 2):
        model = gemma4(global_head_dim=8, num_global_key_value_heads=2, num_kv_shared_layers=shared)
        ids = prompt(60)[0]
        wanted = generate(model, ids, DynamicCache(config=model.config))
        cache = exact(model)
        got = generate(model, ids, cache)
        assert sum(isinstance(layer, QAdALayer) for layer in cache.layers) == 2 - shared // 2
        assert cache.stats().layers == (1, 3)
        assert torch.equal(got.sequences, wanted.sequences)
        torch.testing.assert_close(logits_of(got), logits_of(wanted), rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["model", "config"])
def test_layers_of_two_head_sizes(how: str, tmp_path: Path) -> None:
    model = gemma4(global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True)
    given = {how: model if how == "model" else model.config}
    moments, ids = ("current+random-tokens" if how == "model" else "current"), prompt(150)[0]
    wanted = generate(model, ids, DynamicCache(config=model.config))
    cache = QAdACache(**given, threshold=1.0, moments=moments, **SMALL)
    got = generate(model, ids, cache)
    assert torch.equal(got.sequences, wanted.sequences)
    assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-4
    assert {tuple(cache.layers[index].store.near_keys.shape[1::2]) for index in (1, 3)} == {(1, 16)}
    adaptive = QAdACache(**given, threshold=0.2, moments=moments, group_rule="head", **SMALL)
    generate(model, ids, adaptive)
    assert 0 < adaptive.stats().sparsity < 1
    adaptive.save(tmp_path / "cache")
    assert QAdACache.load(tmp_path / "cache", **given).get_seq_length() == adaptive.get_seq_length()
    table = StaticHeads(torch.ones(4, 1, dtype=torch.bool))  # by the KV heads of the layers that are served
    static = QAdACache(**given, criterion=table, token_threshold=0, **SMALL)
    assert torch.equal(generate(model, ids, static).sequences, wanted.sequences)
    prepare(model, moments="current")


def test_full_attention_layers_that_differ_in_their_heads(tmp_path: Path) -> None:
    """Tables are as wide as for the layer that has most heads, and the others leave the rest of a row."""
    kv_heads, ids = {0: 1, 1: 2, 2: 4}, prompt(150)[0]
    model = uneven(kv_heads)
    wanted = generate(model, ids, DynamicCache(config=model.config))
    assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-4)
    assert_close(logits_of(generate(model, ids, exact(model))), logits_of(wanted))

    cache = QAdACache(model, threshold=0.12, group_rule="head", **SMALL)
    generate(model, ids, cache)
    cache.save(tmp_path / "cache")
    stats = QAdACache.load(tmp_path / "cache", model).stats()
    assert not stats.local_share.isnan().any()
    assert (~stats.kv_local_share.isnan()).sum(dim=1).tolist() == [1, 2, 4]
    assert 0 < stats.kv_sparsity <= stats.sparsity < 1
    moments = KeyMoments.collect(model, prompt="random-tokens", progress=False)
    for layer, count in kv_heads.items():  # of each its own
        (found,) = moments.find_layer(layer, [64], torch.device("cpu"), sizes=(count, 8))
        assert [list(part.shape) for part in found] == [[1, count, 8], [1, count, 8, 8]]
        assert moments.mean[0, layer, :count].all()
        assert not moments.mean[0, layer, count:].any()
    table = torch.zeros(3, 4, dtype=torch.bool)  # by query heads
    table[:, 2:] = True
    static = QAdACache(
        model, criterion=StaticHeads(table), token_threshold=0, moments="current", group_rule="head", **SMALL
    )
    generate(model, ids, static)
    assert static.stats().local_share.tolist() == [[1, 1, 0, 0]] * 3
    prepare(model, moments="current")


def test_a_decoder_in_a_model_that_reads_images() -> None:
    """Only the part that is the decoder has to go by the name of its attention."""
    text = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "model_type": "qwen2"}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    config = GotOcr2Config(text_config=text, vision_config=vision, image_token_id=96)
    torch.manual_seed(0)
    model = GotOcr2ForConditionalGeneration._from_config(config).eval()
    ids = prompt(150)[0]
    wanted = generate(model, ids, DynamicCache(config=config), eos_token_id=None)
    cache = exact(model)
    got = generate(model, ids, cache, eos_token_id=None)
    assert torch.equal(got.sequences, wanted.sequences)
    assert cache.stats().decisions > 0


def test_models_without_attention(caplog: pytest.LogCaptureFixture) -> None:
    """A cache serves models without attention, whose configs have no number of heads."""
    config = MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8)
    model = MambaForCausalLM._from_config(config).eval()
    cache = QAdACache(model)
    assert "mamba has no full-attention layers" in caplog.text
    with torch.no_grad():
        wanted = model(prompt(40)[0]).logits
        name = CACHE_NAMES[0] if CACHE_NAMES[0] == CACHE else CACHE_NAMES[-1]  # this model's before 5.24
        assert torch.allclose(model(prompt(40)[0], **{name: cache}).logits, wanted, atol=1e-5)


@pytest.mark.parametrize("layers", [3, 8])
def test_states_that_a_model_keeps_itself(layers: int) -> None:
    """They are no part of any cache, so that copies, files and other conversations would go on from the wrong ones."""
    config = RecurrentGemmaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4)
    model = RecurrentGemmaForCausalLM._from_config(config).eval()
    with pytest.raises(NotImplementedError, match="recurrent_gemma keeps its states in the model"):
        QAdACache(model)


@pytest.mark.parametrize("kind", [MiniMaxConfig, xLSTMConfig])
def test_models_with_caches_of_their_own(kind: type[PreTrainedConfig]) -> None:
    """They ignore any other, or raise at it."""
    config = kind()
    config._attn_implementation = "sdpa"
    with pytest.raises(NotImplementedError, match=f"{config.model_type} takes no cache but its own: give it none"):
        QAdACache(config=config)


@pytest.mark.parametrize("name", support.LOOPED)
def test_models_that_add_layers(name: str) -> None:
    """Their first pass copies layers for further runs, which a cache would not know."""
    if name not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    config = CONFIG_MAPPING[name]()
    config._attn_implementation = "sdpa"
    with pytest.raises(
        NotImplementedError, match=f"{name} runs some layers several times.*use transformers.DynamicCache"
    ):
        QAdACache(config=config)


@pytest.mark.parametrize("lengths", [(90,), (90, 61)])
def test_layers_beside_ours_that_pick_blocks(lengths: tuple[int, ...]) -> None:
    """They cut our layers' mask by queries, and look for a token's block at its position."""
    if "minimax_m3_vl_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 32, "dense_intermediate_size": 32, "rotary_dim": 8}
    sizes |= {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16, "index_topk_blocks": 2}
    types = {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense"] * 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["minimax_m3_vl_text"](**sizes, **types)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    ids, mask = prompt(*lengths)
    text, mask = torch.cat([ids, ids], dim=1), torch.cat([mask, torch.ones_like(mask)], dim=1)
    wanted = forced(model, text, [90, 30, 1], DynamicCache(config=model.config), mask)
    cache = exact(model)  # with moments of another prompt
    real = mask.bool()
    torch.testing.assert_close(forced(model, text, [90, 30, 1], cache, mask)[real], wanted[real], rtol=0, atol=1e-4)
    assert cache.stats().decisions > 0


@pytest.mark.parametrize("bits", [16, 8])
def test_attending_twice_to_one_layers_keys(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is stored with both values that it gives, and selected for both."""
    model, ids = tiny("diffllama", max_position_embeddings=2048), prompt(1300)[0]
    wanted = generate(model, ids, DynamicCache(config=model.config), tokens=6)
    told = {"threshold": 1 - 1e-9, "moments": "current", "token_threshold": 1e-9, "bulk_bits": bits, **SMALL}
    cache = QAdACache(model, **told)
    got = generate(model, ids, cache, tokens=6)
    assert cache.stats().sketch_read_bytes > 0
    assert torch.allclose(logits_of(got), logits_of(wanted), atol=1e-3 if bits == 16 else 0.5)
    cache.save(tmp_path / "cache")
    loaded, text = QAdACache.load(tmp_path / "cache", model), wanted.sequences
    assert torch.equal(forced(model, text[:, -1:], [1], loaded), forced(model, text[:, -1:], [1], cache))
    store = PrefixStore(tmp_path / "store")
    store.keep(cache, text)
    again = store.cache(model, text, **told)
    assert again.get_seq_length() > 1200
    if bits == 16:
        wanted = forced(model, text, [text.shape[1]], DynamicCache(config=model.config))
        assert torch.allclose(
            forced(model, text[:, again.get_seq_length() :], [1], again)[:, -1], wanted[:, -1], atol=1e-3
        )
    monkeypatch.setattr(support, "attends_twice", lambda model_type: False)
    with pytest.raises(NotImplementedError, match="diffllama attends more than once to one layer's keys"):
        generate(model, prompt(40)[0], exact(model, moments="current"))
