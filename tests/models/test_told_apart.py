"""Checkpoints whose weights a state dict does not have: told apart by other ways, or nothing of them is kept."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from models import SMALL, prompt, tiny
from packed_layers import (
    Elsewhere,
    InArray,
    InBytes,
    InExtraState,
    InFunction,
    InList,
    InObject,
    InSlots,
    Kept,
    Opaque,
    Unsaid,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from qada_cache import PrefixStore, QAdACache
from qada_cache.key_moments import defaults
from qada_cache.models import identity
from qada_cache.models.asking import UntoldWeightsError
from qada_cache.said_once import warn_once
from qada_cache.versions import pass_cache

EXACT: dict[str, Any] = {**SMALL, "moments": "current", "threshold": 1.0}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(defaults, "_remembered", {})
    warn_once.cache_clear()
    return tmp_path / "home" / "moments"


SHOWN = (Kept, InObject, InSlots, InArray, InBytes, InFunction, InList, InExtraState, Elsewhere, Unsaid)


def replaced(kind: type[Kept], seed: int) -> PreTrainedModel:
    """Models that differ in the weights of keys alone."""
    model, other = tiny(), tiny(seed=seed)
    for layer, theirs in zip(model.model.layers, other.model.layers, strict=True):
        layer.self_attn.k_proj = kind(theirs.self_attn.k_proj)
    return model.eval()


def dynamic_int8(seed: int, dtype: torch.dtype = torch.qint8) -> PreTrainedModel:
    """Embeddings and norms are the same."""
    model, other = tiny(), tiny(seed=seed)
    model.load_state_dict({name: weight for name, weight in other.state_dict().items() if "proj" in name}, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=dtype)


def attribute(seed: int) -> PreTrainedModel:
    """A plain tensor in the place of a linear layer's parameter."""
    model, other = tiny(), tiny(seed=seed)
    linear = model.model.layers[0].self_attn.k_proj
    del linear.weight
    linear.weight = other.model.layers[0].self_attn.k_proj.weight.detach()
    return model


def hooked(seed: int) -> PreTrainedModel:
    """Its state dict leaves most out."""
    model = tiny()
    model.model.layers.load_state_dict(tiny(seed=seed).model.layers.state_dict())

    def drop(module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        for name in [name for name in state if "proj" in name]:
            del state[name]

    model.register_state_dict_post_hook(drop)
    return model


KINDS: dict[str, Callable[[int], PreTrainedModel]] = {
    "dynamic int8": dynamic_int8,
    "dynamic float16": partial(dynamic_int8, dtype=torch.float16),
    "plain attribute": attribute,
    "state dict hook": hooked,
    "offloaded": lambda seed: cpu_offload(tiny(seed=seed), CPU),
    **{kind.__name__: partial(replaced, kind) for kind in SHOWN},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*quant.*deprecated", "ignore:TypedStorage")


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_are_told_apart(kind: str) -> None:
    make = KINDS[kind]
    models = [make(0), make(0), make(1)]
    one, same, other = map(identity.sample, models)
    assert one == same == identity.sample(models[0])
    assert identity.is_same(one, same)
    assert not identity.is_same(one, other)
    assert identity.digest(models[0]) != identity.digest(models[2])


def read(model: PreTrainedModel, ids: Tensor, cache: QAdACache) -> None:
    with torch.no_grad():
        model(ids, **pass_cache(cache))


@pytest.mark.parametrize("kind", ["dynamic int8", "InArray"])
def test_nothing_is_handed_to_another_checkpoint(kind: str, tmp_path: Path) -> None:
    one, other = map(KINDS[kind], (0, 1))
    first, second = (QAdACache(model, moments="random-tokens").options.other_moments for model in (one, other))
    assert not torch.equal(first.mean, second.mean)
    ids, store = prompt(300)[0], PrefixStore(tmp_path / "store")
    cache = QAdACache(one, **EXACT)
    read(one, ids, cache)
    assert store.keep(cache, ids) == 300
    assert store.cache(KINDS[kind](0), ids, **EXACT).get_seq_length() == 299
    assert store.cache(other, ids, **EXACT).get_seq_length() == 0
    cache.save(tmp_path / "cache")
    assert QAdACache.load(tmp_path / "cache", KINDS[kind](0)).get_seq_length() == 300
    with pytest.raises(ValueError, match="another model"):
        QAdACache.load(tmp_path / "cache", other)


def test_weights_that_cannot_be_told(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is kept or found under their name, and words say so."""
    model, ids = replaced(Opaque, 0), prompt(300)[0]
    with pytest.raises(UntoldWeightsError, match=r"layers.0.self_attn.k_proj keeps some where they cannot be read"):
        identity.sample(model)
    first = QAdACache(model).options.other_moments
    assert QAdACache(model).options.other_moments is first  # of this very model
    assert QAdACache(replaced(Opaque, 1)).options.other_moments is not first
    assert not folder.exists()
    assert "key moments of this model are not kept" in caplog.text
    store, cache = PrefixStore(tmp_path / "store"), QAdACache(model, **EXACT)
    read(model, ids, cache)
    assert store.keep(cache, ids) == 0
    assert "prompts of this model are not kept" in caplog.text
    cache.save(tmp_path / "cache")
    assert "load with config= alone" in caplog.text
    with pytest.raises(ValueError, match=r"cannot be told .* give config=model.config instead"):
        QAdACache.load(tmp_path / "cache", model)
    with pytest.raises(ValueError, match="its weights are not"):
        QAdACache.load(tmp_path / "cache", tiny())
    assert QAdACache.load(tmp_path / "cache", config=model.config).get_seq_length() == 300


def test_weights_in_a_function(folder: Path) -> None:
    """A layer without a weight, whose replaced `forward` holds it, is refused by its name."""
    model = tiny()
    linear = model.model.layers[0].mlp.up_proj
    weight = linear.weight
    linear.weight, linear.forward = None, lambda states: nn.functional.linear(states, weight)
    with pytest.raises(UntoldWeightsError, match=r"layers.0.mlp.up_proj"):
        identity.sample(model)


def test_offloaded_weights_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """A model whose weights are offloaded, to the CPU or a disk, has the whole model's digest."""
    whole = identity.digest(tiny())
    assert identity.digest(cpu_offload(tiny(), CPU)) == whole
    assert identity.digest(disk_offload(tiny(), tmp_path / "disk", CPU)) == whole
    assert identity.digest(cpu_offload(tiny(seed=1), CPU)) != whole


def test_adapters_count() -> None:
    """Models differ by their active adapters, as peft's layers name them: weights of all are there in any case."""
    model = tiny()
    plain, layer = identity.sample(model), model.model.layers[0].self_attn.k_proj
    layer.merged_adapters, layer.active_adapters, layer.scaling = [], ["one"], {"one": 2.0}
    one = identity.sample(model)
    layer.active_adapters = ["other"]
    other = identity.sample(model)
    layer.disable_adapters = True
    disabled = identity.sample(model)
    assert not any(identity.is_same(*pair) for pair in ((plain, one), (one, other), (other, disabled)))


def test_hooks_hear_nothing() -> None:
    """Layers that are called for a sample run no hooks of users."""
    model, calls = dynamic_int8(0), []
    for module in model.modules():
        module.register_forward_hook(lambda *args: calls.append(args))
    assert identity.sample(model) == identity.sample(dynamic_int8(0))
    assert calls == []


@torch.no_grad()
def test_plain_models_keep_their_identity() -> None:
    """Files that earlier versions kept are found."""
    model = tiny()
    for weight in model.parameters():
        weight.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape))
    model.model.norm.weight.fill_(1 / 3)
    model.model.layers[0].to(torch.bfloat16)
    assert hashlib.sha256("".join(identity.sample(model)).encode()).hexdigest()[:16] == "09c14f45466a5ba6"
