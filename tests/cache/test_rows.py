"""Verbs of rows, by all that `DynamicCache` takes or refuses: the same rows, or a refusal that changes nothing."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from models import FAMILIES, SMALL, exact, forced, prompt, tiny
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from qada_cache import QAdACache
from qada_cache.versions import CACHE

LONG = torch.long
ROWS = 3
ALTERNATING = ["full_attention", "sliding_attention"] * 2
ARGUMENTS: dict[str, list[Any]] = {
    "reorder_cache": [
        torch.tensor([2, 0, 1]), torch.tensor([2, 0]), torch.tensor([1, 1, 1, 0]), torch.tensor([], dtype=LONG),
        torch.tensor(1), torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor([]), torch.tensor([-1]), torch.tensor([3]), torch.tensor([0, 9]), torch.tensor([[1, 0]]),
        torch.tensor([1, 0], dtype=torch.int16), torch.tensor([True, False, True]), torch.tensor([1.0, 0.0]),
        [1, 0], [], slice(0, 2), 1, None, numpy.array([1, 0]),
    ],
    "batch_repeat_interleave": [
        0, 1, 2, numpy.int64(2), torch.tensor(2), torch.tensor([2]), torch.tensor(0), torch.tensor([1, 0, 2]),
        -1, True, 1.0, "a", None, [1, 0, 2], torch.tensor(2.0), torch.tensor([1, 0]), torch.tensor([[1, 0, 2]]),
    ],
    "batch_select_indices": [
        torch.tensor([2, 0]), torch.tensor([1]), torch.tensor([-1, 0]), torch.tensor([], dtype=LONG),
        torch.tensor([0, 2], dtype=torch.int32), torch.tensor([True, False, True]), torch.tensor([False] * ROWS),
        torch.tensor([1, 0, 1], dtype=torch.uint8), [1, 0], [-1], [], (2, 0), (), [True, False, True], range(2),
        slice(0, 2), slice(None, None, 2), slice(5, 9), numpy.array([1, 0]), numpy.array([True, False, True]),
        torch.tensor([]), torch.tensor([True, False]), torch.tensor([True] * 4), torch.tensor([3]),
        torch.tensor([-4]), torch.tensor([0, 9]), torch.tensor([1, 0], dtype=torch.int16), torch.tensor([1.0]),
        slice(None, None, -1), "a",
    ],
}  # fmt: skip
CASES = [(verb, argument) for verb, arguments in ARGUMENTS.items() for argument in arguments]
# Taken by `DynamicCache`, whose tensors then have another number of dimensions.
BROKEN = [torch.tensor(1), torch.tensor(True), 1, -1, True, None, numpy.int64(1), torch.tensor([[1, 0]]), [[0, 1]]]


@pytest.fixture(scope="module", params=["llama", "gemma3", "alternating"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "alternating":
        return tiny("gemma3", layer_types=ALTERNATING, num_hidden_layers=4)
    return tiny(request.param)


@pytest.fixture(scope="module")
def text() -> Tensor:
    return prompt(60, 60, 60)[0]


@pytest.fixture
def caches(model: PreTrainedModel, text: Tensor, request: pytest.FixtureRequest) -> tuple[QAdACache, DynamicCache]:
    pair = exact(model), DynamicCache(config=model.config)
    for cache in pair:
        forced(model, text[:, :50], [50], cache)
    return pair


@pytest.fixture(autouse=True)
def byte_masks() -> Iterator[None]:
    """Torch warns of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "indexing with dtype torch.uint8", UserWarning)
        yield


def outcome(act: Callable[[], Any]) -> bool:
    """Whether it was done; False: refused."""
    try:
        act()
    except Exception:
        return False
    return True


def check_same(model: PreTrainedModel, text: Tensor, ours: QAdACache, theirs: Cache) -> None:
    """Assert that both caches hold the same tokens, and go on to the same logits."""
    assert [ours.get_seq_length(at) for at in range(len(ours))] == [
        theirs.get_seq_length(at) for at in range(len(ours))
    ]
    if rows := len(theirs.layers[0].keys):  # no model of transformers reads a text of no rows
        new = text[:1, 50:].expand(rows, -1) + torch.arange(rows)[:, None]
        got, wanted = (forced(model, new, [9, 1], cache) for cache in (ours, theirs))
        assert (got - wanted).abs().max() < 1e-3


@pytest.mark.parametrize(("verb", "argument"), CASES, ids=lambda each: repr(each)[:40])
def test_as_dynamic_cache(verb: str, argument: Any, model: PreTrainedModel, text: Tensor, caches: tuple) -> None:
    ours, theirs = caches
    if outcome(lambda: getattr(copy.deepcopy(theirs), verb)(argument)):
        for cache in caches:
            getattr(cache, verb)(argument)
    else:
        with pytest.raises(ValueError, match=rf"{verb} cannot select from 3 rows by .*batch_select_indices ints"):
            getattr(ours, verb)(argument)
    check_same(model, text, ours, theirs)


@pytest.mark.parametrize("argument", BROKEN, ids=repr)
@pytest.mark.parametrize("model", ["llama"], indirect=True)  # refused before any layer is asked
def test_what_is_no_list_of_rows_is_refused(argument: Any, model: PreTrainedModel, text: Tensor, caches: tuple) -> None:
    with pytest.raises(ValueError, match=r"batch_select_indices cannot select from 3 rows by .*no dimension of rows"):
        caches[0].batch_select_indices(argument)
    check_same(model, text, *caches)


@pytest.mark.parametrize("verb", ARGUMENTS)
def test_an_empty_cache_stays_empty(verb: str, model: PreTrainedModel, text: Tensor) -> None:
    """`DynamicCache` does not look at the argument."""
    for argument in (torch.tensor([1, 0]), torch.tensor([7.0]), 2, []):
        pair = exact(model), DynamicCache(config=model.config)
        for cache in pair:
            getattr(cache, verb)(argument)
        got, wanted = (forced(model, text, [50, 9, 1], cache) for cache in pair)
        assert (got - wanted).abs().max() < 1e-3


def test_no_rows(model: PreTrainedModel, text: Tensor, caches: tuple, tmp_path: Path) -> None:
    """All rows have finished: what is left can be asked, copied, kept and used, until `reset` as without rows."""
    ours, theirs = caches
    for cache in caches:
        cache.batch_select_indices(torch.tensor([False] * ROWS))
    ours.save(tmp_path / "none.safetensors")
    for cache in (copy.deepcopy(ours), QAdACache.load(tmp_path / "none.safetensors", model), ours.fork(), ours):
        assert cache.get_seq_length() == theirs.get_seq_length()
        assert cache.is_initialized
        assert cache.stats().tokens == theirs.get_seq_length()
        assert "0 MiB" in str(cache)
        for verb, argument in (
            ("reorder_cache", [0]),
            ("batch_select_indices", [True]),
            ("batch_repeat_interleave", 2),
        ):
            getattr(cache, verb)(torch.tensor(argument))
        with pytest.raises(RuntimeError, match=r"holds 0 rows and was given 3: .*reset"):
            forced(model, text[:, 50:], [10], cache)
        with pytest.raises(RuntimeError, match=r"holds 0 rows and was given 0: .*reset"):
            cache.update(*torch.zeros(2, 0, 2, 1, 8), 0)
        if model.config.model_type == "llama":  # behind sliding windows there is no way back
            cache.crop(0)
            cache.crop(-5)
        assert [layer.get_seq_length() for layer in cache.layers] == [each.get_seq_length() for each in theirs.layers]
        cache.reset()
        got, wanted = (forced(model, text, [50, 10], used) for used in (cache, DynamicCache(config=model.config)))
        assert (got - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("moments", ["current", "random-tokens"])
@pytest.mark.parametrize("bits", [16, 8])
def test_no_rows_of_a_sketch(moments: str, bits: int, text: Tensor, tmp_path: Path) -> None:
    """A cache selects tokens by default, and so has a sketch, here one without rows."""
    model = tiny()
    cache = QAdACache(model, moments=moments, bulk_bits=bits, **SMALL)
    forced(model, text, [60], cache)
    cache.batch_select_indices(torch.tensor([False] * ROWS))
    cache.save(tmp_path / "none.safetensors")
    assert QAdACache.load(tmp_path / "none.safetensors", model).get_seq_length() == cache.get_seq_length()


@pytest.mark.parametrize(("verb", "argument", "rows"), [("batch_select_indices", [-1, 0], [2, 0]),
                                                       ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2])])  # fmt: skip
def test_recurrent_states(verb: str, argument: Any, rows: list[int], text: Tensor) -> None:
    """Transformers' layers of them know one verb of rows."""
    model = tiny("qwen3_next")
    ours, theirs = exact(model), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        forced(model, text[:, :50], [50], cache)
    with pytest.raises(ValueError, match="cannot select"):
        ours.batch_select_indices([3])
    getattr(ours, verb)(argument)
    theirs.reorder_cache(torch.tensor(rows))
    got, wanted = (forced(model, text[rows, 50:], [9, 1], cache) for cache in (ours, theirs))
    assert (got - wanted).abs().max() < 1e-3


def test_another_number_of_rows_changes_no_layer(model: PreTrainedModel, text: Tensor, caches: tuple) -> None:
    """Neither of transformers' own, which may come first."""
    for rows in (1, 2, 4):
        with pytest.raises(RuntimeError, match=f"holds 3 rows and was given {rows}: use batch_repeat_interleave"):
            forced(model, text[:1, :5].expand(rows, -1), [5], caches[0])
    check_same(model, text, *caches)


@pytest.mark.parametrize("count", [3, 0.5, -1.5, None, "a", torch.tensor(-1.0), torch.tensor([-1, -2]), True])
def test_a_refused_crop_changes_no_layer(count: Any, model: PreTrainedModel, text: Tensor, caches: tuple) -> None:
    with pytest.raises((ValueError, TypeError)):
        caches[0].crop(count)
    check_same(model, text, *caches)


def test_a_crop_that_a_later_layer_refuses_changes_no_layer(text: Tensor) -> None:
    """Behind a sliding window there is no way back."""
    model = tiny("gemma3", layer_types=ALTERNATING, num_hidden_layers=4)
    ours, theirs = exact(model), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        forced(model, text[:, :50], [50], cache)
    for count in (-1, -40, -1000):
        with pytest.raises(RuntimeError, match="does not track past states"):
            ours.crop(count)
    check_same(model, text, ours, theirs)


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "mamba"])
def test_linear_layers_refuse_a_crop(family: str, recording: bool, text: Tensor) -> None:
    """Caches with linear layers refuse a crop, also if transformers' would crop a part of their states, and if there
    are no other layers."""
    with patch.dict(FAMILIES, {"mamba": ("Mamba", {"state_size": 4})}):
        model = tiny(family, attention="eager")
    if CACHE not in inspect.signature(model.forward).parameters:
        pytest.skip("this transformers has another name for this model's cache")
    ours, theirs = exact(model), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        forced(model, text[:, :50], [50], cache)
        if recording:
            cache.activate_past_recording()
    for count in (-1, -1000):
        with pytest.raises(RuntimeError, match=r"of linear layers, .*: reset\(\) and read the text again"):
            ours.crop(count)
    got, wanted = (forced(model, text[:, 50:], [9, 1], cache) for cache in (ours, theirs))
    assert (got - wanted).abs().max() < 1e-3
    ours.reset()
    ours.crop(-1)


@pytest.mark.parametrize("count", [0, -1, -1000])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_next"])
def test_an_empty_cache_is_empty_after_a_crop(family: str, count: int, text: Tensor) -> None:
    """New, after `reset`, and where all tokens were cropped away; then it takes a text like any other."""
    model = tiny(family)
    wanted = forced(model, text, [50, 10], DynamicCache(config=model.config))
    new, reset = exact(model), exact(model)
    forced(model, text[:, :30], [30], reset)
    reset.reset()
    caches = [new, reset]
    if family != "qwen3_next":  # its linear layers keep no past
        caches.append(exact(model))
        forced(model, text[:, :9], [9], caches[-1])  # within the sliding window
        caches[-1].crop(-9)
    for cache in caches:
        cache.crop(count)
        assert [layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")] in ([0, 0], [0])
        assert (forced(model, text, [50, 10], cache) - wanted).abs().max() < 1e-3


@pytest.mark.parametrize("verb", ["crop", *ARGUMENTS])
def test_half_a_change_of_transformers_layers_is_none(verb: str, text: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the second of them, of which each has new tensors."""
    model = tiny("gemma3", layer_types=ALTERNATING, num_hidden_layers=4, sliding_window=100)
    ours, theirs = exact(model), DynamicCache(config=model.config)
    for cache in (ours, theirs):
        forced(model, text[:, :50], [50], cache)
    calls: list[Any] = []
    kind, inner = type(ours.layers[1]), "crop" if verb == "crop" else "reorder_cache"
    plain = getattr(kind, inner)

    def fail_at_second(layer: Any, argument: Any) -> None:
        calls.append(layer)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        plain(layer, argument)

    argument = {"crop": -3, "batch_repeat_interleave": 2}.get(verb, torch.tensor([1, 0]))
    with monkeypatch.context() as patch:
        patch.setattr(kind, inner, fail_at_second)
        with pytest.raises(torch.OutOfMemoryError):
            getattr(ours, verb)(argument)
    assert len(calls) == 2
    check_same(model, text, ours, theirs)
