"""eval/tables.mk against the committed tables: each has a target, whose programs take its commands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest
from documents import ROOT
from test_commands import program, read_by

from eval.shared.tables import read

RESULTS = ROOT / "eval/results"
TABLES = sorted(path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.suffix in (".csv", ".txt"))

if shutil.which("make") is None:
    pytest.skip("needs make", allow_module_level=True)


def recipe(table: str) -> list[str]:
    """The commands that `make tables/NAME` would run, in an environment that is set up."""
    command = ["make", "--dry-run", "--assume-old=.venv/.installed", f"tables/{table}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"eval/tables.mk has no target for {table}: {done.stderr}"
    return done.stdout.splitlines()


@pytest.mark.parametrize("table", TABLES)
def test_a_tables_commands(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for line in recipe(table) if ".venv/bin/" in line]
    assert lines
    for line in lines:
        words = shlex.split(line.partition("|| ")[2] or line, comments=True)
        words[0] = words[0].removeprefix(".venv/bin/")
        called = program(words)
        assert called is not None, line
        read_by(called, monkeypatch)
        if "--out" in words:
            assert words[words.index("--out") + 1] == f"eval/results/{table}"


@pytest.mark.parametrize(
    "table", [name for name in TABLES if re.search(r"(first_token|benchmark|turns|memory)-", name)]
)
def test_lengths_of_a_table_are_those_of_its_commands(table: str) -> None:
    rows = read(RESULTS / table)
    asked = {size for line in recipe(table) for size in re.findall(r"--tokens ([\dx ]+)", line)}
    wanted = {tuple(map(int, f"{size}x1".split("x")[:2])) for sizes in asked for size in sizes.split()}
    assert {(int(row["tokens"]), int(row.get("batch") or 1)) for row in rows} == wanted


def test_nothing_else_has_a_target() -> None:
    targets = re.findall(r"^(tables/.*):$|^(tables/.*):  #", (ROOT / "eval/tables.mk").read_text("utf-8"), re.MULTILINE)
    named = [name.removeprefix("tables/") for line in map("".join, targets) for name in line.split()]
    assert sorted(named) == TABLES
