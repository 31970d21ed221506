"""The cache folder: where it is, and that nothing is taken from it that somebody else may have put there."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compilers import compiler, needs_compiler
from models import limited_file_size, tiny
from transformers.utils.logging import warning_once

from qada_cache import KeyMoments, QAdACache
from qada_cache.files import private, tensor_file
from qada_cache.kernels.cpu import build, compiled
from qada_cache.key_moments import defaults, key_moments


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet, and a process that remembers nothing."""
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(defaults, "_remembered", {})
    monkeypatch.setattr(compiled, "build", functools.cache(compiled.build.__wrapped__))
    (tmp_path / "session").mkdir(mode=0o700)
    monkeypatch.setattr(build, "_session_folder", lambda: SimpleNamespace(name=tmp_path / "session"))
    # Built often here, so quickly; and by a name of every test's own, as a process loads what goes by one name once.
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0", f"-DTEST={abs(hash(tmp_path))}"))
    warning_once.cache_clear()
    return tmp_path / "home"


held: list[int] = []  # open files


def kernels() -> ctypes.CDLL | None:
    """As the first decode step of another process would get them."""
    compiled.build.cache_clear()
    held.append(os.open(os.devnull, os.O_RDONLY))  # the folder gets another number, and so the library another name
    return compiled.build(torch.float32, 16, 24, 1)


def attends(loaded: ctypes.CDLL | None) -> bool:
    """Whether this is the kernel, by what it computes."""
    assert loaded is not None
    query, key, value = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 24)
    out, lse = torch.full((1, 2, 1, 24), torch.nan), torch.empty(1, 2, 1)
    pointers = [tensor.data_ptr() for tensor in (query, key, value, out, lse)]
    strides = [*key.stride()[:2], *value.stride()[:2]]
    loaded.partial_attention(*pointers, 1, 2, 70, *strides, 512, 1, 0.25)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.25)
    return torch.allclose(out, wanted, atol=1e-5)


@pytest.fixture
def planted(tmp_path: Path) -> Callable[[Path], Path]:
    """Puts a library at a path that, when it is loaded, makes the file that is returned."""
    mark = tmp_path / "mark"
    source = '#include <cstdio>\nextern "C" void partial_attention() {}\nextern "C" void fused_decode(void*) {}\n'
    source += f'__attribute__((constructor)) static void run() {{ fclose(fopen("{mark}", "w")); }}\n'
    (tmp_path / "planted.cpp").write_text(source)
    command = [str(compiler()), "-shared", "-fPIC", str(tmp_path / "planted.cpp"), "-o", str(tmp_path / "planted.so")]
    subprocess.run(command, check=True)

    def plant(path: Path) -> Path:
        library = (tmp_path / "planted.so").read_bytes()
        replace(path, library + hashlib.sha256(library).digest())
        return mark

    return plant


def replace(path: Path, content: bytes) -> None:
    """By another file: this process may have loaded the old one."""
    path.unlink()
    path.write_bytes(content)


def link_away(path: Path) -> None:
    """A link to what was there."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


OPEN_TO_OTHERS: dict[str, Callable[[Path], object]] = {
    "written by all": lambda folder: folder.chmod(0o777),
    "written by a group": lambda folder: folder.chmod(0o770),
    "the outer one": lambda folder: folder.parent.chmod(0o777),
    "a link": link_away,
    "the outer one a link": lambda folder: link_away(folder.parent),
}


@needs_compiler
@pytest.mark.parametrize("way", OPEN_TO_OTHERS)
def test_no_kernel_from_a_folder_open_to_others(
    way: str, folder: Path, planted: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert attends(kernels())
    (kept,) = (folder / "kernels").iterdir()
    mark = planted(kept)
    OPEN_TO_OTHERS[way](folder / "kernels")
    before = kept.read_bytes()
    for _ in range(2):
        assert attends(kernels())
    assert not mark.exists()
    assert kept.read_bytes() == before
    assert caplog.text.count("kernels cannot be kept in") == len(caplog.records) == 1


@needs_compiler
def test_no_kernel_of_another_user(
    folder: Path,
    planted: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert attends(kernels())
    (kept,) = (folder / "kernels").iterdir()
    mark = planted(kept)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert attends(kernels())
    assert not mark.exists()
    assert f"{folder} belongs to another user" in caplog.text


BROKEN: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: replace(path, path.read_bytes()[: path.stat().st_size // 3]),
    "a byte": lambda path: replace(path, path.read_bytes()[:5000] + b"x" + path.read_bytes()[5001:]),
    "garbage": lambda path: replace(path, b"garbage" * 1000),
    "empty": lambda path: replace(path, b""),
    "without its digest": lambda path: replace(path, path.read_bytes()[:-32]),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": link_away,
    "written by all": lambda path: path.chmod(0o666),
}


@needs_compiler
@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_kernel_is_built_again(way: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert attends(kernels())
    (kept,) = (folder / "kernels").iterdir()
    BROKEN[way](kept)
    for _ in range(2):
        assert attends(kernels())
    assert kept.is_file()
    assert not kept.is_symlink()
    assert caplog.text.count("is built again") == len(caplog.records) == 1


@needs_compiler
def test_what_is_made_is_the_users_alone(folder: Path) -> None:
    umask = os.umask(0)
    try:
        assert attends(kernels())
        QAdACache(tiny(), moments="random-tokens")
    finally:
        os.umask(umask)
    found = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert len(found) == 5
    assert {name: mode for name, mode in found.items() if mode & 0o077} == {}


@needs_compiler
@pytest.mark.parametrize("fails", [False, True])
def test_a_compiler_that_does_not_speak_utf8(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    speaking = tmp_path / "cc"
    end = "exit 1" if fails else f'exec {compiler()} "$@"'
    speaking.write_text(f"#!/bin/sh\nprintf 'compil\\351\\n' | tee /dev/stderr\n{end}\n")
    speaking.chmod(0o755)
    monkeypatch.setenv("CXX", str(speaking))
    if fails:
        assert kernels() is None
        assert f"{speaking} failed with compil" in caplog.text
    else:
        assert attends(kernels())


# -- moments ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that moments were collected on, while the test runs."""
    prompts: list[str] = []
    original = key_moments.collecting.collect

    def counting(*positional: object, **named: object) -> dict:
        prompts.append("collected")
        return original(*positional, **named)

    monkeypatch.setattr(key_moments.collecting, "collect", counting)
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
    left = [folder / "moments" / f".{name}.0123456789abcdef{private.UNFINISHED}" for name in ("old", "new")]
    for path in left:
        path.touch()
    os.utime(left[0], times=(time.time() - 2 * private.STALE_SECONDS,) * 2)
    monkeypatch.setattr(defaults, "_remembered", {})
    QAdACache(tiny(seed=1), moments="random-tokens")
    assert [path.exists() for path in left] == [False, True]  # another process may be at work on the new one
    assert len(list((folder / "moments").iterdir())) == 3


# -- where -----------------------------------------------------------------------------------------------------------


def test_home_is_where_the_platform_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert private.home() == tmp_path / "home"
    monkeypatch.delenv("QADA_HOME")
    monkeypatch.setenv("HOME", "/users/me")
    monkeypatch.setenv("HF_HOME", "/shared/huggingface")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert private.home() == Path("/users/me/.cache/qada")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert private.home() == Path("/users/me/.cache/qada")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert private.home() == Path("/caches/qada")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert private.home() == Path("/users/me/Library/Caches/qada")


def test_files_read_from_memory_are_checked_alike(tmp_path: Path) -> None:
    tensor_file.write(tmp_path / "file", "qada-test", {"x": torch.arange(5)}, {"y": 1})
    content = (tmp_path / "file").read_bytes()
    tensors, state = tensor_file.decoded(content, "qada-test", tmp_path / "file")
    assert tensors["x"].tolist() == [0, 1, 2, 3, 4]
    assert state == {"y": 1}
    for damaged, message in (
        (content[:-1], "truncated"),
        (content[:-1] + b"x", "was altered"),
        (b"", "truncated"),
        (tensor_file.safetensors.torch.save({"x": torch.ones(1)}), "is not a qada-test file"),
    ):
        with pytest.raises(ValueError, match=message):
            tensor_file.decoded(damaged, "qada-test", tmp_path / "file")
