"""`eval.regressions`: what counts as slower, what is recorded, and the committed tables against the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval import regressions
from eval.shared.tables import read, write


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
        assert regressions.main(["--results", str(tmp_path)]) == status
        assert f"{status} of 1 are below 0.75" in capsys.readouterr().out


def test_present_tables_are_recorded(tmp_path: Path) -> None:
    write(
        tmp_path / "benchmark-m-cpu.csv", [row(1.5), row(1.0, method="StaticCache"), row(2.0, method="QAdACache f=1")]
    )
    assert regressions.main(["--results", str(tmp_path), "--record"]) == 0
    assert regressions.main(["--results", str(tmp_path), "--record"]) == 0
    kept = read(tmp_path / "medians.csv")
    assert [one["against_static"] for one in kept] == ["1.5", "2.0"] * 2
    assert all(one["date"] for one in kept)


def test_committed_tables_are_no_slower_than_the_record() -> None:
    assert regressions.main([]) == 0
