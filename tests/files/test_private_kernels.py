"""The cache folder: no kernel is taken from it that somebody else may have put there, and none that is broken."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compilers import compile_once, compiler, needs_compiler
from models import tiny
from open_to_others import OPEN_TO_OTHERS, link_away

from qada_cache import QAdACache, files
from qada_cache.kernels import cpu
from qada_cache.kernels.cpu import building


@pytest.fixture(autouse=True)
def quick_builds(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has loaded no kernel, and that builds them quickly."""
    monkeypatch.setattr(cpu, "build_partial", functools.cache(cpu.build_partial.__wrapped__))
    # Each test's library has a name of its own, as a process loads only one library of a name.
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-O0", f"-DTEST={abs(hash(tmp_path))}"))
    monkeypatch.setattr(building, "run_command", compile_once)


held: list[int] = []  # open files


def kernels() -> ctypes.CDLL | None:
    """The kernel's library as another process would get it."""
    cpu.build_partial.cache_clear()
    held.append(os.open(os.devnull, os.O_RDONLY))  # the folder gets another number, and so the library another name
    return cpu.build_partial(torch.float32, 16, 24, 1)


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
    source = '#include <cstdio>\nextern "C" void partial_attention() {}\n'
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
    """Replace the library by a new file: this process may have loaded the old one."""
    path.unlink()
    path.write_bytes(content)


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
def test_unused_kernels_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many, too large together, or too old, the least recently used ones first. Files of other names stay."""
    assert attends(kernels())
    (own,) = (folder / "kernels").iterdir()
    now, size = time.time(), own.stat().st_size
    others = [folder / "kernels" / name for name in ("notes.txt", "library.so", f"{'0' * 31}.so")]
    older = [folder / "kernels" / f"{age:032x}.so" for age in range(6)]  # in days
    for path in (*others, *older):
        path.write_bytes(bytes(size))
        os.utime(path, (now, now - 24 * 3600 * (2000 if path in others else older.index(path) + 1)))
    os.utime(own, (now, now - 24 * 3600 * 100))
    assert attends(kernels())  # the one that is kept, which is used again
    assert set(older) < set((folder / "kernels").iterdir())

    monkeypatch.setattr(files, "KEPT_SECONDS", 4.5 * 24 * 3600)
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-DMORE"))
    assert attends(kernels())  # a new one
    kept = {path for path in (folder / "kernels").iterdir() if path not in others}
    assert {own, *older[:4]} < kept
    assert len(kept) == 6
    assert all(path.exists() for path in others)
    for limit, most in (("KEPT_KERNELS", 3), ("KEPT_BYTES", 2 * size)):
        monkeypatch.setattr(files, limit, most)
        with files.open_folder("kernels") as opened:
            files.remove_unused_kernels(opened)
        kept = {path for path in (folder / "kernels").iterdir() if path not in others}
        assert own in kept
        assert len(kept) == (3 if limit == "KEPT_KERNELS" else 2)


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
