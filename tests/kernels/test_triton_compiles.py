"""What the decode kernels are compiled for, and that they compile for CUDA, which needs no device."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from decode_scene import Scene, step_of
from record_scene import RecordScene

needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="triton is not installed: pip install triton"
)


def run_compiled(name: str, folder: Path, *arguments: str) -> str:
    """What a script of tests/helpers prints, in a process whose kernels are not bound to the interpreter."""
    script = Path(__file__).parents[1] / "helpers" / name
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),  # or nothing might be compiled
        "PYTHONPATH": os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@needs_triton
@pytest.mark.parametrize(("cases", "kernels"), [("few", 25), pytest.param("rest", 77, marks=pytest.mark.slow)])
def test_kernels_compile_for_cuda(cases: str, kernels: int, tmp_path: Path) -> None:
    assert run_compiled("compile_for_cuda.py", tmp_path, cases).count("bytes of shared memory") == kernels


@needs_triton
def test_what_is_used_was_prepared(tmp_path: Path) -> None:
    """For other options and rows, as text and bulk grow, nothing is compiled that `prepare` has not."""
    assert run_compiled("prepared_variants.py", tmp_path).count("variants") == 7


@needs_triton
def test_bound_steps_launch_what_triton_would(tmp_path: Path) -> None:
    assert run_compiled("direct_launches.py", tmp_path).startswith("3 kernels")


@needs_triton
@pytest.mark.parametrize(("bits", "coded"), [(0, False), (2, False), (2, True)])
def test_nothing_is_compiled_anew_when_the_bulk_grows(bits: int, coded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels are compiled for, their constants, does not follow the capacity."""
    from qada_cache.kernels import triton as triton_decode

    constants: dict[str, set[str]] = {}

    class Launched:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **kwargs: constants.setdefault(self.name, set()).add(repr(sorted(kwargs.items())))

    names = ("local_kernel", "bulk_kernel", "estimate_kernel", "selected_kernel")
    for name in names:
        monkeypatch.setattr(triton_decode, name, Launched(name))
    monkeypatch.setattr(triton_decode, "MIN_TOKENS", 1)
    for stored in (40, 300, 1500, 5000):
        scene = (RecordScene if coded else Scene)(bulk=[(stored, 9)] * 3, short=(), bits=bits)
        arguments = scene.arguments("cpu") | scene.decision_arguments()
        if bits:
            arguments |= scene.sketch_arguments("cpu", 0.5)
        if isinstance(scene, RecordScene):
            arguments |= scene.record_arguments("cpu")
        triton_decode.fused_decode(*step_of(**arguments))
    assert len(constants) == (3 if bits else 2)
    assert {name: len(found) for name, found in constants.items()} == dict.fromkeys(constants, 1)
