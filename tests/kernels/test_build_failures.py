"""If the compiled kernel cannot be built, kept or loaded, torch computes, or every process builds it."""

import ctypes
import functools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import compile_once, needs_compiler
from parts import SCALING, check, tensors

from qada_cache import kernels
from qada_cache.kernels import cpu, reference
from qada_cache.kernels.cpu import building, compiler
from qada_cache.said_once import warn_once


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache folder, in a process that has built nothing yet. Kernels are built without optimization, once for all
    tests."""
    monkeypatch.setattr(building, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in building.FLAGS))
    monkeypatch.setattr(building, "run_command", compile_once)
    monkeypatch.setattr(cpu, "build_partial", functools.cache(cpu.build_partial.__wrapped__))
    warn_once.cache_clear()
    monkeypatch.setenv("QADA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def without_kernel(caplog: pytest.LogCaptureFixture) -> str:
    """The warning of a process in which torch computes. Asserts that torch does, and that there is one warning."""
    with caplog.at_level(logging.WARNING):
        for queries in (2, 3):
            query, key, value = tensors(queries, 1100)
            found = kernels.partial_attention(query, key, value, scaling=SCALING)
            check(found, query, key, value, torch.ones(1, 1, queries, 1100, dtype=torch.bool))
    assert len(caplog.records) == 1
    return caplog.text


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(building.sys, "platform", "linux")
    assert "there is no C++ compiler" in without_kernel(caplog)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("system", "told"),
    [
        ("win32", "it is built on Linux, Windows' one (WSL) included, and on macOS, not on win32"),
        ("darwin", "there is no C++ compiler (install Xcode's command line tools: xcode-select --install,"),
    ],
)
def test_on_another_system(
    system: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(building.sys, "platform", system)
    monkeypatch.setattr(compiler, "XCODE", ())
    assert told in without_kernel(caplog)


@needs_compiler
def test_where_no_path_goes_by_a_descriptor(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no path leads to a descriptor's file, as on macOS, a copy of the kept library is loaded, built or found."""
    load, loaded = ctypes.CDLL, []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: loaded.append(path) or load(path))
    monkeypatch.setattr(building, "OF_DESCRIPTORS", None)
    query, key, value = tensors(2, 1100)
    expected = reference.partial_attention(query, key, value, scaling=SCALING)
    for _ in range(2):
        found = cpu.compiled_partial_attention(query, key, value, scaling=SCALING)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        cpu.build_partial.cache_clear()  # another process
    assert not [path for path in loaded if path.startswith("/proc/") or Path(path).exists()]
    assert len(loaded) == 2
    assert len(list((fresh / "kernels").iterdir())) == 1


@needs_compiler
def test_a_compiler_that_fails(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    assert f"{failing} failed with no such option (CXX can name another compiler)" in without_kernel(caplog)
    assert not fresh.exists()


@needs_compiler
@pytest.mark.parametrize("flags", [("-DBFLOAT16", "-DFLOAT16"), ("-lnowhere",)])
def test_what_is_told_of_an_error(
    flags: tuple[str, ...], fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error's own line, not those before it that say where it is; the linker's, not the compiler's about it."""
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, *flags))
    assert re.search("failed with .*(elements.h:.* error: |-lnowhere).* .CXX", without_kernel(caplog))
    assert not fresh.exists()


@needs_compiler
def test_built_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors(2, 1100)
    assert cpu.compiled_partial_attention(query, key, value, scaling=SCALING) is not None
    assert len(list((fresh / "kernels").iterdir())) == 1
    cpu.build_partial.cache_clear()  # another process

    def refuse(command: list[str], **_: Any) -> Any:
        raise AssertionError(command)

    monkeypatch.setattr(building, "run_command", refuse)
    assert cpu.compiled_partial_attention(query, key, value, scaling=SCALING) is not None


@needs_compiler
def test_a_folder_that_cannot_be_written_to(fresh: Path) -> None:
    fresh.write_text("in the way")
    query, key, value = tensors(2, 1100)
    assert cpu.compiled_partial_attention(query, key, value, scaling=SCALING) is not None


@needs_compiler
@pytest.mark.usefixtures("fresh")
def test_a_folder_that_nothing_is_loaded_from(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If nothing can be loaded from the folder, as on a disk mounted without leave to execute, every process builds the
    kernel, and a warning says so."""
    load = ctypes.CDLL

    def refuse(path: str) -> ctypes.CDLL:
        if path.startswith("/proc/"):
            raise OSError("failed to map")
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    query, key, value = tensors(2, 1100)
    assert cpu.compiled_partial_attention(query, key, value, scaling=SCALING) is not None
    assert [record.message.endswith("will be built in every process") for record in caplog.records] == [True]
