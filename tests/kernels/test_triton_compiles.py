"""The decode kernels compile for CUDA, which needs no device, and for no more variants than they should."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from decode_scene import Scene, step_of
from record_scene import RecordScene

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from qada_cache.kernels import triton as triton_decode
from qada_cache.kernels.triton import launching

RUN = """
import runpy, sys
for command in sys.argv[1:]:
    sys.argv = command.split()
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_compiled(folder: Path, *commands: str) -> str:
    """Run scripts of tests/helpers in one process without Triton's interpreter; return their output."""
    helpers = Path(__file__).parents[1] / "helpers"
    path = [str(helpers), str(helpers.parents[1]), os.environ.get("PYTHONPATH", "")]
    told = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(path)}
    command, where = [sys.executable, "-c", RUN, *commands], {"env": os.environ | told, "cwd": helpers}
    ran = subprocess.run(command, **where, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_compiled_kernels(triton_folder: Path) -> None:
    """They compile for CUDA; bound steps launch what Triton would; and for other options and rows, as text and bulk
    grow, nothing is compiled that `prepare` has not."""
    said = run_compiled(triton_folder, "compile_for_cuda.py few", "direct_launches.py", "prepared_variants.py")
    assert said.count("bytes of shared memory") == 27
    assert said.count("3 kernels are called directly, and one for 5 kinds of calls") == 1
    assert said.count("variants") == 7


def test_a_process_in_use_for_long_compiles_nothing_again(triton_folder: Path) -> None:
    """Whatever lengths its texts, turns and buffers have; and no launch takes a kernel compiled for other arguments."""
    assert run_compiled(triton_folder, "long_life.py").count("variants so far") == 4


@pytest.mark.slow
def test_kernels_of_other_sizes_compile_for_cuda(triton_folder: Path) -> None:
    assert run_compiled(triton_folder, "compile_for_cuda.py rest").count("bytes of shared memory") == 217


@pytest.mark.parametrize(("bits", "coded"), [(0, False), (2, False), (2, True)])
def test_nothing_is_compiled_anew_when_the_bulk_grows(
    bits: int, coded: bool, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' constants, for each set of which Triton compiles anew, do not depend on the bulk's capacity."""
    monkeypatch.setattr(triton_decode, "MIN_TOKENS", 1)
    for stored in (40, 300, 1500, 5000):
        scene = (RecordScene if coded else Scene)(bulk=[(stored, 9)] * 3, short=(), bits=bits)
        triton_decode.fused_decode(*step_of(**scene.step_arguments("cpu", 0.5)))
    constants = {(name, repr(sorted(told.items()))) for name, told in launched}
    assert len(constants) == (3 if bits else 2)


@pytest.mark.parametrize("apart", [False, True])
def test_no_garbage_is_collected_while_kernels_compile_side_by_side(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pythons whose threads break each other's syntax trees need this. It is collected afterwards, if it was before."""
    seen = []
    kernel = launching.JITFunction.__new__(launching.JITFunction)
    kernel.__dict__["warmup"] = lambda **_: seen.append(gc.isenabled())
    monkeypatch.setattr(launching, "TREES_ARE_APART", apart)
    for collecting in (True, False):
        (gc.enable if collecting else gc.disable)()
        try:
            launching.compile_together([(launching.Launches(), kernel, (1, 1, 1), ())])
            assert gc.isenabled() is collecting
        finally:
            gc.enable()
    assert seen == [apart, False]


def test_what_is_compiled_ahead_is_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is called for the kernels that it would launch. An error of its own ends this; then it launches again."""
    monkeypatch.setattr(launching.knobs.runtime, "interpret", False)
    compiled, launched = list[Any](), list[Any]()

    class Kernel(launching.JITFunction):
        def __init__(self) -> None:
            """Without a function to compile."""

        def warmup(self, *args: Any, **told: Any) -> None:
            compiled.append((args, told))

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **told: launched.append((args, grid, told))

    launches, kernel = launching.Launches(SIZE=4), Kernel()

    def work(counts: tuple[int, ...]) -> None:
        for count in counts:
            launches.launch(kernel, (count, 1, 1), (), 3 // count)

    launching.compile_ahead(lambda: work((1, 3)))
    with pytest.raises(ZeroDivisionError):
        launching.compile_ahead(lambda: work((1, 0)))
    assert compiled == [((3 // count,), {"grid": (count, 1, 1), **launching.FUSING, "SIZE": 4}) for count in (1, 3)]
    assert not launched
    work((3,))
    assert launched == [((1,), (3, 1, 1), launching.FUSING | {"SIZE": 4})]


def test_kernels_that_two_threads_compile_are_not_dropped() -> None:
    """Each may be in a graph."""
    launches, made = launching.Launches(), list[Any]()

    class Compiled:
        """A kernel that can be launched."""

    class Kernel:
        arg_names = ()

        def __getitem__(self, grid: Any) -> Any:
            return self.run

        def run(self, **told: Any) -> Any:
            if not made:  # meanwhile another thread compiles and launches it
                made.append(None)
                launches.launch(self, (1, 1, 1), ())
            compiled = Compiled()
            made.append(weakref.ref(compiled))
            return compiled

    launches.launch(Kernel(), (1, 1, 1), ())
    assert [kept() is not None for kept in made[1:]] == [True, True]
