"""Faults of disks, processes and folders: no wrong token, no crash, and nothing left over after the next start."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import fork, wait
from kept_text import OPTIONS, TEXT, check_nothing_is_left, check_served, model, segments, wanted, whole
from models import limited_file_size, prompt

from qada_cache import PrefixStore, QAdACache, files
from qada_cache.files import tensor_file
from qada_cache.prefix_store.naming import FILE_TOKENS
from qada_cache.versions import pass_cache


@pytest.mark.parametrize("size", [0, 1, 1000, 10_000, 60_000])
def test_full_disks(tmp_path: Path, size: int, caplog: Any) -> None:
    store = PrefixStore(tmp_path / "prompts")
    with limited_file_size(size):
        assert store.keep(whole(), TEXT) == 0
    assert "prompts cannot be kept" in caplog.text
    assert list((tmp_path / "prompts").iterdir()) == []
    check_served(tmp_path / "prompts", 0)


@pytest.mark.parametrize("writes", [1, 2])
def test_a_disk_that_is_full_later(
    tmp_path: Path,
    writes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, original = [], files.write

    def write(name: Any, content: Any, **where: Any) -> None:
        written.append(name)
        if len(written) > writes:
            raise OSError(28, "No space left on device")
        original(name, content, **where)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", write)
        store = PrefixStore(tmp_path / "prompts")
        assert store.keep(whole(), TEXT) == writes * FILE_TOKENS
        assert store.stats().written_bytes > 0
    check_served(tmp_path / "prompts", writes * FILE_TOKENS)


PIECES = (1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 17, 18)  # a file has six


def test_killed_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tensor_file.encode

    def keep(place: int, pieces: int) -> None:
        def encoded(*arguments: Any) -> Iterator[Any]:
            nonlocal pieces
            for piece in original(*arguments):
                yield piece
                pieces -= 1
                if not pieces:
                    os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(tensor_file, "encode", encoded)
        PrefixStore(tmp_path / str(place)).keep(whole(), TEXT)

    killed = [fork(functools.partial(keep, *each)) for each in enumerate(PIECES)]
    assert [*map(wait, killed)] == [-signal.SIGKILL] * len(PIECES)
    for place, pieces in enumerate(PIECES):
        path, files_before = tmp_path / str(place), (pieces - 1) // 6
        assert any(file.name.endswith(files.UNFINISHED) for file in path.iterdir())
        PrefixStore(path).stats()  # the next start
        check_nothing_is_left(path)
        check_served(path, files_before * FILE_TOKENS)


def test_writers_and_readers_at_once(tmp_path: Path) -> None:
    """While others remove what was not used for longest."""
    path, errors = tmp_path / "prompts", list[BaseException]()
    PrefixStore(path).keep(whole(), TEXT)
    most = 2 * segments(path)[0].stat().st_size

    def write(seed: int) -> None:
        try:
            text = TEXT if seed % 2 else prompt(300, seed=seed)[0]
            cache = QAdACache(model(), **OPTIONS)
            with torch.no_grad():
                model()(text, **pass_cache(cache))
            for _ in range(8):
                PrefixStore(path, max_bytes=most if seed % 3 else 16 * most).keep(cache, text)
        except BaseException as error:
            errors.append(error)

    def ask() -> None:
        try:
            for _ in range(12):
                cache = PrefixStore(path).cache(model(), TEXT, **OPTIONS)
                with torch.no_grad():
                    got = model()(TEXT[:, cache.get_seq_length() :], **pass_cache(cache)).logits[0, -1]
                torch.testing.assert_close(got, wanted(), rtol=1e-4, atol=2e-4)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    threads += [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    PrefixStore(path).stats()
    check_nothing_is_left(path)
    check_served(path)


def test_a_file_that_goes_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has opened it reads on; whoever has not reads the prompt from there."""
    original, opened = files.open_file, []

    def open_then_remove(folder: int, name: str) -> Any:
        opened.append(name)
        if len(opened) == 2:
            for file in segments(path):
                file.unlink()
        return original(folder, name)

    monkeypatch.setattr(files, "open_file", open_then_remove)
    cache = PrefixStore(path).cache(model(), TEXT, **OPTIONS)
    with torch.no_grad():
        got = model()(TEXT[:, cache.get_seq_length() :], **pass_cache(cache)).logits[0, -1]
    torch.testing.assert_close(got, wanted(), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("way", ["written by all", "written by a group", "a link", "a file", "another user's"])
def test_folders_that_are_not_the_users_alone(
    path: Path,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if way in ("written by all", "written by a group"):
        path.chmod(0o777 if way == "written by all" else 0o770)
    elif way == "another user's":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    else:
        path.rename(path.parent / "elsewhere")
        path.symlink_to("elsewhere") if way == "a link" else path.write_text("")
    store = PrefixStore(path)
    assert store.cache(model(), TEXT, **OPTIONS).get_seq_length() == 0
    assert "no stored prompts are used" in caplog.text
    assert store.keep(whole(), TEXT) == 0
    assert "prompts cannot be kept" in caplog.text
    assert store.stats().segments == 0


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store works in file systems without locks, as network file systems may be."""

    def refuse(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    monkeypatch.setattr(files.fcntl, "fcntl", refuse)
    check_served(tmp_path / "prompts", 0)


def test_others_cannot_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        PrefixStore(tmp_path / "prompts").keep(whole(), TEXT)
    finally:
        os.umask(before)
    assert (tmp_path / "prompts").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "prompts").iterdir()} == {0o600}
