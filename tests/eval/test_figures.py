"""Tables, and what `python -m eval.figures` makes of them: figures, summaries, and which benchmarks became slower."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib")
from matplotlib.image import imread

from eval import figures
from eval.shared.tables import read, write


def test_a_table_with_other_columns_is_added_to(tmp_path: Path) -> None:
    """One that an older version made: what it does not say is left empty."""
    table = tmp_path / "table.csv"
    write(table, [{"task": "a", "score": 1}], machine="x", add=True)
    write(table, [{"task": "b", "score": 2}], machine="x", add=True)
    assert table.read_text() == "task,score,machine\na,1,x\nb,2,x\n"
    write(table, [{"task": "c", "score": 3, "error": 0.5}], machine="y", add=True)
    assert [tuple(row.values()) for row in read(table)] == [
        ("a", "1", "", "x"),
        ("b", "2", "", "x"),
        ("c", "3", "0.5", "y"),
    ]
    write(table, [{"task": "d"}])
    assert table.read_text() == "task\nd\n"


def test_figures_are_those_of_the_tables(tmp_path: Path) -> None:
    """The committed pictures and the table of errors, drawn again, are the same."""
    assert figures.main(["draw", "--out", str(tmp_path)]) == 0
    made = sorted(path.name for path in tmp_path.iterdir())
    assert len(made) == len(figures.HEADS_FIGURES) + 5 + len(list(figures.RESULTS.glob("sweep*.csv")))
    for name in made:
        if name.endswith(".csv"):
            assert (tmp_path / name).read_bytes() == (figures.RESULTS / name).read_bytes()
        else:  # the numbers of the pictures: compression may differ between machines
            assert (imread(tmp_path / name) == imread(figures.RESULTS / name)).all(), name


def row(ratio: float, **changes: str) -> dict[str, str]:
    made = {"model": "m", "dtype": "float32", "method": "QAdACache", "tokens": "4096", "batch": "1"}
    return made | {"p50_ms": "40.0", "against_dynamic": "9", "against_static": f"{ratio}", "machine": "one"} | changes


def test_a_ratio_is_compared_with_the_median_of_its_own_past(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    past = [row(1.0), row(2.0), row(9.0), row(100.0, tokens="8192"), row(100.0, dtype="bfloat16")]
    write(tmp_path / "medians.csv", past, date="2026-01-01")
    table = tmp_path / "benchmark-m-cpu.csv"
    for ratio, status in ((1.51, 0), (1.49, 1)):  # of a median of 2
        write(table, [row(ratio), row(0.1, method="QAdACache f=1"), row(0.1, method="StaticCache")])
        assert figures.main(["compare", "--results", str(tmp_path)]) == status
        assert f"{status} of 1 are below 0.75" in capsys.readouterr().out


def test_present_tables_are_recorded(tmp_path: Path) -> None:
    write(
        tmp_path / "benchmark-m-cpu.csv", [row(1.5), row(1.0, method="StaticCache"), row(2.0, method="QAdACache f=1")]
    )
    assert figures.main(["compare", "--results", str(tmp_path), "--record"]) == 0
    assert figures.main(["compare", "--results", str(tmp_path), "--record"]) == 0
    kept = read(tmp_path / "medians.csv")
    assert [one["against_static"] for one in kept] == ["1.5", "2.0"] * 2
    assert all(one["date"] for one in kept)


def test_committed_tables_are_no_slower_than_the_record() -> None:
    assert figures.main(["compare"]) == 0
