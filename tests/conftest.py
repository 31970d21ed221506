"""Settings every test runs under."""

import gc
import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

# Tensors here are tiny: more threads only wait for each other, and badly so on a busy machine. Numpy, by which Triton's
# interpreter multiplies, and processes of a test's own go by the variable, which is read on import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

# Triton decides when it decorates a kernel: on the CPU its interpreter runs them. `make gpu` compiles them instead.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Nothing is downloaded; without a network, a name that no file has would be asked for again and again.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

KEPT_SECONDS = 30 * 24 * 3600  # of kernels that earlier runs compiled


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache folder is not the tests'."""
    folder = tmp_path_factory.mktemp("qada-home")
    before, os.environ["QADA_HOME"] = os.environ.get("QADA_HOME"), str(folder)
    yield folder
    del os.environ["QADA_HOME"]
    if before is not None:
        os.environ["QADA_HOME"] = before


def keep_bits(patch: pytest.MonkeyPatch) -> None:
    """Let no default of a cache choose fewer than 16 bits."""
    patch.setattr("qada_cache.attention.support.reads_records", lambda options, managed: False)


@pytest.fixture(autouse=True, scope="session")
def bits_as_made() -> Iterator[pytest.MonkeyPatch]:
    """A bulk is in the model's dtype unless a test sets `bulk_bits`. Other processes that tests start use the
    default."""
    with pytest.MonkeyPatch.context() as patch:
        keep_bits(patch)
        yield patch


@pytest.fixture
def default_bits(bits_as_made: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache chooses the bits of its bulk itself."""
    bits_as_made.undo()
    yield
    keep_bits(bits_as_made)


@pytest.fixture(autouse=True, scope="session")
def plans_compared() -> Iterator[None]:
    """Whatever a step is computed from is what it would be if it were found anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qada_cache.attention.plan.CHECKS", True)
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_built_ahead() -> Iterator[None]:
    """A prompt starts no build that the test may not wait for, and that the next one would take time for. Processes of
    their own do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qada_cache.attention.call.build_for_prompt", lambda *_: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def earlier_kernels(request: pytest.FixtureRequest, cache_folder: Path) -> Iterator[None]:
    """C++ kernels that this run's other processes and earlier runs compiled: their names are digests of all that they
    were compiled from."""
    from qada_cache import files  # with the settings above
    from qada_cache.kernels.cpu import building

    if not hasattr(request.config, "cache"):  # pytest was told to keep nothing
        yield
        return
    earlier = request.config.cache.mkdir("kernels")
    for kernel in earlier.iterdir():
        with suppress(FileNotFoundError):  # another process removes it
            if time.time() - kernel.stat().st_mtime > KEPT_SECONDS:
                kernel.unlink()
    own, load = cache_folder / "kernels", building._load

    def load_any(source: Path, macros: tuple[str, ...]) -> Any:
        if files.find_home() != cache_folder:  # a test's own
            return load(source, macros)
        with files.open_folder_at(own, make=True) as kernels:
            for name in list_kernels(earlier) - list_kernels(own):
                files.write(name, ((earlier / name).read_bytes(),), folder=kernels)
        library = load(source, macros)
        for name in list_kernels(own) - list_kernels(earlier):
            files.write(earlier / name, ((own / name).read_bytes(),))
        return library

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "_load", load_any)
        yield


@pytest.fixture(autouse=True, scope="session")
def parsed_headers() -> Iterator[None]:
    """C++ kernels are compiled with headers that are parsed once."""
    from compilers import parse_headers_once  # with the settings above

    with tempfile.TemporaryDirectory(prefix="qada-headers-") as folder, pytest.MonkeyPatch.context() as patch:
        parse_headers_once(patch, Path(folder))
        yield


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Triton's interpreter does nothing twice that need not be."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton") and os.environ["TRITON_INTERPRET"] == "1":
            from quick_interpreter import quicken  # with the settings above

            quicken(patch)
        yield


@pytest.fixture(autouse=True, scope="module")
def objects_of_others() -> None:
    """Exempt from garbage collection what was imported, and what earlier modules left: a search of it takes up to a
    second, whenever a test collects."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """If a test has imported lm-eval, keep it from describing the machine: that takes a dozen processes for every
    result."""
    if "lm_eval" in sys.modules:
        from lm_eval import evaluator

        evaluator.add_env_info = lambda _: None


@pytest.fixture
def builds_of_others(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A cache folder of the test's own is filled without the compiler where this run or an earlier one needed it."""
    from compilers import build_once  # with the settings above

    kept = hasattr(request.config, "cache")
    build_once(monkeypatch, request.config.cache.mkdir("kernels") if kept else tmp_path_factory.mktemp("kernels"))


def list_kernels(folder: Path) -> set[str]:
    return {kernel.name for kernel in folder.glob("*.so")}


@pytest.fixture
def triton_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder in which Triton keeps, by their sources, kernels that this run and earlier ones compiled for GPUs."""
    return request.config.cache.mkdir("triton") if hasattr(request.config, "cache") else tmp_path


# What names of our tasks, and of those of lm-eval's that tests and documents ask for, begin with.
ASKED_FOR = re.compile(rb"\b(qada|prose|long|needle|niah|ruler|longbench)_|\bwikitext\b")


@pytest.fixture(scope="session")
def all_tasks() -> Any:
    """The index of our tasks and lm-eval's, of files that have a name asked for: parsing all 14,000 takes seconds."""
    tasks = pytest.importorskip("lm_eval.tasks", reason="tasks are lm-eval's")
    index = pytest.importorskip("lm_eval.tasks._index").TaskIndex
    walk = index._iter_yaml_files
    with pytest.MonkeyPatch.context() as patch:
        some = staticmethod(lambda root: (path for path in walk(root) if ASKED_FOR.search(path.read_bytes())))
        patch.setattr(index, "_iter_yaml_files", some)
        return tasks.TaskManager()
