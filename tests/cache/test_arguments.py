"""Arguments that a cache cannot be built of: one clear exception each, and nothing switched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import tiny
from transformers import LlamaConfig, PreTrainedModel

from qada_cache import KeyMoments, QAdACache, StaticHeads


def moments(layers: int, kv_heads: int, dim: int, model_type: str = "llama", **fields: Any) -> KeyMoments:
    covariance = torch.eye(dim).expand(1, layers, kv_heads, dim, dim).clone()
    mean = torch.zeros(1, layers, kv_heads, dim)
    return KeyMoments(mean, covariance, lengths=(84,), tokens=100, model_type=model_type, prompt="test", **fields)


ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"threshold": -0.1}, ValueError, r"threshold must be in \[0, 1\], got -0.1"),
    ({"threshold": 1.01}, ValueError, r"threshold must be in \[0, 1\], got 1.01"),
    ({"threshold": math.nan}, ValueError, r"threshold must be in \[0, 1\], got nan"),
    ({"threshold": "0.5"}, TypeError, "threshold must be a number .* got str"),
    ({"threshold": True}, TypeError, "threshold must be a number .* got bool"),
    ({"threshold": torch.tensor(0.5)}, TypeError, "threshold must be a number .* got Tensor"),
    ({"local_tokens": 16}, ValueError, r"local_tokens \(16\) .* must exceed sink_tokens \(16\)"),
    ({"sink_tokens": 300}, ValueError, r"local_tokens \(128\) .* must exceed sink_tokens \(300\)"),
    ({"sink_tokens": -1}, ValueError, "sink_tokens must be from 0 to 65536, got -1"),
    ({"local_tokens": -1, "sink_tokens": -2}, ValueError, "sink_tokens must be from 0 to 65536, got -2"),
    ({"local_tokens": 2**40, "sink_tokens": 2**16 + 1}, ValueError, "from 0 to 65536, got 65537"),
    ({"local_tokens": 128.0}, TypeError, "local_tokens must be an int, got float"),
    ({"sink_tokens": True}, TypeError, "sink_tokens must be an int, got bool"),
    ({"criterion": "eager"}, ValueError, "unknown criterion 'eager': use one of gaussian, .* or StaticHeads"),
    ({"criterion": 1}, TypeError, "criterion must be a str or StaticHeads, got int"),
    ({"criterion": torch.ones(2, 4).bool()}, TypeError, "criterion must be a str or StaticHeads, got Tensor"),
    ({"criterion": StaticHeads(torch.ones(3, 4).bool())}, ValueError, r"\[3, 4\].* needs \[2, 4\] or \[2, 2\]"),
    ({"criterion": StaticHeads(torch.ones(2, 8).bool())}, ValueError, r"\[2, 8\].* needs \[2, 4\] or \[2, 2\]"),
    ({"moments": moments(3, 2, 8)}, ValueError, r"of a llama model with .* \[3, 2, 8\]; this .* has \[2, 2, 8\]"),
    ({"moments": moments(2, 4, 8)}, ValueError, r"\[2, 4, 8\]; this llama model has \[2, 2, 8\]"),
    ({"moments": moments(2, 2, 8, "qwen2")}, ValueError, "of a qwen2 model .* this llama model"),
    (
        {"moments": moments(2, 2, 8, rope={"rope_parameters": {"rope_theta": 5.0}})},
        ValueError,
        "whose rope_parameters is .*5.0.* this model's is",
    ),
    ({"moments": 3}, TypeError, "moments must be .*path.* got (int|NoneType)"),
    ({"moments": None}, TypeError, "moments must be .*path.* got (int|NoneType)"),
    ({"moments": "nowhere.safetensors"}, FileNotFoundError, "no qada-moments file at nowhere.safetensors"),
    ({"group_rule": "all"}, ValueError, "unknown group_rule 'all': use one of any, head"),
    ({"group_rule": None}, ValueError, "unknown group_rule None: use one of any"),
    ({"moments": ()}, TypeError, "moments must be .*path.* got (int|NoneType)"),
    ({"moments": "current+nowhere.safetensors"}, FileNotFoundError, "no qada-moments file at nowhere.safetensors"),
    ({"moments": "current+current"}, ValueError, 'two moments must be "current" and one of another prompt'),
    ({"moments": ("wiki", "current")}, ValueError, 'two moments must be "current" and one of another prompt'),
    ({"moments": ("current", moments(2, 4, 8))}, ValueError, r"\[2, 4, 8\]; this llama model has \[2, 2, 8\]"),
    ({"update_moments": 1}, TypeError, "update_moments must be a bool, got int"),
    ({"offloading": "cpu"}, TypeError, "offloading must be a bool, got str"),
    ({"device_budget": -1}, ValueError, r"device_budget must be 0 .*bytes .*share .*'?\"auto\", got -1"),
    ({"device_budget": 1}, ValueError, "device_budget must be .*a share of the bulk .a float.*, got 1$"),
    ({"device_budget": 1.5}, ValueError, "device_budget must be .*, got 1.5"),
    ({"device_budget": math.nan}, ValueError, "device_budget must be .*, got nan"),
    ({"device_budget": "1GiB"}, ValueError, "device_budget must be .*, got '1GiB'"),
    ({"device_budget": True}, TypeError, "device_budget must be .*, got bool"),
    ({"device_budget": None}, TypeError, "device_budget must be .*, got NoneType"),
    ({"sinks": 4}, TypeError, "unexpected keyword argument 'sinks'"),
]


@pytest.fixture(scope="module")
def shared() -> PreTrainedModel:
    """A tiny model for tests that end before it is used."""
    return tiny()


@pytest.mark.parametrize(("argument", "error", "message"), ARGUMENTS, ids=lambda value: str(value)[:40])
def test_bad_arguments(shared: PreTrainedModel, argument: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QAdACache(shared, **argument)
    assert shared.config._attn_implementation == "sdpa"  # nothing was switched


@pytest.mark.parametrize("table", [torch.ones(2, 4), torch.ones(4).bool(), [[True]], None], ids=str)
def test_static_heads_of_another_kind(table: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a bool tensor \[layers, heads\], got"):
        StaticHeads(table)


def test_what_a_cache_is_built_for(shared: PreTrainedModel) -> None:
    keys = torch.zeros(1, 2, 3, 8)
    for wrong in ([(keys, keys)], iter([(keys, keys)]), ((keys, keys),)):  # nn.DataParallel's gather
        with pytest.raises(TypeError, match=r"takes a transformers model or config=model.config, got \w+"):
            QAdACache(wrong)
    with pytest.raises(TypeError, match=r"first, and a config by its name: .*got LlamaConfig"):
        QAdACache(shared.config)
    with pytest.raises(TypeError, match="either a model or config"):
        QAdACache()
    with pytest.raises(TypeError, match="either a model or config"):
        QAdACache(shared, config=shared.config)
    with pytest.raises(TypeError, match="PreTrainedConfig, got dict"):
        QAdACache(config=shared.config.to_dict())
    with pytest.raises(TypeError, match="positional"):
        QAdACache(shared, 0.5)
    assert shared.config._attn_implementation == "sdpa"
    config = LlamaConfig(num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"belongs to no model .*pass model.config, or the model"):
        QAdACache(config=config)
    assert config._attn_implementation is None
