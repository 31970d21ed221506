"""Faults of disks, processes and files: no wrong token, no crash, and nothing left over after the next start.

The cache's options here read everything, so that a prompt's tokens are the same however much of it was stored.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import fork, wait
from models import SMALL, limited_file_size, prompt, tiny
from torch import Tensor
from transformers import PreTrainedModel

from qada_cache import PrefixStore, QAdACache, files
from qada_cache.files import tensor_file
from qada_cache.prefix_store import folder as folders
from qada_cache.prefix_store.folder import KIND
from qada_cache.prefix_store.naming import SEGMENT_TOKENS, Name
from qada_cache.versions import pass_cache

OPTIONS: dict[str, Any] = {"threshold": 1.0, "moments": "current", **SMALL}
TEXT = prompt(2 * SEGMENT_TOKENS + 70)[0]
LENGTH = TEXT.shape[1]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny()


@pytest.fixture(scope="module")
def whole(model: PreTrainedModel) -> QAdACache:
    """A cache that has read the text."""
    cache = QAdACache(model, **OPTIONS)
    with torch.no_grad():
        model(TEXT, **pass_cache(cache))
    return cache


@pytest.fixture(scope="module")
def wanted(model: PreTrainedModel) -> Tensor:
    """The next token's logits."""
    with torch.no_grad():
        return model(TEXT, use_cache=False).logits[0, -1]


@pytest.fixture(scope="module")
def kept(model: PreTrainedModel, whole: QAdACache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text, not to be changed."""
    path = tmp_path_factory.mktemp("kept") / "prompts"
    PrefixStore(path).keep(whole, TEXT)
    return path


@pytest.fixture
def path(kept: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(kept, tmp_path / "prompts"))


def segments(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if Name.parse(file.name))


def check_nothing_is_left(path: Path) -> None:
    """All files there are whole segments, of whole chains."""
    names = [Name.parse(file.name) for file in path.iterdir()]
    assert None not in names
    known = {name.own for name in names if name}
    for name in names:
        assert name is not None
        assert not name.number or name.parent in known
        with files.open_folder_at(path) as descriptor:
            folders.Folder(descriptor, path, {}).read(name)


def check_served(model: PreTrainedModel, wanted: Tensor, whole: QAdACache, path: Path, held: int | None = None) -> int:
    """The text is answered rightly; it can be kept again; returns how much of it was stored."""
    store = PrefixStore(path)
    cache = store.cache(model, TEXT, **OPTIONS)
    found = cache.get_seq_length()
    assert held in (None, found)
    with torch.no_grad():
        got = model(TEXT[:, found:], **pass_cache(cache)).logits[0, -1]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4)
    store.keep(whole, TEXT)
    assert PrefixStore(path).cache(model, TEXT, **OPTIONS).get_seq_length() == LENGTH - 1
    check_nothing_is_left(path)
    return found


CUTS = [0, 1, 7, 8, 100, 1000, 3000, 4096, -4096, -64, -1]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_truncated_files(
    model: PreTrainedModel, whole: QAdACache, wanted: Tensor, path: Path, place: int, cut: int
) -> None:
    file = segments(path)[place]
    os.truncate(file, cut if cut >= 0 else file.stat().st_size + cut)
    assert check_served(model, wanted, whole, path) == place * SEGMENT_TOKENS


FLIPS = [0, 3, 7, 8, 9, 30, 200, 900, 1500, 3000, 5000, 9000, -9000, -5000, -3000, -700, -9, -1]


# Anywhere in a file, in each file of a prompt: how a flip is noticed does not depend on which it is.
@pytest.mark.parametrize(
    ("at", "bit", "place"), [(at, 6 * high, (index + high) % 3) for index, at in enumerate(FLIPS) for high in (0, 1)]
)
def test_flipped_bits(
    model: PreTrainedModel, whole: QAdACache, wanted: Tensor, path: Path, place: int, at: int, bit: int
) -> None:
    file = segments(path)[place]
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)
    assert check_served(model, wanted, whole, path, place * SEGMENT_TOKENS) == place * SEGMENT_TOKENS


def forge(file: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Write a file anew, whose checksum is right."""
    tensors, state = tensor_file.read(file, KIND)
    change(tensors, state)
    tensor_file.write(file, KIND, tensors, state)


FORGERIES: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], object]] = {
    "another token": lambda tensors, state: state["tokens"].__setitem__(3, 96 - state["tokens"][3]),
    "fewer tokens": lambda tensors, state: state["tokens"].pop(),
    "more tokens": lambda tensors, state: state["tokens"].append(1),
    "no tokens": lambda tensors, state: state.update(tokens=[]),
    "tokens that are none": lambda tensors, state: state.update(tokens=["a"] * SEGMENT_TOKENS),
    "tokens of any size": lambda tensors, state: state.update(tokens=[2**70] * SEGMENT_TOKENS),
    "tokens by name": lambda tensors, state: state.update(tokens={"0": 1}),
    "another reading": lambda tensors, state: state.update(reading="0" * 32),
    "no reading": lambda tensors, state: state.update(reading=None),
    "more exact tokens than there are": lambda tensors, state: state.update(exact=10**9),
    "a negative count": lambda tensors, state: state.update(exact=-1),
    "half a count": lambda tensors, state: state.update(exact=0.5),
    "a missing field": lambda tensors, state: state.pop("exact"),
    "another field": lambda tensors, state: state.update(more=1),
    "another sketch": lambda tensors, state: state.update(sketch="0" * 32),
    "no word of a sketch": lambda tensors, state: state.update(sketch=None),
    "a missing layer": lambda tensors, state: [tensors.pop(name) for name in ("keys 1", "values 1")],
    "another layer": lambda tensors, state: tensors.update(
        {"keys 2": tensors["keys 1"], "values 2": tensors["keys 1"]}
    ),
    "missing values": lambda tensors, state: tensors.pop("values 0"),
    "a stray tensor": lambda tensors, state: tensors.update(stray=torch.zeros(2), other=torch.zeros(2)),
    "fewer keys": lambda tensors, state: tensors.update({"keys 0": tensors["keys 0"][:, 1:].clone()}),
    "fewer heads": lambda tensors, state: tensors.update({name: each[:1].clone() for name, each in tensors.items()}),
    "narrower keys": lambda tensors, state: tensors.update({"keys 0": tensors["keys 0"][..., 1:].clone()}),
    "flat keys": lambda tensors, state: tensors.update({"keys 0": tensors["keys 0"][0].clone()}),
    "keys in int64": lambda tensors, state: tensors.update({"keys 0": tensors["keys 0"].long()}),
    "all in float64": lambda tensors, state: tensors.update({name: each.double() for name, each in tensors.items()}),
    "no tensors": lambda tensors, state: tensors.clear(),
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("place", [0, 2])
def test_forged_numbers(
    model: PreTrainedModel, whole: QAdACache, wanted: Tensor, path: Path, place: int, forgery: str
) -> None:
    forge(segments(path)[place], FORGERIES[forgery])
    check_served(model, wanted, whole, path, place * SEGMENT_TOKENS)


def header(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "offsets beyond the end": lambda found: found["keys 0"].update(data_offsets=[0, 10**12]),
    "offsets far beyond": lambda found: found["keys 0"].update(data_offsets=[10**12, 10**12 + 16384]),
    "negative offsets": lambda found: found["keys 0"].update(data_offsets=[-16384, 0]),
    "offsets by name": lambda found: found["keys 0"].update(data_offsets="ab"),
    "one offset": lambda found: found["keys 0"].update(data_offsets=[0]),
    "a shape of any size": lambda found: found["keys 0"].update(shape=[2**62, 2**62]),
    "a negative shape": lambda found: found["keys 0"].update(shape=[-2, SEGMENT_TOKENS, -8]),
    "a shape by name": lambda found: found["keys 0"].update(shape={"a": 1}),
    "another dtype": lambda found: found["keys 0"].update(dtype="C64"),
    "no dtype": lambda found: found["keys 0"].pop("dtype"),
    "an entry that is none": lambda found: found.update({"keys 0": 7}),
    "no metadata": lambda found: found.pop("__metadata__"),
    "metadata that are none": lambda found: found.update(__metadata__=[1]),
    "a version that is none": lambda found: found["__metadata__"].update(version=4),
    "a later version": lambda found: found["__metadata__"].update(version="99"),
    "another kind": lambda found: found["__metadata__"].update(kind="qada-moments"),
    "a state that is none": lambda found: found["__metadata__"].update(state="[1, 2"),
    "a state of a list": lambda found: found["__metadata__"].update(state="[1, 2]"),
}


@pytest.mark.parametrize("forgery", HEADERS)
@pytest.mark.parametrize("place", [0, 2])
def test_forged_headers(
    model: PreTrainedModel, whole: QAdACache, wanted: Tensor, path: Path, place: int, forgery: str
) -> None:
    file = segments(path)[place]
    found, rest = header(file.read_bytes())
    HEADERS[forgery](found)
    text = json.dumps(found).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + rest)
    check_served(model, wanted, whole, path, place * SEGMENT_TOKENS)


def test_a_file_under_another_name(model: PreTrainedModel, whole: QAdACache, wanted: Tensor, path: Path) -> None:
    first, second, _ = segments(path)
    shutil.copy(second, first)
    check_served(model, wanted, whole, path, 0)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_missing_files(model: PreTrainedModel, whole: QAdACache, wanted: Tensor, path: Path, place: int) -> None:
    segments(path)[place].unlink()
    check_served(model, wanted, whole, path, place * SEGMENT_TOKENS)


@pytest.mark.parametrize("kind", ["a folder", "a link", "a pipe", "open to all", "unreadable"])
def test_files_that_are_none(
    model: PreTrainedModel, wanted: Tensor, path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = segments(path)[1]
    if kind == "open to all":
        file.chmod(0o666)
    elif kind == "unreadable" and os.geteuid():
        file.chmod(0)
    else:
        content = file.read_bytes()
        file.unlink()
        if kind == "a link":
            (path.parent / "elsewhere").write_bytes(content)
            file.symlink_to(path.parent / "elsewhere")
        elif kind == "a pipe":
            os.mkfifo(file)
        else:
            file.mkdir()
    cache = PrefixStore(path).cache(model, TEXT, **OPTIONS)
    assert cache.get_seq_length() == SEGMENT_TOKENS
    assert "read again from segment 1 on" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 1000, 10_000, 60_000])
def test_full_disks(
    model: PreTrainedModel, whole: QAdACache, wanted: Tensor, tmp_path: Path, size: int, caplog: Any
) -> None:
    store = PrefixStore(tmp_path / "prompts")
    with limited_file_size(size):
        assert store.keep(whole, TEXT) == 0
    assert "prompts cannot be kept" in caplog.text
    assert list((tmp_path / "prompts").iterdir()) == []
    check_served(model, wanted, whole, tmp_path / "prompts", 0)


@pytest.mark.parametrize("writes", [1, 2])
def test_a_disk_that_is_full_later(
    model: PreTrainedModel,
    whole: QAdACache,
    wanted: Tensor,
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
        PrefixStore(tmp_path / "prompts").keep(whole, TEXT)
    check_served(model, wanted, whole, tmp_path / "prompts", writes * SEGMENT_TOKENS)


PIECES = (1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 17, 18)  # a file has six


def test_killed_writers(
    model: PreTrainedModel, whole: QAdACache, wanted: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        PrefixStore(tmp_path / str(place)).keep(whole, TEXT)

    killed = [fork(functools.partial(keep, *each)) for each in enumerate(PIECES)]
    assert [*map(wait, killed)] == [-signal.SIGKILL] * len(PIECES)
    for place, pieces in enumerate(PIECES):
        path, files_before = tmp_path / str(place), (pieces - 1) // 6
        assert any(file.name.endswith(files.UNFINISHED) for file in path.iterdir())
        PrefixStore(path).stats()  # the next start
        check_nothing_is_left(path)
        check_served(model, wanted, whole, path, files_before * SEGMENT_TOKENS)


def test_writers_and_readers_at_once(model: PreTrainedModel, whole: QAdACache, wanted: Tensor, tmp_path: Path) -> None:
    """While others remove what was not used for longest."""
    path, errors = tmp_path / "prompts", list[BaseException]()
    PrefixStore(path).keep(whole, TEXT)
    most = 2 * segments(path)[0].stat().st_size

    def write(seed: int) -> None:
        try:
            text = TEXT if seed % 2 else prompt(300, seed=seed)[0]
            cache = QAdACache(model, **OPTIONS)
            with torch.no_grad():
                model(text, **pass_cache(cache))
            for _ in range(8):
                PrefixStore(path, max_bytes=most if seed % 3 else 16 * most).keep(cache, text)
        except BaseException as error:
            errors.append(error)

    def ask() -> None:
        try:
            for _ in range(12):
                cache = PrefixStore(path).cache(model, TEXT, **OPTIONS)
                with torch.no_grad():
                    got = model(TEXT[:, cache.get_seq_length() :], **pass_cache(cache)).logits[0, -1]
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4)
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
    check_served(model, wanted, whole, path)


def test_a_file_that_goes_while_it_is_read(
    model: PreTrainedModel, whole: QAdACache, wanted: Tensor, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has opened it reads on; whoever has not reads the prompt from there."""
    original, opened = files.open_file, []

    def open_then_remove(folder: int, name: str) -> Any:
        opened.append(name)
        if len(opened) == 2:
            for file in segments(path):
                file.unlink()
        return original(folder, name)

    monkeypatch.setattr(files, "open_file", open_then_remove)
    cache = PrefixStore(path).cache(model, TEXT, **OPTIONS)
    with torch.no_grad():
        got = model(TEXT[:, cache.get_seq_length() :], **pass_cache(cache)).logits[0, -1]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("way", ["written by all", "written by a group", "a link", "a file", "another user's"])
def test_folders_that_are_not_the_users_alone(
    model: PreTrainedModel,
    whole: QAdACache,
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
    assert store.cache(model, TEXT, **OPTIONS).get_seq_length() == 0
    assert "no stored prompts are used" in caplog.text
    assert store.keep(whole, TEXT) == 0
    assert "prompts cannot be kept" in caplog.text
    assert store.stats().segments == 0


def test_file_systems_without_locks(
    model: PreTrainedModel, whole: QAdACache, wanted: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As network file systems may be."""

    def refuse(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    monkeypatch.setattr(files.fcntl, "fcntl", refuse)
    check_served(model, wanted, whole, tmp_path / "prompts", 0)


def test_others_cannot_read_it(whole: QAdACache, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        PrefixStore(tmp_path / "prompts").keep(whole, TEXT)
    finally:
        os.umask(before)
    assert (tmp_path / "prompts").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "prompts").iterdir()} == {0o600}
