"""The decode kernels compile for CUDA, which their interpreter does not show, and needs no device."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed: pip install triton")
def test_kernels_compile_for_cuda(tmp_path: Path) -> None:
    """In a process of its own: in this one they may be bound to the interpreter already."""
    script = Path(__file__).parents[1] / "helpers" / "compile_for_cuda.py"
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),  # or nothing might be compiled
        "PYTHONPATH": os.pathsep.join([str(script.parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("bytes of shared memory") == 38
