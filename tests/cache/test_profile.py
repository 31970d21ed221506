"""`qada profile`: both caches on one long prompt."""

import csv
from pathlib import Path

import needle
import pytest

from qada_cache.__main__ import main
from qada_cache.profile import Profile

ARGUMENTS = ["profile", "--model", str(needle.FOLDER), "--prompt-tokens", "600", "--new-tokens", "3"]


def test_table_csv_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bulk is on the host, DynamicCache's all on the device; every token has a row."""
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    files = tmp_path / "tokens.csv", tmp_path / "plot.png"
    arguments = ["--chunk", "256", "--layers", "--out", str(files[0]), "--plot", str(files[1])]
    assert main([*ARGUMENTS, *arguments]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    dynamic, ours = (next(line for line in lines if line[:1] == [name]) for name in ("DynamicCache", "QAdACache"))
    per_token = 4 * 2 * 4 * 32 * 4  # layers, keys and values, KV heads, dims, bytes
    assert dynamic[4] == "100.0%"
    assert 0.0 <= float(ours[4].removesuffix("%")) <= 100.0  # a bulk this short is read by whole heads
    assert float(dynamic[5]) == pytest.approx(603 * per_token / 2**20, abs=0.1)
    assert dynamic[6] == "0.0"
    assert float(ours[6]) >= (600 - 128) * per_token / 2**20 - 0.1
    assert len([line for line in lines if line[:1] and line[0] in "0123"]) == 4
    with files[0].open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["cache"], row["token"]) for row in rows] == [
        (name, str(token)) for name in ("DynamicCache", "QAdACache") for token in range(3)
    ]
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert files[1].read_bytes()[:4] == b"\x89PNG"


def test_a_prompt_without_a_bulk(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was decided, so no shares are known."""
    assert main([*ARGUMENTS[:3], "--prompt-tokens", "20", "--new-tokens", "2", "--layers"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in lines if line[:1] and line[0] in "0123"] == ["-"] * 4
    assert main([*ARGUMENTS[:3], "--prompt-tokens", "126", "--new-tokens", "4"]) == 0  # decided, and read from none
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(line for line in lines if line[:1] == ["QAdACache"])[4] == "-"


@pytest.mark.parametrize(("tokens", "found"), [(1, ["1.0", "1.0"]), (2, ["1.5", "2.0"]), (40, ["20.5", "38.0"])])
def test_percentiles(tokens: int, found: list[str]) -> None:
    times = [(count / 1e3, 0, 0) for count in range(tokens, 0, -1)]
    row = Profile("any", 1.0, times, 1.0, None, []).summarize()
    assert [row["ms/token p50"], row["ms/token p95"]] == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "words"], r"cannot load the model .*has no attribute 'words'"),
        (["--device-map", "meta:words"], r"cannot load the model .*meta:words"),
        (["--chunk", "0"], "--chunk must be at least 1, got 0"),
        (["--new-tokens", "-1"], "--new-tokens must be at least 1, got -1"),
        (["--prompt-tokens", "99999"], r"come to 100002 tokens, and the model has 32768 positions"),
        (["--out", "/nowhere/x.csv"], "--out: there is no folder /nowhere"),
        (["--plot", "/nowhere/x.png"], "--plot: there is no folder /nowhere"),
        (["--plot", "x.words"], r"--plot: matplotlib draws no \.words files, but .*png"),
        (["--threshold", "3"], r"threshold must be in \[0, 1\], got 3.0"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    assert main([*ARGUMENTS, *arguments]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qada profile: ")]
    assert len(error) == 1
    assert re.search(message, error[0])
