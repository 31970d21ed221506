"""`python -m eval.turns`."""

import csv
from pathlib import Path

import pytest


def test_turns(tmp_path: Path) -> None:
    """Every turn has a row for each cache, beside those of both of transformers' own."""
    from eval import turns

    arguments = ["--model", "tiny", "--dtype", "float32", "--device", "cpu", "--tokens", "300", "200", "--rounds", "2"]
    assert turns.main([*arguments, "--turns", "3", "150", "--out", str(tmp_path)]) == 0
    with (tmp_path / "turns-tiny-cpu.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    methods = ("DynamicCache", "StaticCache", "QAdACache")
    wanted = [(name, tokens, turn) for tokens in ("300", "200") for name in methods for turn in ("3", "150")]
    assert [(row["method"], row["tokens"], row["turn"]) for row in rows] == wanted
    assert all(row["over_dynamic"] == "1.00" for row in rows if row["method"] == "DynamicCache")
    for row in rows:
        dense = next(one for one in rows if (one["tokens"], one["turn"]) == (row["tokens"], row["turn"]))
        took, of_dense, half = float(row["turn_ms"]), float(dense["turn_ms"]), 0.0501  # what a rounded one may be off
        least, most = (took - half) / (of_dense + half), (took + half) / (of_dense - half)
        assert least - 0.0051 <= float(row["over_dynamic"]) <= most + 0.0051


@pytest.mark.parametrize("wrong", [["--turns", "0"], ["--rounds", "0"], ["--model", "no/such"]])
def test_wrong_arguments(wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from eval import turns

    with pytest.raises(SystemExit) as raised:
        turns.main(["--model", "tiny", *wrong, "--out", str(tmp_path)])
    assert raised.value.code == 2
    assert wrong[0] in capsys.readouterr().err
