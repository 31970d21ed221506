"""The cache folder: where it is, and that no moments are taken from it that somebody else may have put there."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from models import limited_file_size, tiny
from open_to_others import OPEN_TO_OTHERS, link_away

from qada_cache import KeyMoments, QAdACache, files
from qada_cache.key_moments import defaults

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that moments were collected on, while the test runs."""
    prompts: list[str] = []
    original = KeyMoments.collect

    def counting(*positional: object, **named: object) -> KeyMoments:
        prompts.append("collected")
        return original(*positional, **named)

    monkeypatch.setattr(KeyMoments, "collect", counting)
    return prompts


def moments_of_another_process(monkeypatch: pytest.MonkeyPatch) -> KeyMoments:
    monkeypatch.setattr(defaults, "_remembered", {})
    moments = QAdACache(tiny(), moments="random-tokens").options.other_moments
    assert isinstance(moments, KeyMoments)
    return moments


@pytest.mark.parametrize("way", [*OPEN_TO_OTHERS, "a linked file", "a file written by all"])
def test_no_moments_that_others_may_have_put_there(
    way: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    collected: list[str],
) -> None:
    wanted = moments_of_another_process(monkeypatch)
    (kept,) = (folder / "moments").iterdir()
    KeyMoments(
        **{name: getattr(wanted, name) for name in ("mean", "lengths", "model_type", "rope", "rotations", "tokens")},
        covariance=wanted.covariance * 9,
        prompt="random-tokens",
    ).save(kept)
    altered = moments_of_another_process(monkeypatch)
    assert torch.equal(altered.covariance, wanted.covariance * 9)  # one's own are trusted
    assert len(collected) == 1
    if way in OPEN_TO_OTHERS:
        OPEN_TO_OTHERS[way](folder / "moments")
    elif way == "a linked file":
        link_away(kept)
    else:
        kept.chmod(0o666)
    found = moments_of_another_process(monkeypatch)
    assert torch.equal(found.covariance, wanted.covariance)
    assert len(collected) == 2
    assert len(caplog.records) == 1
    assert ("cannot be kept in" if way in OPEN_TO_OTHERS else "collecting the moments again") in caplog.text


def test_a_config_finds_none_where_others_can_write(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "model")
    model = type(model).from_pretrained(tmp_path / "model", local_files_only=True)
    QAdACache(model, moments="random-tokens")
    (folder / "moments").chmod(0o777)
    assert QAdACache(config=model.config, moments="random-tokens").options.other_moments is None
    assert "are not used: others than you can write to" in caplog.text


def test_a_full_disk_costs_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is there, and what is written to it fails half-way."""
    (folder / "moments").mkdir(parents=True, mode=0o700)
    with limited_file_size(1000):
        assert moments_of_another_process(monkeypatch).tokens == 1024
    assert "key moments cannot be kept in" in caplog.text
    assert not list((folder / "moments").iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_the_right_to_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "moments").mkdir(parents=True, mode=0o500)
    assert moments_of_another_process(monkeypatch).tokens == 1024
    assert "key moments cannot be kept in" in caplog.text


def test_what_killed_processes_left_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments_of_another_process(monkeypatch)
    left = [folder / "moments" / f".{name}.0123456789abcdef{files.UNFINISHED}" for name in ("old", "new")]
    for path in left:
        path.touch()
    os.utime(left[0], times=(time.time() - 2 * files.STALE_SECONDS,) * 2)
    monkeypatch.setattr(defaults, "_remembered", {})
    QAdACache(tiny(seed=1), moments="random-tokens")
    assert [path.exists() for path in left] == [False, True]  # another process may be at work on the new one
    assert len(list((folder / "moments").iterdir())) == 3


def test_home_is_where_the_platform_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert files.find_home() == tmp_path / "home"
    monkeypatch.setenv("QADA_HOME", "~/kept")
    assert files.find_home() == Path("~/kept").expanduser()
    monkeypatch.delenv("QADA_HOME")
    monkeypatch.setenv("HOME", "/users/me")
    monkeypatch.setenv("HF_HOME", "/shared/huggingface")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert files.find_home() == Path("/users/me/.cache/qada")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert files.find_home() == Path("/users/me/.cache/qada")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert files.find_home() == Path("/caches/qada")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert files.find_home() == Path("/users/me/Library/Caches/qada")


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_user_without_a_home_folder(platform: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("QADA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert files.find_home() == tmp_path / f"qada-{os.geteuid()}"
    QAdACache(tiny(), moments="random-tokens")
    assert len(list((files.find_home() / "moments").iterdir())) == 1
    assert files.find_home().stat().st_mode & 0o777 == 0o700
