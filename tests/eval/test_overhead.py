"""`python -m eval.overhead`: parts are the package's, and a replayed step launches nothing."""

from pathlib import Path
from typing import Any

import needle
import pytest
from compilers import needs_compiler

from eval import overhead
from eval.shared.tables import read

RESULTS = Path(__file__).parents[2] / "eval" / "results"


@needs_compiler
@pytest.mark.parametrize(("model", "tokens"), [("tiny", "1500"), (str(needle.FOLDER), "2048")])
def test_step(model: str, tokens: str, tmp_path: Path) -> None:
    """A model given by its sizes, and one with a tokenizer, are measured; the parts do not exceed the whole."""
    table = tmp_path / "t.csv"
    options = ["--dtype", "float32", "--steps", "3", "--rounds", "1", "--out", str(table)]
    assert overhead.main(["step", "--model", model, "--tokens", tokens, *options]) == 0
    (row,) = read(table)
    assert row["tokens"] == tokens
    assert all(float(row[f"{part}_us"]) > 0 for part in overhead.PARTS)
    assert "the_rest_us" in row
    assert 0 < float(row["share"]) < 1
    assert float(row["in_turn"]) > 0


@pytest.mark.parametrize("wrong", [["--model", "nothing"], ["--out", "no/such.csv"], ["--tokens", "many"]])
def test_wrong_arguments(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        overhead.main(["step", *wrong])
    assert wrong[0] in capsys.readouterr().err


class Launched:
    """Stands in for a kernel of Triton's: counts its launches."""

    def __init__(self, name: str, launched: list[Any]) -> None:
        self.name, self.launched = name, launched

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: self.launched.append(self.name)


def test_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Columns are the committed table's; with a sketch there is a launch more."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton", exc_type=ModuleNotFoundError)
    from eval.shared import launch_time
    from eval.shared.compiling import KERNELS
    from qada_cache.kernels import triton as triton_decode

    for name in KERNELS:
        monkeypatch.setattr(triton_decode, name, Launched(name, launch_time.Launcher.launched))
    monkeypatch.setattr(launch_time.driver, "set_active", lambda _: None)
    monkeypatch.setattr(launch_time, "LAYERS", 2)
    monkeypatch.setattr(launch_time, "SKETCHES", {"0": (0, 16), "1.5+8": (1.5, 8)})
    table = tmp_path / "t.csv"
    assert overhead.main(["launch", "--steps", "2", "--out", str(table)]) == 0
    rows = read(table)
    assert list(rows[0]) == list(read(RESULTS / "launch_time.csv")[0])
    assert [(row["sketch"], row["launches"]) for row in rows] == [("0", "2"), ("1.5+8", "3")]
    assert all(0 < float(row["graph_us"]) < float(row["host_us"]) for row in rows)
    with pytest.raises(SystemExit):
        overhead.main(["launch", "--steps", "101"])
    assert "--steps must be 1 to 100" in capsys.readouterr().err
