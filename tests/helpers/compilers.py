"""C++ compilers in tests: whether one is here, instruction sets to compile for, and builds that tests share."""

import ctypes
import functools
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from qada_cache import files
from qada_cache.kernels.cpu import building, processor, prompt
from qada_cache.kernels.cpu.process import run_command


def compiler() -> str | None:
    """The path of the C++ compiler that the package would use, or None."""
    try:
        return building.find_compiler()
    except OSError:
        return None


needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
needs_vectors = pytest.mark.skipif(
    not prompt.has_instructions(), reason="this processor has neither AVX2 with FMA nor NEON"
)

# `SETS`: by name, the sets of instructions that kernels for prompts are written for, from the least to the newest.
LEAST = (processor.find_kind(prompt.read_instructions()) or processor.X86).needed
OF_X86 = {"avx512f", "avx512bw", "avx512dq"}, {"avx512_bf16", "avx512_vnni"}, {"amx_tile", "amx_bf16"}
MORE = OF_X86 if "avx2" in LEAST else ({"asimddp"}, {"bf16"}, {"none has these"})
SETS = {name: LEAST.union(*MORE[:count]) for count, name in enumerate(("least", "middle", "newest", "tiles"))}


@pytest.fixture
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for prompts are compiled as for a processor with the set of `SETS` that the test's parameter names."""
    if not SETS[request.param] <= prompt.read_instructions():
        pytest.skip("the processor cannot run it")
    monkeypatch.setattr(prompt, "read_instructions", lambda: SETS[request.param])


def build_once(patch: pytest.MonkeyPatch, kept: Path) -> None:
    """Compile no library twice. The folder `kept` holds libraries, by names that are digests of all that they are
    compiled from; they are copied into a test's own empty cache folder."""
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


def parse_headers_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the system's headers that sources include parsed once, into `folder`: they take half a second of a build.
    `make check` compiles each source without this."""
    if (found := compiler()) is None:
        return
    command, run = [found, *building.FLAGS], building.run_command
    first = threading.Lock()  # builds run in several threads; all but the first wait for the header

    @functools.cache
    def parse() -> list[str]:
        texts = [path.read_text(encoding="utf-8") for path in sorted(Path(building.__file__).parent.glob("*.[ch]*"))]
        names = dict.fromkeys(re.findall(r"^#include (<.*>)$", "\n".join(texts), re.MULTILINE))
        header = folder / "headers.h"
        header.write_text("".join(f"#if __has_include({name})\n#include {name}\n#endif\n" for name in names))
        run([*command, "-x", "c++-header", str(header), "-o", f"{header}.gch"], timeout=60)
        return ["-include", str(header)]

    def run_with(asked: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if asked[: len(command)] == command:
            with first:
                parsed = parse()
            asked = [*command, *parsed, *asked[len(command) :]]
        return run(asked, **options)

    patch.setattr(building, "run_command", run_with)


_compiled: dict[tuple[str, ...], bytes] = {}  # libraries by the compiler's arguments without output and `-DTEST=`


def compile_once(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Stands in for `building.run_command`: for a command that an earlier test ran, it copies that output file."""
    key, output = tuple(part for part in command[:-1] if not part.startswith("-DTEST=")), Path(command[-1])
    if key in _compiled:
        output.write_bytes(_compiled[key])
        return subprocess.CompletedProcess(command, 0, "", "")
    done = run_command(command, **options)
    if command[-2] == "-o" and not done.returncode:
        _compiled[key] = output.read_bytes()
    return done
