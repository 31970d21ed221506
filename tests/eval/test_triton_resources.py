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
MADE_WITH = "3.7.1"  # of Triton, whose assembler allots registers
ROWS = {"dim": "96", "sketch": "1.5+8", "architecture": "sm_90"}  # of the table, that are compiled


def test_hardly_anything_spills() -> None:
    """As docs/speed.md says."""
    rows = read(TABLE)
    assert list(rows[0]) == COLUMNS
    spilled = [int(row["stack"]) for row in rows if row["stack"] != "0"]
    assert (len(spilled), len(rows), set(spilled)) == (8, 240, {8, 16})
    assert {row["architecture"] for row in rows} == {"sm_80", "sm_90"}


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed: pip install triton")
def test_the_table_is_of_this_tree(tmp_path: Path) -> None:
    import triton

    if triton.__version__ != MADE_WITH:
        pytest.skip(f"the table was made with Triton {MADE_WITH}")
    asked = ["--dims", "96", "--sketches", "1.5+8", "--architectures", "90", "--out", tmp_path / "found.csv"]
    # In a process whose kernels are not bound to the interpreter.
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "eval.triton_resources", *asked], env=environment, check=True)
    of_table = [row for row in read(TABLE) if ROWS.items() <= row.items()]
    assert read(tmp_path / "found.csv") == of_table
    assert len(of_table) == 4
