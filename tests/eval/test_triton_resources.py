"""The committed table of what Triton's kernels are compiled to is of this tree."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval.shared.tables import read

TABLE = Path(__file__).parents[2] / "eval" / "results" / "triton-resources.csv"
COLUMNS = ["kernel", "dim", "group", "sketch", "architecture", "registers", "stack", "shared", "instructions"]
COLUMNS += ["loops", "tokens", "warps"]
MADE_WITH = "3.7.1"  # of Triton, whose assembler allots registers
ROWS = {"dim": "96", "sketch": "1.5+8", "architecture": "sm_90"}  # of the table, that are compiled


def test_nothing_spills() -> None:
    """No kernel spills registers, as docs/speed.md says."""
    rows = read(TABLE)
    assert list(rows[0]) == COLUMNS
    assert len(rows) == 468
    assert {row["stack"] for row in rows} == {"0"}
    assert {row["architecture"] for row in rows} == {"sm_80", "sm_89", "sm_90"}


def test_what_selection_of_a_prompt_takes() -> None:
    """A warp's instructions for a pair, relative to those of exact attention, are as docs/method.md says."""
    like, issued = {"dim": "128", "group": "128", "architecture": "sm_90"}, {}
    for row in read(TABLE):
        if row["kernel"] in ("share_kernel", "sample_kernel", "read_kernel") and like.items() <= row.items():
            times = int(row["warps"]) / int(row["tokens"])
            issued[row["kernel"]] = [int(count) * times for count in row["loops"].split()]
    (summing, sharing), (drawing,), (exact, reading) = issued.values()
    assert reading / exact == pytest.approx(1.17, abs=0.005)
    for stride, wanted in ((16, 0.22), (64, 0.19)):
        assert (sharing + summing / stride + drawing) / exact == pytest.approx(wanted, abs=0.005)


@pytest.mark.parametrize("sketch", ["1.5", "1.5+8", "1.5+4"])
def test_estimates_leave_room_for_four_programs(sketch: str) -> None:
    """A program estimates 256 tokens at once, and runs each instruction at most once for them."""
    like = {"kernel": "estimate_kernel", "dim": "128", "group": "4", "sketch": sketch}
    rows = [row for row in read(TABLE) if like.items() <= row.items()]
    assert len(rows) == 3
    for row in rows:
        assert int(row["registers"]) <= 128
        assert int(row["instructions"]) <= 1300


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed: pip install triton")
def test_the_table_is_of_this_tree(tmp_path: Path, triton_folder: Path) -> None:
    import triton

    if triton.__version__ != MADE_WITH:
        pytest.skip(f"the table was made with Triton {MADE_WITH}")
    asked = ["--dims", "96", "--sketches", "1.5+8", "--architectures", "90", "--out", tmp_path / "found.csv"]
    # In a process whose kernels are not bound to the interpreter.
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(triton_folder)}
    subprocess.run([sys.executable, "-m", "eval.triton_resources", *asked], env=environment, check=True)
    of_table = [row for row in read(TABLE) if ROWS.items() <= row.items()]
    assert read(tmp_path / "found.csv") == of_table
    assert len(of_table) == 4
