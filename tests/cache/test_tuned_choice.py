"""A model's tuned choice, kept by `qada tune`, is taken if it is asked for, by this model's caches alone, and named."""

from __future__ import annotations

import copy
import inspect
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SMALL, prompt, tiny
from readable import readable_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from qada_cache import PrefixStore, QAdACache, StaticHeads, prepare, tuned_choice
from qada_cache.files import tensor_file
from qada_cache.models.sharding import HeadShard
from qada_cache.said_once import warn_once
from qada_cache.state import CONDITIONS, DECIDING, LAID_OUT, THRESHOLD, TOKEN_THRESHOLD
from qada_cache.versions import pass_cache

HEADS = StaticHeads(torch.tensor([[True, False, False, True], [False, True, False, False]]))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    warn_once.cache_clear()
    return tmp_path / "home" / "moments"


def kept(model: Any, token_threshold: float = 8.0, **under: Any) -> Path:
    options = replace(QAdACache(model, **under).options, token_threshold=token_threshold)
    return tuned_choice.keep(model, options, {"any": "thing"})


def goes_by(cache: QAdACache) -> tuple[float, bool]:
    assert ("(tuned)" in repr(cache)) == cache.options.tuned
    return cache.options.token_threshold, cache.options.tuned


def tuned(model: Any, **given: Any) -> QAdACache:
    return QAdACache(model, tuned=True, **given)


def test_a_file_in_the_folder_changes_nothing_unasked(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    before = QAdACache(model).options
    kept(model, threshold=0.5)
    assert goes_by(QAdACache(model)) == (TOKEN_THRESHOLD, False)
    after = QAdACache(model).options
    assert [getattr(after, name) for name in CONDITIONS] == [getattr(before, name) for name in CONDITIONS]
    assert goes_by(QAdACache(model, tuned=False)) == (TOKEN_THRESHOLD, False)
    assert QAdACache(model).options.threshold == THRESHOLD
    prepare(model, kernels="torch")
    assert caplog.text == ""


def test_taken_and_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    path = kept(model)
    assert goes_by(tuned(model)) == (8.0, True)
    assert "token threshold 8 (tuned)," in repr(tuned(model))
    assert goes_by(tuned(tiny(), audit_every=3, offloading=False, device_budget=0.5)) == (8.0, True)
    assert kept(model, 2.0) == path  # one choice a model
    assert goes_by(tuned(model)) == (2.0, True)
    assert kept(model, threshold=0.5) == path
    assert goes_by(tuned(model)) == (8.0, True)
    assert tuned(model).options.threshold == 0.5
    assert "threshold 0.5, token threshold 8 (tuned)," in repr(tuned(model))
    prepare(model, kernels="torch", tuned=True)  # tries options before moments are there
    assert caplog.text == ""


@pytest.mark.parametrize("make", [QAdACache, prepare])
@pytest.mark.parametrize("given", [{"threshold": 0.9}, {"token_threshold": 3}], ids=["threshold", "token_threshold"])
def test_thresholds_beside_it_are_refused(make: Callable[..., Any], given: dict[str, Any], folder: Path) -> None:
    """Thresholds beside `tuned=True` are refused before anything is read."""
    said = r"tuned=True takes token_threshold and threshold from qada tune, and .* was given: leave out one"
    with pytest.raises(ValueError, match=said):
        make(tiny(), tuned=True, **given)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("other", "missing"),
    [
        (lambda: tiny(seed=1), "qada tune has kept none"),
        (lambda: tiny(dtype=torch.bfloat16), "qada tune has kept none"),
        (lambda: None, "a cache built with config= has no weights to find it by"),
    ],
    ids=["weights", "dtype", "config alone"],
)
def test_asked_for_and_not_kept_is_said_once(
    other: Callable[[], Any], missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    kept(model)
    given = {"model": model} if (model := other()) is not None else {"config": tiny().config, "moments": "current"}
    for _ in range(2):
        assert goes_by(QAdACache(tuned=True, **given)) == (TOKEN_THRESHOLD, False)
    said = f"of this llama model is not used: {missing}. This cache goes by token_threshold=4.4; run qada tune, or give"
    assert caplog.text.count(said) == 1


def test_weights_that_changed_are_another_model() -> None:
    model = tiny()
    kept(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01)
    assert goes_by(tuned(model)) == (TOKEN_THRESHOLD, False)


@pytest.mark.parametrize(
    "given",
    [
        {"sketch_bits": 4},
        {"local_tokens": 64},
        {"sink_tokens": 4},
        {"group_rule": "head"},
        {"moments": "current"},
        {"moments": "random-tokens"},
        {"update_moments": False},
        {"criterion": HEADS},
        {"criterion": "dense"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_caches_that_decide_otherwise_do_without(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Caches with other options than the tuned choice was measured with do not use it, and warn once. Those with the
    same options use it."""
    model = tiny()
    kept(model)
    for _ in range(2):
        assert goes_by(tuned(model, **given)) == (TOKEN_THRESHOLD, False)
    assert caplog.text.count("of this llama model is not used: it was measured with ") == 1
    assert f"{next(iter(given))}=" in caplog.text
    caplog.clear()
    assert goes_by(QAdACache(model, **given)) == (TOKEN_THRESHOLD, False)
    kept(model, **given)
    assert tuned(model, **given).options.tuned
    assert caplog.text == ""


def test_fewer_bits_than_it_was_measured_with(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    kept(model, bulk_bits=8)
    assert tuned(model, bulk_bits=16).options.tuned
    assert goes_by(tuned(model, bulk_bits=4)) == (TOKEN_THRESHOLD, False)
    assert "it was measured with bulk_bits=8, and this cache has bulk_bits=4" in caplog.text


@pytest.mark.usefixtures("default_bits")
@pytest.mark.parametrize(("measured", "bits"), [(16, 8), (8, 8), (4, 4)])
def test_bits_left_open_are_the_fewer_ones(measured: int, bits: int) -> None:
    """They are the choice or the default; a cache that was built with more keeps them."""
    model = tiny(head_dim=32)
    kept(model, bulk_bits=measured)
    assert (tuned(model).options.bulk_bits, *goes_by(tuned(model))) == (bits, 8.0, True)
    assert tuned(model, bulk_bits=16).options.bulk_bits == 16
    assert tuned(model, bulk_bits=8).options.bulk_bits == 8
    assert goes_by(tuned(model, bulk_bits=8)) == (8.0, True)


def test_prompts_are_read_as_tuned_unless_a_cache_says_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store's caches leave it out, as they leave few bits out; what others have read so it does not keep."""
    model, store = tiny(), PrefixStore(tmp_path / "prompts")
    kept(model, prefill_threshold=12.0)
    assert tuned(model).options.prefill_threshold == 12.0
    assert tuned_choice.describe(tuned(model).options) == "token_threshold=8, prefill_threshold=12"
    assert QAdACache(model).options.prefill_threshold == 0.0
    for own in (0, 4.4):
        cache = tuned(model, prefill_threshold=own)
        assert (cache.options.prefill_threshold, *goes_by(cache)) == (own, 8.0, True)
    cache = store.cache(model, [1, 2, 3], tuned=True)
    assert (cache.options.prefill_threshold, *goes_by(cache)) == (0.0, 8.0, True)
    cache = tuned(model, bulk_bits=16)
    with torch.no_grad():
        model(prompt(30)[0], **pass_cache(cache))
    with pytest.raises(NotImplementedError, match=r"\(prefill_threshold=12\).*: use prefill_threshold=0"):
        store.keep(cache, prompt(30)[0])
    assert cache.fork(threshold=0.5).options.prefill_threshold == 12.0
    assert caplog.text == ""


def test_every_option_that_outputs_depend_on_is_a_condition() -> None:
    """The others are named here, so that a new one is a condition until it is said not to be."""
    keywords = {name for name in inspect.signature(QAdACache).parameters if name not in ("model", "config", "tuned")}
    assert keywords == {*DECIDING, *LAID_OUT}
    assert not set(DECIDING) & set(LAID_OUT)
    same = {"offloading", "device_budget", "audit_every", "kernels", "progress", "cuda_graph"}
    assert keywords - set(CONDITIONS) == same
    (measured,) = [tensor_file.read(kept(tiny()), tuned_choice.KIND)[1]]
    assert measured["under"].keys() | measured["chosen"].keys() == set(CONDITIONS)


def rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Another choice in the file, as whole as the one that was there."""

    def write(path: Path) -> None:
        _, state = tensor_file.decode(path.read_bytes(), tuned_choice.KIND, path)
        change(state)
        tensor_file.write(path, tuned_choice.KIND, {}, state)

    return write


def of_format(version: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
        save_file({}, path, {**about, "version": version})

    return write


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "is not a safetensors file, or is truncated"),
        (lambda path: path.write_bytes(b""), "is not a safetensors file, or is truncated"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"8.0", b"9.0")), "was altered after it was written"),
        (of_format("99"), "has format version '99', this qada-cache reads 4: upgrade qada-cache"),
        (of_format("1"), "has format version '1', this qada-cache reads 4: make it again"),
        (lambda path: path.chmod(0o666), "others than you can write to"),
        (lambda path: path.parent.chmod(0o777), "others than you can write to"),
        (rewritten(lambda state: state["chosen"].pop("token_threshold")), "does not hold what this version keeps"),
        (rewritten(lambda state: state["under"].pop("sketch_bits")), "does not hold what this version keeps"),
        (rewritten(lambda state: state.update(under=None)), "does not hold what this version keeps"),
        (
            rewritten(lambda state: state["chosen"].update(token_threshold="8")),
            "token_threshold must be a number, got str",
        ),
        (rewritten(lambda state: state["chosen"].update(token_threshold=-1)), "must be finite and not negative"),
        (rewritten(lambda state: state["chosen"].update(threshold=2)), "threshold must be in [0, 1], got 2"),
        (rewritten(lambda state: state["chosen"].pop("prefill_threshold")), "does not hold what this version keeps"),
        (rewritten(lambda state: state["chosen"].pop("threshold")), "does not hold what this version keeps"),
        (rewritten(lambda state: state.update(chosen=None)), "does not hold what this version keeps"),
    ],
)
def test_files_that_do_not_count(harm: Callable[[Path], Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    path = kept(model)
    harm(path)
    assert goes_by(tuned(model)) == (TOKEN_THRESHOLD, False)
    assert said in caplog.text
    assert "run qada tune, or give token_threshold and threshold by hand" in caplog.text


def test_the_file_is_the_users_alone_and_holds_no_code() -> None:
    path = kept(tiny())
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir() if "part" in file.name] == []
    content = path.read_bytes()
    json.loads(content[8:])  # safetensors' header, and no tensors


def test_a_model_is_known_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path in other words, a copy elsewhere."""
    model = readable_model(tmp_path / "model")
    kept(model)
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    for name in ("model", "./copy", str(tmp_path / "copy")):
        assert goes_by(tuned(LlamaForCausalLM.from_pretrained(name, local_files_only=True))) == (8.0, True)


def test_split_models_do_without(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    kept(model)
    cache = QAdACache(model)
    asked = replace(cache.options, tuned=True)
    assert tuned_choice.apply_tuned(asked, cache._shared.model).tuned
    split = replace(cache._shared.model, shard=HeadShard(0, 2, None, torch.device("cpu")))
    assert not tuned_choice.apply_tuned(asked, split).tuned
    assert "this process has a part of them" in caplog.text


def test_copies_forks_and_files(tmp_path: Path) -> None:
    """A copy is the same, a fork only if it decides alike, and a file holds the number as if it had been given."""
    model = tiny()
    kept(model)
    cache = tuned(model)
    with torch.no_grad():
        model(prompt(300)[0], **pass_cache(cache))
    assert goes_by(copy.deepcopy(cache)) == (8.0, True)
    assert goes_by(cache.fork(audit_every=2)) == (8.0, True)
    assert goes_by(cache.fork(token_threshold=2.0)) == (2.0, False)
    assert goes_by(cache.fork(threshold=0.5)) == (8.0, False)
    with pytest.raises(TypeError, match=r"fork takes .*, not tuned"):
        cache.fork(tuned=False)
    cache.save(tmp_path / "cache.safetensors")
    kept(model, 2.0)
    assert goes_by(QAdACache.load(tmp_path / "cache.safetensors", model)) == (8.0, False)
    assert goes_by(cache) == (8.0, True)  # as it was built


def test_wrong_words_are_refused() -> None:
    with pytest.raises(TypeError, match="tuned must be a bool, got str"):
        QAdACache(tiny(), tuned="yes", **SMALL)  # type: ignore[arg-type]
