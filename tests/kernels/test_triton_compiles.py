"""What the decode kernels are compiled for, and that they compile for CUDA, which needs no device."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from decode_scene import Scene, step_of
from record_scene import RecordScene

pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
from qada_cache.kernels import triton as triton_decode


def run_compiled(name: str, folder: Path, *arguments: str) -> str:
    """What a script of tests/helpers prints, in a process whose kernels are not bound to the interpreter."""
    script = Path(__file__).parents[1] / "helpers" / name
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize(("cases", "kernels"), [("few", 36), pytest.param("rest", 136, marks=pytest.mark.slow)])
def test_kernels_compile_for_cuda(cases: str, kernels: int, triton_folder: Path) -> None:
    assert run_compiled("compile_for_cuda.py", triton_folder, cases).count("bytes of shared memory") == kernels


def test_what_is_used_was_prepared(triton_folder: Path) -> None:
    """For other options and rows, as text and bulk grow, nothing is compiled that `prepare` has not."""
    assert run_compiled("prepared_variants.py", triton_folder).count("variants") == 7


def test_bound_steps_launch_what_triton_would(triton_folder: Path) -> None:
    assert run_compiled("direct_launches.py", triton_folder).startswith("3 kernels")


@pytest.mark.parametrize(("bits", "coded"), [(0, False), (2, False), (2, True)])
def test_nothing_is_compiled_anew_when_the_bulk_grows(
    bits: int, coded: bool, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels are compiled for, their constants, does not follow the capacity."""
    monkeypatch.setattr(triton_decode, "MIN_TOKENS", 1)
    for stored in (40, 300, 1500, 5000):
        scene = (RecordScene if coded else Scene)(bulk=[(stored, 9)] * 3, short=(), bits=bits)
        triton_decode.fused_decode(*step_of(**scene.step_arguments("cpu", 0.5)))
    constants = {(name, repr(sorted(told.items()))) for name, told in launched}
    assert len(constants) == (3 if bits else 2)
