"""`python -m eval.reuse`: every way of having a document's cache again leads to the same answers."""

from pathlib import Path

import needle
import pytest

from eval import reuse
from eval.shared.tables import read


def test_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.csv"
    arguments = ["copies", "--model", str(needle.FOLDER), "--tokens", "600", "--answer", "3", "--out", str(table)]
    assert reuse.main([*arguments, "--questions", "2"]) == 0
    rows = read(table)
    assert [row["same"] for row in rows] == ["1/1", *["2/2"] * 5]
    assert len({row["way"] for row in rows}) == 6
    with pytest.raises(SystemExit):
        reuse.main([*arguments, "--questions", "17"])
    assert "--questions must be 1 to 16" in capsys.readouterr().err


@pytest.mark.slow
def test_restart(tmp_path: Path) -> None:
    """Every process answers as the one that kept its cache; by the store it reads the question alone."""
    table = tmp_path / "table.csv"
    arguments = ["restart", "--model", str(needle.FOLDER), "--tokens", "600", "--rounds", "1", "--answer", "3"]
    assert reuse.main([*arguments, "--folder", str(tmp_path), "--out", str(table)]) == 0
    first, *rows, third, edited = read(table)
    assert [row["way"] for row in rows] == list(reuse.WAYS)
    assert [row["as_kept"] for row in (*rows, third, edited)] == ["1/1"] * 6
    assert int(third["tokens_read"]) < 40
    assert 200 < int(edited["tokens_read"]) < 240
    assert {row["tokens_read"] for row in rows[:2]} == {first["tokens_read"]}
    assert all(int(row["tokens_read"]) < 20 for row in rows[2:])
    assert first["bytes"] == first["files_bytes"]
    assert float(first["turn_mib"]) < 0.7 * float(first["whole_mib"])
