"""`python -m eval.latency`: every cache has its row, and figures over each other's are right."""

import os
from pathlib import Path
from typing import Any

import pytest

from eval import latency
from eval.shared.tables import read
from qada_cache import KeyMoments
from qada_cache.kernels.cpu import building

TINY = ["--model", "tiny", "--dtype", "float32", "--device", "cpu", "--tokens", "300", "200"]
ROUNDED = 0.0501  # what a time in a table may be off


def test_first_token(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cache reads another prompt for its key moments, later ones do not; the user's folder is left alone."""
    collected, collect = [], KeyMoments.collect
    monkeypatch.setattr(
        KeyMoments, "collect", lambda *given, **named: collected.append(given[2]) or collect(*given, **named)
    )
    before, table, build = os.environ.get("QADA_HOME"), tmp_path / "t.csv", building._load

    def build_at_home(*given: Any) -> Any:  # an empty folder would have kernels compiled again
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QADA_HOME", str(cache_folder))
            return build(*given)

    monkeypatch.setattr(building, "_load", build_at_home)
    monkeypatch.setattr(latency, "check_selects", lambda *_, **__: None)  # prompts are too short for it
    assert latency.main(["prompt", *TINY, "--rounds", "1", "--prefill", "3", "--out", str(table)]) == 0
    assert os.environ.get("QADA_HOME") == before
    assert collected == ["random-tokens"]
    of_first = ["DynamicCache", "StaticCache", "QAdACache, the first time", "QAdACache"]
    of_first += ["QAdACache, prefill_threshold=3"]
    named = [("300", name) for name in of_first] + [("200", name) for name in of_first if "time" not in name]
    rows = read(table)
    assert [(row["tokens"], row["method"]) for row in rows] == named
    assert all(float(row["first_token_s"]) > 0 and float(row["second_token_ms"]) > 0 for row in rows)
    assert all(row["against_dynamic"] == "1.00" for row in rows if row["method"] == "DynamicCache")


def test_turns(tmp_path: Path) -> None:
    """Every turn has a row for each cache, beside those of both of transformers' own."""
    table = tmp_path / "t.csv"
    assert latency.main(["turns", *TINY, "--rounds", "1", "--turns", "3", "150", "--out", str(table)]) == 0
    rows, methods = read(table), ("DynamicCache", "StaticCache", "QAdACache")
    wanted = [(name, tokens, turn) for tokens in ("300", "200") for name in methods for turn in ("3", "150")]
    assert [(row["method"], row["tokens"], row["turn"]) for row in rows] == wanted
    took = {key: float(row["turn_ms"]) for key, row in zip(wanted, rows, strict=True)}
    for (_, *turn), row in zip(wanted, rows, strict=True):
        for column, other in (("over_dynamic", "DynamicCache"), ("over_static", "StaticCache")):
            mine, theirs = took[(row["method"], *turn)], took[(other, *turn)]
            least, most = (mine - ROUNDED) / (theirs + ROUNDED), (mine + ROUNDED) / (theirs - ROUNDED)
            assert least - 0.0051 <= float(row[column]) <= most + 0.0051


def test_prompts_that_are_read_exactly_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their row would say that they are read by selection."""
    with pytest.raises(SystemExit, match="2"):
        latency.main(["prompt", *TINY, "--prefill", "0", "3", "--out", str(tmp_path / "t.csv")])
    assert "error: --prefill: a prompt of 200 tokens is read exactly" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [["--turns", "0"], ["--rounds", "0"], ["--model", "no/such"], ["--out", "no/such.csv"]],
)
def test_wrong_arguments(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        latency.main(["turns", *TINY, *wrong])
    assert wrong[0] in capsys.readouterr().err
