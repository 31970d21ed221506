"""Whether kernels can be compiled here, and those that were."""

import ctypes
from pathlib import Path

import pytest

from qada_cache import files
from qada_cache.kernels.cpu import building, prompt, selected_prompt


def compiler() -> str | None:
    """The one that would be used."""
    try:
        return building.find_compiler()
    except OSError:
        return None


needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs Linux and a C++ compiler")
needs_pairs = pytest.mark.skipif(
    not prompt.read_instructions() >= prompt.NEEDED, reason="this processor multiplies no pairs of bfloat16"
)
needs_bytes = pytest.mark.skipif(
    not prompt.read_instructions() >= selected_prompt.NEEDED, reason="this processor selects no prompts"
)


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
