"""Whether kernels can be compiled here, and those that were."""

import ctypes
from pathlib import Path

import pytest

from qada_cache import files
from qada_cache.kernels.cpu import building, prompt


def compiler() -> str | None:
    """The one that would be used."""
    try:
        return building.find_compiler()
    except OSError:
        return None


needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs Linux and a C++ compiler")
needs_avx2 = pytest.mark.skipif(
    not prompt.read_instructions() >= prompt.NEEDED, reason="this processor has no AVX2 with FMA"
)

AVX2, AVX512 = prompt.NEEDED, prompt.NEEDED | {"avx512f", "avx512bw"}
SETS = {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": AVX512 | {"avx512_bf16", "avx512_vnni"}}


@pytest.fixture
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for prompts are those of a processor that has these of `SETS`, and no others."""
    if not SETS[request.param] <= prompt.read_instructions():
        pytest.skip("the processor cannot run it")
    monkeypatch.setattr(prompt, "read_instructions", lambda: SETS[request.param])


def build_once(patch: pytest.MonkeyPatch, kept: Path) -> None:
    """Let the compiler compile nothing twice: libraries are `kept` in a folder, by names that are digests of all that
    they are compiled from, and copied into a test's own empty cache folder."""
    build = building._build

    def copy_or_build(compiler: str, source: Path, macros: tuple[str, ...], name: str) -> ctypes.CDLL:
        earlier = kept / name
        if earlier.exists():
            with files.open_folder(building.FOLDER, make=True) as folder:
                files.write(name, (earlier.read_bytes(),), folder=folder)
            if (known := building._load_kept(name)) is not None:
                return known
        library = build(compiler, source, macros, name)
        files.write(earlier, ((files.find_home() / building.FOLDER / name).read_bytes(),))
        return library

    patch.setattr(building, "_build", copy_or_build)
