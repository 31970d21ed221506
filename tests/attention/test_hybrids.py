"""Models whose layers keep states beside keys and values: whole passes go through, interrupted ones are noticed."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import FAMILIES, exact, forced, generate, logits_of, prompt, tiny
from transformers import DynamicCache, MambaConfig, MambaForCausalLM, PreTrainedModel

from qada_cache import QAdACache, watched
from qada_cache.state.layer import QAdALayer
from qada_cache.stats import count_layer_bytes
from qada_cache.versions import CACHE, pass_cache

_MAMBA = {"num_hidden_layers": 4, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
_MAMBA2 = {**_MAMBA, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    # Attention and Mamba in every layer, in every other, and in different ones.
    "falcon_h1": ("FalconH1", {**_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 64, "head_dim": 8}),
    "zamba2": (
        "Zamba2",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "hybrid_layer_ids": [1, 3],
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "num_key_value_heads": 4,
            "adapter_rank": 8,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **_MAMBA,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 9,
            "expert_layer_offset": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": ("Bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "num_hidden_layers": 4,
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
            "use_mamba_kernels": False,
        },
    ),
    "lfm2": ("Lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
}


# Every layer but the first with keys or states of its own.
LATER = {"falcon_h1": (1,), "zamba2": (1, 2, 3), "jamba": (1, 2, 3), "bamba": (1, 2, 3), "nemotron_h": (1, 2)}
LATER["lfm2"] = (1, 2)


def model_of(family: str) -> PreTrainedModel:
    with patch.dict(FAMILIES, {family: HYBRIDS[family]}):
        return tiny(family, initializer_range=0.2)


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("family", HYBRIDS)
def test_whole_passes(family: str) -> None:
    """Several turns in calls of many, few and single tokens, then generation of more rows: as with DynamicCache."""
    model, text = model_of(family), prompt(170)[0]
    cache, plain = exact(model), DynamicCache(config=model.config)
    got, wanted = (forced(model, text, [120, 30, 1], used) for used in (cache, plain))
    assert (got - wanted).abs().max() < 1e-3
    cache.reset()
    rows = torch.cat([text, text.flip(1)])
    wanted = generate(model, rows, DynamicCache(config=model.config), tokens=12)
    got = generate(model, rows, cache, tokens=12)
    assert torch.equal(got.sequences, wanted.sequences)
    assert (logits_of(got) - logits_of(wanted)).abs().max() < 1e-3


@pytest.mark.parametrize("family", HYBRIDS)
def test_stats_count_states(family: str) -> None:
    """`stats()` counts the bytes of states of linear layers, beside keys and values."""
    model = model_of(family)
    cache, plain = exact(model), DynamicCache(config=model.config)
    for used in (cache, plain):
        forced(model, prompt(8)[0], [8], used)
    for layer, same in zip(cache.layers, plain.layers, strict=True):
        if not isinstance(layer, QAdALayer):
            states = [getattr(same, name, None) or {} for name in ("conv_states", "recurrent_states")]
            held = [
                getattr(same, "keys", None),
                getattr(same, "values", None),
                *states[0].values(),
                *states[1].values(),
            ]
            assert count_layer_bytes(layer) == (sum(each.nbytes for each in held if each is not None), 0)


@pytest.mark.parametrize("family", HYBRIDS)
def test_inference_mode(family: str) -> None:
    """A cache works in inference mode, whose tensors do not count the writes to them."""
    model, text = model_of(family), prompt(160)[0]
    with torch.inference_mode():
        got, wanted = (
            torch.cat([model(part, **pass_cache(used)).logits for part in text.split([150, 7, 1, 1, 1], dim=1)], dim=1)
            for used in (exact(model), DynamicCache(config=model.config))
        )
    assert (got - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(("family", "layer"), [(family, layer) for family in HYBRIDS for layer in LATER[family]])
def test_interrupted_pass(family: str, layer: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a pass is interrupted before a layer, after others have written their states, every later pass raises until a
    reset."""
    model, text = model_of(family), prompt(150 + 2 * tokens)[0]
    cache = exact(model)
    forced(model, text[:, :150], [150], cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[layer], "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forced(model, text[:, 150 : 150 + tokens], [tokens], cache)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"interrupted.*reset\(\)"):
            forced(model, text[:, 150 : 150 + tokens], [tokens], cache)
    cache.reset()
    got, wanted = (forced(model, text, [150, 1], used) for used in (cache, DynamicCache(config=model.config)))
    assert (got - wanted).abs().max() < 1e-3


def interrupt_last_layer(model: PreTrainedModel, cache: QAdACache, place: str, tokens: int, patch: Any) -> None:
    """The next pass of so many tokens ends in the last layer: before it writes a state, between two, or before keys."""
    layers = [layer for layer in cache.layers if any(getattr(layer, "is_conv_states_initialized", {}).values())]
    module, single = sys.modules[type(model).__module__], tokens == 1
    name = "causal_conv1d_update" if single else "causal_conv1d_fn"  # one writes the state, the other follows on that
    convolve, calls = getattr(module, name), []

    def convolved(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) < len(layers):
            return convolve(*args, **kwargs)
        if place == "between states":
            convolve(*args, **kwargs)
        raise KeyboardInterrupt

    if place == "before keys":
        patch.setattr(layers[-1], "update", interrupt)
    elif place == "between states" or single:
        patch.setattr(module, name, convolved)
    else:
        patch.setattr(layers[-1], "update_conv_state", interrupt)


PLACES = {family: ["before states", "between states"] for family in HYBRIDS}
PLACES["lfm2"] = ["before states"]  # it has but one
PLACES["falcon_h1"] = PLACES["zamba2"] = ["before states", "between states", "before keys"]


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize(("family", "place"), [(family, place) for family in HYBRIDS for place in PLACES[family]])
def test_interrupted_last_layer(family: str, place: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers before it have written what they had to, and it has begun; so says a copy made then, too."""
    model, text = model_of(family), prompt(150 + 2 * tokens)[0]
    cache = exact(model)
    forced(model, text[:, :150], [150], cache)
    with monkeypatch.context() as patch:
        interrupt_last_layer(model, cache, place, tokens, patch)
        with pytest.raises(KeyboardInterrupt):
            forced(model, text[:, 150 : 150 + tokens], [tokens], cache)
    for used in (copy.deepcopy(cache), cache, cache):
        with pytest.raises(RuntimeError, match=r"interrupted.*reset\(\)"):
            forced(model, text[:, 150 : 150 + tokens], [tokens], used)
    cache.reset()
    got, wanted = (forced(model, text, [150, 1], used) for used in (cache, DynamicCache(config=model.config)))
    assert (got - wanted).abs().max() < 1e-3


def test_interrupted_where_the_last_layer_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written nothing then, and no earlier layer tells that it should have."""
    model, text = tiny("qwen3_next", layer_types=["full_attention", "linear_attention"]), prompt(160)[0]
    cache = exact(model)
    forced(model, text[:, :150], [150], cache)
    with monkeypatch.context() as patch:
        patch.setattr(watched, "count_writes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forced(model, text[:, 150:], [10], cache)
    with pytest.raises(RuntimeError, match=r"interrupted.*reset\(\)"):
        forced(model, text[:, 150:], [10], cache)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_interrupted_last_layer_like_the_first_alone(family: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So says the next pass, which has come to the first layer by then."""
    linear = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    model = model_of(family) if family in HYBRIDS else tiny(family, **linear)
    text, cache = prompt(150 + 2 * tokens)[0], exact(model)
    forced(model, text[:, :150], [150], cache)
    with monkeypatch.context() as patch:
        interrupt_last_layer(model, cache, "before states", tokens, patch)
        with pytest.raises(KeyboardInterrupt):
            forced(model, text[:, 150 : 150 + tokens], [tokens], cache)
    with pytest.raises(RuntimeError, match=r"interrupted.*reset\(\)"):
        forced(model, text[:, 150 : 150 + tokens], [tokens], cache)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("family", HYBRIDS)
def test_interrupted_after_the_last_layer(family: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer holds the tokens, and nothing is wrong with going on; nor after copies and changes of rows."""
    model, text = model_of(family), prompt(150 + 3 * tokens)[0]
    cache, plain = exact(model), DynamicCache(config=model.config)
    for used in (cache, plain):
        forced(model, text[:, :150], [150], used)
        with monkeypatch.context() as patch:
            patch.setattr(model.lm_head, "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                forced(model, text[:, 150 : 150 + tokens], [tokens], used)
    cache = copy.deepcopy(cache)
    for verb in (lambda: None, lambda: cache.reorder_cache(torch.tensor([0]))):
        verb()
        start = cache.get_seq_length()
        got, wanted = (forced(model, text[:, start : start + tokens], [tokens], used) for used in (cache, plain))
        assert (got - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("family", ["falcon_h1", "zamba2"])
def test_layers_of_attention_and_mamba_are_said_to_be_left_alone(family: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = QAdACache(model_of(family))
    assert cache.stats().layers == ()
    assert f"{family} holds attention and states of another kind in the same layers" in caplog.text
    assert "no full-attention layers" not in caplog.text


def test_a_model_without_attention() -> None:
    """A model without attention answers as with transformers' cache; our cache then counts no tokens."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.35}
    model, ids = MambaForCausalLM(MambaConfig(**sizes)).eval(), prompt(20)[0].clamp(max=63)
    if CACHE not in inspect.signature(model.forward).parameters:
        pytest.skip("this transformers has another name for this model's cache")
    cache = QAdACache(model)
    got, wanted = (generate(model, ids, used, tokens=6) for used in (cache, DynamicCache(config=model.config)))
    assert torch.equal(got.sequences, wanted.sequences)
    assert torch.equal(logits_of(got), logits_of(wanted))
    assert cache.stats().tokens == cache.find_last_beginning(9) == len(cache.take_snapshots()) == 0
    assert repr(cache).startswith("QAdACache(mamba, 0 of 2 layers")
