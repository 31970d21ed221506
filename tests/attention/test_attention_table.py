"""Models find our function in transformers' table in front of every implementation, whoever put that there."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, exact, forced, generate, logits_of, prompt, tiny
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from qada_cache import QAdACache, restore_attention

pytestmark = pytest.mark.usefixtures("clean_tables")

SPLIT = [120, 5, 22, 1]  # a prompt, a short and a long turn, single tokens


def doubled(calls: list[int]) -> Callable:
    """Attention whose outputs are halved, so that it is told from others."""

    def attention(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        calls.append(query.shape[2])
        out, weights = AttentionInterface._global_mapping["original"](module, query, *args, **kwargs)
        return 0.5 * out, weights

    return attention


@pytest.mark.parametrize("how", ["register", "own entry"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_users_own_entry_reads_the_prompt(how: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "original", AttentionInterface._global_mapping["sdpa"])
    calls: list[int] = []

    def register() -> None:
        if how == "register":
            AttentionInterface.register("sdpa", doubled(calls))
        else:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = doubled(calls)

    model, ids = tiny(), prompt(100)[0]
    if when == "before":
        register()
    cache = exact(model, moments="current")
    if when == "after":
        register()
    calls.clear()
    got = forced(model, ids, [100], cache)
    assert calls == [100, 100]
    restore_attention(model)
    assert torch.equal(got, forced(model, ids, [100], DynamicCache(config=model.config)))


def test_others_that_wrap_what_they_find() -> None:
    """An entry of theirs that calls ours, which calls the model's own."""
    model, ids = tiny(), prompt(150)[0]
    wanted = forced(model, ids, SPLIT, DynamicCache(config=model.config))
    cache = exact(model)
    found, calls = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def around(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        return found(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = around
    got = forced(model, ids, SPLIT, cache)
    assert len(calls) == 2
    assert (got - wanted).abs().max() < 1e-4
    restore_attention(model)
    assert torch.equal(forced(model, ids, SPLIT, DynamicCache(config=model.config)), wanted)


def test_each_call_gets_its_own_eager_attention() -> None:
    """A file may have several functions, for images and for text, and hands one of them to the look-up."""
    model = tiny(attention="eager")
    module = model.model.layers[0].self_attn
    query, key = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)

    def other(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return 0.5 * modeling_llama.eager_attention_forward(*args, **kwargs)[0], None

    exact(model, moments="current")
    wanted, _ = modeling_llama.eager_attention_forward(module, query, key, key, None, scaling=0.3)
    for default, factor in ((other, 0.5), (modeling_llama.eager_attention_forward, 1.0)):
        attention = ALL_ATTENTION_FUNCTIONS.get_interface("eager", default)
        assert torch.equal(attention(module, query, key, key, None, scaling=0.3)[0], factor * wanted)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_file_with_a_table_of_its_own(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", own := AttentionInterface())
    model, ids = tiny(attention=attention), prompt(150)[0]
    wanted = forced(model, ids, SPLIT, DynamicCache(config=model.config))
    for how in ({"model": model}, {"config": model.config}):
        cache = QAdACache(**how, threshold=1.0, moments="current", **SMALL)
        assert (forced(model, ids, SPLIT, cache) - wanted).abs().max() < 1e-4
        restore_attention(model)
        assert type(own) is AttentionInterface
        assert torch.equal(forced(model, ids, SPLIT, DynamicCache(config=model.config)), wanted)


def test_models_that_look_an_entry_up_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that look up their attention in the table themselves, as older remote code does, are served."""

    def look_up(self: Any, name: str, default: Callable) -> Callable:
        return self.get(name, default) if name == "eager" else self[name]

    monkeypatch.setattr(AttentionInterface, "get_interface", look_up)
    for attention in ("sdpa", "eager"):
        model, ids = tiny(attention=attention), prompt(150)[0]
        wanted = forced(model, ids, SPLIT, DynamicCache(config=model.config))
        assert (forced(model, ids, SPLIT, exact(model)) - wanted).abs().max() < 1e-4


def test_the_tables_are_as_they_were_when_no_model_is_left() -> None:
    tables = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    before = [(type(table), dict(table), dict(table._local_mapping)) for table in tables]
    first, second = tiny(), tiny(attention="eager")
    for model in (first, second, first):
        exact(model, moments="current")
    restore_attention(first)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before[0][1]["sdpa"]
    ids = prompt(60)[0]
    forced(second, ids, [50, 1], exact(second, moments="current"))
    restore_attention(second)
    assert [(type(table), dict(table), dict(table._local_mapping)) for table in tables] == before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_cache_of_a_restored_model_says_so(attention: str) -> None:
    model, ids = tiny(attention=attention, num_hidden_layers=1), prompt(150)[0]
    replica, cache = copy.deepcopy(model), exact(model, moments="current")
    forced(model, ids[:, :100], [100], cache)
    restore_attention(model)
    for used in (model, replica):
        with pytest.raises(RuntimeError, match=f"was restored after this QAdACache was built .to '{attention}'"):
            forced(used, ids[:, 100:], [50], cache)
    again = exact(model, moments="current")
    wanted = forced(model, ids, [100, 50], DynamicCache(config=model.config))
    assert (forced(model, ids, [100, 50], again) - wanted).abs().max() < 1e-4


LOADED = """
import sys
import torch

model = torch.load(sys.argv[1], weights_only=False)
ids = torch.load(sys.argv[2])
assert not any(name.startswith("qada") for name in sys.modules)
with torch.no_grad():
    first = model(ids, use_cache=True).logits
    from qada_cache import QAdACache
    from qada_cache.versions import pass_cache
    cache = QAdACache(model, threshold=1.0, moments="current", sink_tokens=4, local_tokens=20)
    second = torch.cat([model(part, **pass_cache(cache)).logits for part in ids.split([100, 50], dim=1)], dim=1)
torch.save([first, second], sys.argv[2])
"""


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_pickled_model_carries_nothing_of_ours(attention: str, tmp_path: Path) -> None:
    """Into a process that has not imported us; it serves a cache that is built there."""
    model, ids = tiny(attention=attention), prompt(150)[0]
    wanted = forced(model, ids, [150], DynamicCache(config=model.config))
    cache = exact(model, moments="current")
    generate(model, ids, cache, tokens=3)
    torch.save(model, tmp_path / "model.pt")
    torch.save(ids, tmp_path / "tensors.pt")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", LOADED, str(tmp_path / "model.pt"), str(tmp_path / "tensors.pt")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = torch.load(tmp_path / "tensors.pt")
    torch.testing.assert_close(first, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(second, wanted, rtol=0, atol=1e-4)


def test_continuous_batching_goes_on_beside_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with keys that are not ours comes to the model's own attention as it was made."""
    model = tiny()
    exact(model, moments="current")
    got: list[Any] = []
    monkeypatch.setitem(
        AttentionInterface._global_mapping, "paged|eager", lambda *args, **kwargs: got.append((args, kwargs))
    )
    key = torch.zeros(1, 2, 3, 8)
    ALL_ATTENTION_FUNCTIONS.get_interface("paged|eager", print)(model, key, key, key, None, cache=5, scaling=1.0)
    ((args, kwargs),) = got
    assert args[0] is model
    assert kwargs["cache"] == 5


def test_two_of_ours_on_one_table() -> None:
    """Caches of two models under different names, in turn."""
    models = [tiny(), tiny(attention="eager", seed=1)]
    ids = prompt(100)[0]
    wanted = [logits_of(generate(model, ids, DynamicCache(config=model.config), tokens=5)) for model in models]
    caches = [exact(model) for model in models]
    for model, cache, logits in zip(models, caches, wanted, strict=True):
        torch.testing.assert_close(logits_of(generate(model, ids, cache, tokens=5)), logits, rtol=0, atol=1e-4)
