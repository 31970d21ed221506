"""`python -m eval.NAME` with wrong arguments: one line says what is wrong before anything is measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import needle
import pytest

from eval.shared.processes import run_alone

pytest.importorskip("lm_eval", reason="some commands run on lm-eval")

WRONG = {  # arguments, by what is said of them
    "codes rungs --documents 0 --out x.csv": "--documents: invalid count",
    "codes rungs --lengths -1 --out x.csv": "--lengths: invalid count",
    "codes energies --lengths 128 --out x.csv": "--lengths must be above 128",
    "codes energies --bits nan --out x.csv": "--bits must be from 0.5 to 4",
    "codes rungs --out .": "--out: . is a folder",
    "codes rungs --out notes.txt": "--out: notes.txt exists, and is no table",
    "trials --out notes.txt": "--out: notes.txt exists, and is no table",
    "trials --documents 0 --out x.csv": "--documents: invalid count",
    "trials --following 0 --out x.csv": "--following: invalid count",
    "trials --prefill nan --out x.csv": "--prefill: invalid amount",
    "trials --dtype nosuch --out x.csv": "--dtype: invalid choice",
    "trials --text nosuch --out x.csv": "--text: nosuch cannot be read",
    "trials --text empty.txt --out x.csv": "--text: empty.txt is empty",
    "trials --lengths 300 128 --out x.csv": "--lengths must be above 128",
    "trials --model nosuch --tasks prose nosuch --out x.csv": "--tasks: lm-eval has no task nosuch",
    f"trials --model {needle.FOLDER} --prefill 0 --lengths 9999999 --out x.csv": "--lengths: no text has 9999999",
    f"codes energies --model {needle.FOLDER} --lengths 9999999 --out x.csv": "--lengths: the text has no two pieces",
    "convert --out notes.txt/made": "--out: there is no folder notes.txt",
    "sweep --thresholds 3 --out x.csv": "--thresholds: invalid share",
    "sweep --alphas -1 --out x.csv": "--alphas: invalid share",
    "sweep --prefill -1 --out x.csv": "--prefill: invalid amount",
    "sweep --limit 0 --out x.csv": "--limit: invalid count",
    "sweep --out notes.txt": "--out: notes.txt exists, and is no table",
    "trials --out held.csv": "--out: held.csv exists, and is no table of this command",
    "codes energies --out held.csv": "--out: held.csv exists, and is no table of this command",
    "sweep --out held.csv": "--out: held.csv exists, and is no table of this command",
    "heads --limit -1 --out x.csv": "--limit: invalid count",
    "heads --moments nosuch --out x.csv": "--moments: invalid choice",
    "memory held --cache DynamicCache --model empty.txt": "--model: ",
    "memory held --out notes.txt": "--out: notes.txt exists, and is no table",
    "benchmark --rounds 0": "--rounds: invalid count",
    "benchmark --out .": "--out: . is a folder",
    "benchmark --device nosuch": "--device: invalid device value: 'nosuch'",
    "sweep --device nosuch --out x.csv": "--device: invalid device value: 'nosuch'",
    "overhead step --tokens 0": "--tokens: invalid count",
    "latency prompt --tokens 0": "--tokens: invalid count",
    "latency prompt --prefill nan": "--prefill: invalid amount",
    "latency turns --turns 0": "--turns: invalid count",
    "reuse copies --tokens 0": "--tokens: invalid count",
    "reuse restart --folder nosuch": "--folder: there is no folder nosuch",
    "reuse restart --way PrefixStore": "--way: its --folder is to be given too",
    "reuse restart --folder . --way PrefixStore --model empty.txt": "--model: ",
    f"reuse copies --model {needle.FOLDER} --tokens 9999999": "--tokens: the text has",
    "families --seconds nan": "--seconds: invalid amount",
    "triton_resources --architectures 1": "--architectures: invalid choice: 1",
    "triton_resources --dims 3": "--dims: invalid choice: 3",
}


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("root:x:0:0\nof somebody else, and precious\n")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "held.csv").write_text("cache,machine\nDynamicCache,one\n")
    monkeypatch.chdir(tmp_path)
    # The real one reads thousands of files.
    monkeypatch.setattr("eval.shared.lm_tasks.TaskManager", lambda metadata: SimpleNamespace(all_tasks=["prose_niah"]))


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("line", WRONG)
def test_one_line_says_what_is_wrong(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = line.split()
    before = {path: path.read_text() for path in Path().iterdir()}
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"eval.{name}").main(arguments)
    assert ended.value.code == 2
    assert WRONG[line] in capsys.readouterr().err.splitlines()[-1]
    assert {path: path.read_text() for path in Path().iterdir()} == before


def test_a_process_of_a_command_that_fails_says_why_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_alone("memory", "held", tokens=0)
    assert ended.value.code == 2
    assert "--tokens, --new-tokens and --rounds must be at least 1" in capfd.readouterr().err.splitlines()[-1]
