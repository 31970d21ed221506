"""Query energies: what they are, that reading them leaves nothing, and what files keep of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, prompt, tiny
from torch import Tensor, nn
from transformers import AttentionInterface, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from eval import families
from qada_cache import KeyMoments, QAdACache
from qada_cache.files import tensor_file
from qada_cache.key_moments.observing import observe_queries
from qada_cache.versions import pass_cache

pytestmark = pytest.mark.usefixtures("folder")

IDS = prompt(333)[0]


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """Transformers' table of attention functions is afterwards what it was."""
    QAdACache(tiny(), moments="current", token_threshold=0.0)  # our own names are in it
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    yield
    local, everywhere = ALL_ATTENTION_FUNCTIONS._local_mapping, ALL_ATTENTION_FUNCTIONS._global_mapping
    assert local == before[0]
    assert {name: everywhere[name] for name in before[1]} == before[1]
    assert "eager" not in ALL_ATTENTION_FUNCTIONS


def gpt_neox() -> PreTrainedModel:
    """Every fourth of its channels is turned; queries, keys and values come from one projection."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 1024, "initializer_range": 0.35}
    config = GPTNeoXConfig(**sizes, rotary_pct=0.25, bos_token_id=None, eos_token_id=None)
    return GPTNeoXForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def projections(model: PreTrainedModel) -> list[nn.Module]:
    """Each layer's module whose output are its queries before the rotary embedding."""
    if model.config.model_type == "gpt_neox":
        return [layer.attention.query_key_value for layer in model.gpt_neox.layers]
    return [getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj) for layer in model.model.layers]


@contextmanager
def projected(model: PreTrainedModel) -> Iterator[list[list[Tensor]]]:
    """Queries float64 `[tokens, heads, dim]` of every layer, before they are turned, while it reads."""
    config, seen = model.config, [[] for _ in projections(model)]
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads

    def hook(layer: int) -> Any:
        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            queries = output.detach().double().flatten(0, 1)
            seen[layer].append(queries.reshape(len(queries), heads, -1))

        return note

    hooks = [module.register_forward_hook(hook(layer)) for layer, module in enumerate(projections(model))]
    yield seen
    for handle in hooks:
        handle.remove()
    for layer, parts in enumerate(seen):
        seen[layer] = [torch.cat(parts)[..., :dim]]  # of queries, keys and values the first


def partners(model: PreTrainedModel) -> list[int]:
    """The other channel of every channel's pair."""
    found = {"gpt_neox": [2, 3, 0, 1, *range(4, 16)], "glm4": [1, 0, 3, 2, 4, 5, 6, 7]}
    return found.get(model.config.model_type, [4, 5, 6, 7, 0, 1, 2, 3])


MODELS = {
    "llama": tiny,
    "llama-eager": lambda: tiny(attention="eager"),
    "llama-bfloat16": lambda: tiny(dtype=torch.bfloat16),
    "qwen3": lambda: tiny("qwen3"),
    "glm4": lambda: tiny("glm4"),  # pairs of neighbours, in half of the channels
    "gpt_neox": gpt_neox,
}


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_equal_float64(name: str, switched: bool) -> None:
    """A pair's mean square is the same before it is turned as after, wherever it stands."""
    model = MODELS[name]()
    for projection in projections(model):  # random weights make all channels alike
        rows = projection.weight.shape[0]
        unequal = torch.linspace(0, 50, rows).cos() + 1.3
        projection.weight.data.mul_(unequal.view(rows, *[1] * (projection.weight.dim() - 1)))
    if switched:
        cache = QAdACache(model, moments="current", token_threshold=0.0, **SMALL)
        with torch.no_grad():
            model(IDS[:, :50], **pass_cache(cache))
    with projected(model) as seen, torch.no_grad():
        model(IDS)  # by itself: hooks sleep while moments are collected
    made = KeyMoments.collect(model, prompt=IDS, scheme="analytic", progress=False)
    _, kv_heads, dim = made.shape
    assert made.query_energies.shape == made.shape
    assert made.query_energies.dtype == torch.float32
    for layer, (queries,) in enumerate(seen):
        assert len(queries) == IDS.shape[1]
        squares = queries.square().mean(dim=0).unflatten(0, (kv_heads, -1)).mean(dim=1)
        paired = (squares + squares[:, partners(model)]) / 2
        # A turned bfloat16 has 8 bits, each rounded by itself: errors of 333 tokens' squares hardly add up.
        tolerance = 2e-3 if model.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(made.query_energies[layer].double(), paired, rtol=tolerance, atol=0)
        assert not torch.allclose(paired, squares, rtol=0.05)
        assert paired.max() > 1.4 * paired.min()
    assert dim == seen[0][0].shape[-1]


def test_nothing_is_left_after_an_exception() -> None:
    for attention in ("sdpa", "eager"):
        model = tiny(attention=attention)
        before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)

        def fail(layer: int, query: Tensor) -> None:
            raise KeyError(layer)

        with torch.no_grad(), pytest.raises(KeyError), observe_queries(model, fail):
            model(IDS)
        assert before == ALL_ATTENTION_FUNCTIONS._local_mapping
        with torch.no_grad():
            model(IDS)


def test_a_users_own_entry_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own attention function computes while moments are collected, and is in its place afterwards."""
    calls = []

    def own(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        calls.append(args)
        return ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"](*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", own)
    KeyMoments.collect(tiny(), prompt=IDS, progress=False)
    assert ALL_ATTENTION_FUNCTIONS._local_mapping["sdpa"] is own
    assert calls
    monkeypatch.undo()


def test_two_threads_leave_nothing() -> None:
    """Each sees its own model's, and puts back what was there before both."""
    models, seen = (tiny(), tiny(seed=1)), ([], [])

    def note(index: int) -> Any:
        return lambda layer, query: seen[index].append(layer)

    inside, first_is_out = threading.Event(), threading.Event()

    def read() -> None:
        with torch.no_grad(), observe_queries(models[1], note(1)):
            inside.set()
            first_is_out.wait()
            models[1](IDS)

    other = threading.Thread(target=read)
    with torch.no_grad(), observe_queries(models[0], note(0)):
        other.start()
        inside.wait(0.3)  # it does not get there, else it would be the last to put back what it found
        models[0](IDS)
    first_is_out.set()
    other.join()
    assert seen == ([0, 1], [0, 1])


def test_another_models_queries_are_not_seen() -> None:
    seen: list[int] = []
    with torch.no_grad(), observe_queries(tiny(), lambda layer, query: seen.append(layer)):
        tiny(seed=1)(IDS)
    assert seen == []


def test_a_model_that_is_not_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its modeling file has a table of a class of its own; files of its moments hold no energies."""

    class Own(AttentionInterface):
        pass

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Own())
    made = KeyMoments.collect(tiny(), prompt=IDS, progress=False)
    assert made.query_energies is None
    made.save(tmp_path / "moments.safetensors")
    assert "moments.query_energies" not in tensor_file.read(tmp_path / "moments.safetensors", "qada-moments")[0]
    assert KeyMoments.load(tmp_path / "moments.safetensors").query_energies is None


def test_a_file_keeps_them(tmp_path: Path) -> None:
    made = KeyMoments.collect(tiny(), prompt=IDS, progress=False)
    made.save(tmp_path / "moments.safetensors")
    assert torch.equal(KeyMoments.load(tmp_path / "moments.safetensors").query_energies, made.query_energies)


@pytest.mark.parametrize("wrong", [torch.zeros(2, 2, 4), torch.full((2, 2, 8), torch.nan), -torch.ones(2, 2, 8)])
def test_wrong_energies_are_refused(wrong: Tensor) -> None:
    kwargs: dict[str, Any] = {"lengths": (1,), "model_type": "llama", "prompt": "custom", "tokens": 5}
    said = r'query energies must be finite, not negative and \[2, 2, 8\]: give others, or moments="current"'
    with pytest.raises(ValueError, match=said):
        KeyMoments(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8, 8), **kwargs, query_energies=wrong)


@pytest.mark.parametrize("weight", ["kv_a_layernorm.weight", "kv_b_proj.weight"], ids=["latents", "values"])
def test_latents_without_values(weight: str) -> None:
    """A layer whose values are all 0 has energies of its queries alone."""
    model = tiny("deepseek_v3")
    model.model.layers[1].self_attn.get_parameter(weight).data.zero_()
    made = KeyMoments.collect(model, prompt=IDS, progress=False)
    assert made.query_energies[0, 1].gt(made.query_energies[0, 0]).any()
    assert torch.equal(made.query_energies[1, 1], made.query_energies[1, 0])


def test_modules_that_serve_several_layers_of_a_cache() -> None:
    """HRM calls each of its modules in several cycles: a layer of the cache has the queries of its own cycle."""
    model, squares = families.build("hrm_text")[0], []
    made = KeyMoments.collect(model, prompt=IDS[0] % 90, progress=False)
    module = model.model.L_module.layers[0].self_attn
    module.q_proj.register_forward_hook(lambda _, args, output: squares.append(output.square().mean()))
    with torch.no_grad():
        model(IDS % 90)
    sizes = model.config
    cycles = [(high * (sizes.L_cycles + 1) + low) for high in range(sizes.H_cycles) for low in range(sizes.L_cycles)]
    assert len(squares) == len(cycles) > 1
    assert made.query_energies is not None
    energies = made.query_energies[[cycle * sizes.num_layers_per_stack for cycle in cycles]].mean(dim=(1, 2))
    torch.testing.assert_close(energies, torch.stack(squares), rtol=1e-4, atol=0)
