"""Models whose config names frequencies that depend on the length, and that have others: moments go by what they do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import prompt, tiny
from test_rotation import SCHEMES
from torch import Tensor
from transformers import DynamicCache, HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM, PreTrainedModel

from eval import families
from qada_cache import KeyMoments, PrefixStore, QAdACache
from qada_cache.key_moments import defaults
from qada_cache.key_moments.rotation import FREQUENCIES_BY_LENGTH
from qada_cache.versions import pass_cache

LONGEST = 256  # positions of these models; behind them frequencies of the type "dynamic" change


def hunyuan(**changes: Any) -> PreTrainedModel:
    """A fixed `alpha` changes its frequencies, the same for all lengths."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.35}
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "alpha": 1000.0}
    config = HunYuanDenseV1Config(**sizes, max_position_embeddings=LONGEST, rope_parameters=rope, **changes)
    torch.manual_seed(0)
    return HunYuanDenseV1ForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def changing(scheme: str) -> PreTrainedModel:
    return tiny(rope_parameters=dict(SCHEMES[scheme]), max_position_embeddings=LONGEST)


def read_turned(model: PreTrainedModel, bulk: int) -> Tensor:
    """The first layer's mean key `[kv_heads, dim]` of one token at all positions of a bulk, each by itself, float64.
    The sequence has 128 tokens more: sinks before the bulk, and a window."""
    positions, cache = torch.cat([torch.arange(16, 16 + bulk), torch.tensor([bulk + 127])]), DynamicCache()
    with torch.no_grad():
        model(torch.full((len(positions), 1), 7), position_ids=positions[:, None], **pass_cache(cache))
    return cache.layers[0].keys[:-1, :, 0].double().mean(dim=0)


MADE: dict[str, Any] = {
    "hunyuan": hunyuan,
    "phimoe": lambda: families.build("phimoe")[0],
    "phi3": lambda: families.build("phi3")[0],
    **{scheme: lambda scheme=scheme: changing(scheme) for scheme in FREQUENCIES_BY_LENGTH},
}


@pytest.mark.parametrize("name", MADE)
def test_moments_turn_as_the_model_does(name: str) -> None:
    """Keys of one token, in a short text and far behind any change."""
    model = MADE[name]()
    if name == "hunyuan" and model.model.rotary_emb.rope_type == "dynamic":
        pytest.skip("older transformers change these frequencies behind the model's positions")
    made = KeyMoments.collect(model, prompt=torch.full((60,), 7), progress=False)
    for bulk in (40, 1500):
        wanted, got = read_turned(model, bulk), made.at(bulk)[0][0]
        got = got * (wanted.norm() / got.norm() if name == "phimoe" else 1.0)  # it also scales keys of long texts
        assert (got - wanted).norm() < 1e-4 * wanted.norm()
    assert made.origin["frequencies change as known"] == (name not in ("hunyuan", "phimoe"))


def test_a_model_keeps_the_frequencies_that_it_had() -> None:
    model = changing("dynamic")
    had = model.model.rotary_emb.inv_freq.clone()
    KeyMoments.collect(model, prompt=prompt(60)[0], progress=False)
    assert torch.equal(model.model.rotary_emb.inv_freq, had)


@pytest.mark.parametrize("scheme", ["default", *FREQUENCIES_BY_LENGTH])
def test_kept_files_of_before(scheme: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are collected again if frequencies depend on the length: nobody had looked how the model does it."""
    model = changing(scheme)
    QAdACache(model)
    (path,) = folder.iterdir()
    made = KeyMoments.load(path)
    replace(made, origin={key: value for key, value in made.origin.items() if "frequencies" not in key}).save(path)
    old = path.read_bytes()
    monkeypatch.setattr(defaults, "_remembered", {})
    QAdACache(model)
    assert (path.read_bytes() == old) == (scheme == "default")
    given = QAdACache(model, moments=path)  # what users name stays valid
    assert given.options.other_moments is not None


def test_a_store_goes_by_what_the_model_does(tmp_path: Path) -> None:
    model, store = hunyuan(), PrefixStore(tmp_path / "store")
    if model.model.rotary_emb.rope_type == "dynamic":
        with pytest.raises(NotImplementedError, match="hunyuan_v1_dense with rotary frequencies"):
            store.cache(model, [1, 2, 3], moments="current")
        return
    ids = prompt(700)[0]
    cache = QAdACache(model, threshold=1.0, moments="current")
    with torch.no_grad():
        wanted = model(ids, **pass_cache(cache)).logits[:, -1]
        store.keep(cache, ids)
        again = store.cache(model, ids, threshold=1.0, moments="current")
        held = again.get_seq_length()
        assert held > 500
        torch.testing.assert_close(model(ids[:, held:], **pass_cache(again)).logits[:, -1], wanted, rtol=0, atol=1e-3)
