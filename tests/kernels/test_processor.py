"""Each system's description of its processor is understood, and compilers get the right flags."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qada_cache.kernels.cpu import compiler, processor
from qada_cache.kernels.cpu.processor import ARM, X86, find_kind
from qada_cache.machine import describe_machine

CORES = {
    "flags\t\t: fpu avx2 fma avx_vnni": X86,
    "Features\t: fp asimd asimddp i8mm bf16": ARM,
    "Features\t: half thumb neon vfpv4": None,  # of 32 bits
}


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The processor is looked up anew, without the variable that limits torch's instructions."""
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    processor.read_instructions.cache_clear()
    yield
    processor.read_instructions.cache_clear()


@pytest.mark.parametrize("line", CORES)
def test_linux(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nCPU part\t: 0xd0c\n\nprocessor\t: 1\n{line}\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert find_kind(processor.read_instructions()) is CORES[line]
    assert processor.read_instructions() >= set(line.partition(": ")[2].split())
    assert processor.identify() == sorted([line, "CPU part\t: 0xd0c"])


def test_what_torch_is_limited_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 fma avx_vnni avx512f avx512_bf16 amx_tile\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(compiler.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert processor.read_instructions() == {"flags", ":", "fpu", "avx2", "fma"}
    assert "-march=haswell" in compiler.list_flags()
    assert "limited to avx2" in describe_machine()


@pytest.mark.parametrize("given", [True, False])
def test_tiles_are_asked_for(given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may keep them from a process that its processor has them for."""
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 fma avx512_bf16 amx_tile amx_bf16\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    asked: list[tuple[int, ...]] = []
    library = SimpleNamespace(syscall=lambda *call: asked.append(call) or not given)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    found = processor.read_instructions()
    assert ("amx_bf16" in found) == ("amx_tile" in found) == given
    assert {"avx2", "avx512_bf16"} <= found
    assert asked == [(158, 0x1023, 18)]


def test_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """An M1 has no BF16."""

    def ask(name: bytes, value: Any, size: Any, *_: Any) -> int:
        assert size._obj.value == 4
        value._obj.value = name in (b"hw.optional.arm64", b"hw.optional.arm.FEAT_DotProd")
        return -(name == b"hw.optional.arm.FEAT_BF16")

    monkeypatch.setattr(processor.sys, "platform", "darwin")
    monkeypatch.setattr(processor, "CPUINFO", Path("nowhere"))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(sysctlbyname=ask))
    assert processor.read_instructions() == {"asimd", "asimddp"}
    assert processor.identify()[1:] == ["asimd", "asimddp"]


def test_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "CPUINFO", Path("nowhere"))
    assert find_kind(processor.read_instructions()) is None


@pytest.mark.parametrize(
    ("system", "machine", "native"),
    [("linux", "x86_64", "-march"), ("linux", "aarch64", "-mcpu"), ("darwin", "arm64", "-mcpu")],
)
def test_flags(system: str, machine: str, native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.sys, "platform", system)
    monkeypatch.setattr(compiler.platform, "machine", lambda: machine)
    flags = compiler.list_flags()
    assert [flag for flag in flags if flag.endswith("=native")] == [f"{native}=native"]
    assert ("-Xclang" in flags) == (system == "darwin")
    assert "-fopenmp" in flags
