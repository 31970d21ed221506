"""How many files of moments are kept, which of them go, and what a training loop asks for to make none."""

from __future__ import annotations

import ast
import functools
import os
import time
from pathlib import Path

import pytest
import torch
from forked import fork, wait
from models import SMALL, prompt, tiny
from transformers import PreTrainedModel

from qada_cache import KeyMoments, QAdACache, tuned_choice
from qada_cache.key_moments import defaults
from qada_cache.versions import pass_cache

pytestmark = pytest.mark.usefixtures("folder")

DAY = 24 * 3600


def train(model: PreTrainedModel) -> None:
    """One step, to another state of the weights."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.001)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fill(folder: Path, count: int, size: int = 10) -> list[str]:
    """Files of moments by their names, the first the oldest, one day between them."""
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    folder.parent.chmod(0o700)
    made = [f"llama-0123-random-tokens-{index:016x}.safetensors" for index in range(count)]
    for place, name in enumerate(made):
        (folder / name).write_bytes(b"x" * size)
        age(folder / name, (count - place) * DAY)
    return made


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, 9),
        ({"KEPT_FILES": 4}, 3),
        ({"KEPT_SECONDS": 5.5 * DAY}, 5),
        ({"KEPT_BYTES": 2500}, 2),
        ({"KEPT_BYTES": 0}, 0),
        ({"KEPT_FILES": 0}, 0),
    ],
    ids=["none", "count", "age", "bytes", "no room", "no files"],
)
def test_the_oldest_go_when_one_is_written(
    limits: dict[str, float], left: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    QAdACache(model)
    (own,) = folder.iterdir()
    if "KEPT_BYTES" in limits:
        limits = {"KEPT_BYTES": limits["KEPT_BYTES"] and own.stat().st_size + limits["KEPT_BYTES"]}
    own.unlink()
    monkeypatch.setattr(defaults, "_remembered", {})
    for name, value in limits.items():
        monkeypatch.setattr(defaults, name, value)
    others = fill(folder, 9, size=1000)
    QAdACache(model)
    assert names(folder) == {own.name, *others[9 - left :]}  # the new one stays in any case


def test_reading_counts_as_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, third = tiny(), tiny(seed=1), tiny(seed=2)
    QAdACache(model)
    (first,) = names(folder)
    QAdACache(other)
    (second,) = names(folder) - {first}
    age(folder / first, 3 * DAY)
    age(folder / second, 2 * DAY)
    monkeypatch.setattr(defaults, "_remembered", {})  # another process
    QAdACache(model)
    monkeypatch.setattr(defaults, "KEPT_FILES", 2)
    QAdACache(third)
    assert len(names(folder)) == 2
    assert first in names(folder)
    assert second not in names(folder)


def test_nothing_else_goes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuned settings, files of other names, links and folders; nor anything elsewhere."""
    fill(folder, 3)
    model = tiny()
    tuned = tuned_choice.keep(model, QAdACache(model, moments="current").options, {})
    link, inner = (folder / f"llama-wiki-{digit * 16}.safetensors" for digit in "ab")
    (tmp_path / "elsewhere.safetensors").write_bytes(b"x")
    link.symlink_to(tmp_path / "elsewhere.safetensors")
    inner.mkdir()
    mine = [folder / name for name in ("mine.safetensors", "llama-custom-0123456789abcdef.safetensors", "notes.txt")]
    for path in mine:
        path.write_bytes(b"x")
    for path in (tuned, *mine):
        age(path, 1000 * DAY)
    monkeypatch.setattr(defaults, "KEPT_FILES", 0)
    monkeypatch.setattr(defaults, "KEPT_SECONDS", 0.0)
    QAdACache(model)
    others = {tuned.name, link.name, inner.name, *(path.name for path in mine)}
    assert others < names(folder)
    assert len(names(folder)) == len(others) + 1
    assert (tmp_path / "elsewhere.safetensors").exists()


def test_files_that_others_remove_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the listing and the removal, and between the listing and the reading."""
    fill(folder, 3)
    unlink = os.unlink

    def removed_twice(name: str, *, dir_fd: int | None = None) -> None:
        unlink(name, dir_fd=dir_fd)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(defaults, "KEPT_FILES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", removed_twice)
        QAdACache(tiny())
    assert len(names(folder)) == 1
    for path in folder.iterdir():
        path.unlink()
    monkeypatch.setattr(defaults, "_remembered", {})
    assert QAdACache(tiny()).options.other_moments is not None  # made again


def test_processes_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that ask for the same collect, or read, the same; files are whole, and no more than may be kept."""
    monkeypatch.setattr(defaults, "KEPT_FILES", 3)

    def collect(seeds: str) -> bool:
        made = [
            QAdACache(tiny(seed=int(seed))).options.other_moments.covariance.double().sum().item() for seed in seeds
        ]
        (tmp_path / seeds).write_text(repr([*zip(seeds, made, strict=True)]))
        return "cannot be kept" not in caplog.text

    running = [fork(functools.partial(collect, seeds)) for seeds in ("0123", "0145")]
    assert [*map(wait, running)] == [0, 0]
    found = {each for seeds in ("0123", "0145") for each in ast.literal_eval((tmp_path / seeds).read_text())}
    assert {seed for seed, _ in found} == set("012345")
    assert len(found) == 6  # one sum for each
    assert len(names(folder)) == 3
    for path in folder.iterdir():
        assert KeyMoments.load(path).covariance.double().sum().item() in {total for _, total in found}


def test_training_keeps_as_many_as_are_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "KEPT_FILES", 3)
    model = tiny()
    for _ in range(6):
        train(model)
        QAdACache(model)
    assert len(names(folder)) == 3


@pytest.mark.parametrize("moments", ["current", "passed on", "passed on alone"])
def test_a_training_loop_without_passes_and_files(moments: str, folder: Path) -> None:
    """Rollouts of a model that is trained between them, by moments that docs/cache-files.md names."""
    model = tiny()
    collected = KeyMoments.collect(model, progress=False)
    asked = {"current": "current", "passed on": ("current", collected), "passed on alone": collected}[moments]
    passes: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *given: passes.append(given[2].shape[1]))
    for _ in range(3):
        train(model)
        cache = QAdACache(model, moments=asked, **SMALL)
        assert passes == []
        model.generate(prompt(90)[0], **pass_cache(cache), max_new_tokens=3, do_sample=False)
        assert passes == [90, 1, 1]
        passes.clear()
    handle.remove()
    assert not folder.exists()
    assert (cache.options.other_moments is collected) == (moments != "current")


def test_names_are_those_of_files_that_are_written(folder: Path) -> None:
    """The pattern of kept files' names fits the files of every prompt, for models that were loaded and others."""
    model = tiny()
    for loaded in ("", "somewhere/model"):
        model.config._name_or_path = loaded
        for each in defaults.PROMPTS:
            assert defaults._NAMES.fullmatch(defaults._find_path(model, each).name)
    assert not defaults._NAMES.fullmatch(tuned_choice._find_path(model).name)


@pytest.mark.slow
def test_the_moments_kept_here_are_of_the_model_that_they_name() -> None:
    from eval.shared import language_model
    from moments.make import FILE

    readme = (FILE.parent / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in FILE.parent.glob("*.safetensors")] == [FILE.name]
    assert f"`{FILE.name}`" in readme
    kept = KeyMoments.load(FILE)
    model, tokenizer = language_model.load("smollm2")
    cache = QAdACache(model, moments=kept)
    assert cache.options.other_moments is kept
    made = KeyMoments.collect(model, tokenizer, "random-words", progress=False)
    for mine, theirs in zip(kept.at(1024), made.at(1024), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
