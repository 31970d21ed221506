"""`python -m eval.NAME` with wrong arguments: one line says what is wrong before anything is measured."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import needle
import pytest
from transformers import DeepseekV3Config, LlamaConfig

from eval import benchmark
from eval.shared.processes import run_alone

pytest.importorskip("lm_eval", reason="some commands run on lm-eval")

WRONG = {  # arguments, by what is said of them
    "codes rungs --documents 0 --out x.csv": "--documents: invalid count",
    "codes rungs --lengths -1 --out x.csv": "--lengths: invalid length",
    "codes rungs --lengths 130 --out x.csv": "--lengths: invalid length (a whole number above 130)",
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
    "trials --lengths 300 130 --out x.csv": "--lengths: invalid length",
    "heads --lengths 130 --out x.csv": "--lengths: invalid length",
    "sweep --lengths 130 --out x.csv": "--lengths: invalid length",
    "trials --model wide --lengths 131 --tasks chat --out x.csv": "tokens leave no room for a document",
    "trials --model nosuch --tasks prose nosuch --out x.csv": "--tasks: lm-eval has no task nosuch",
    "trials --model wide --text held.csv --lengths 300 --out x.csv": "--lengths: no text has 300",
    "trials --model wide --lengths 300 9999999 --out x.csv": "--lengths: no text has 9999999",
    "trials --model wide --lengths 300 --out x.csv": "--model: the tokenizer does not know the words of the",
    "codes energies --model wide --lengths 9999999 --out x.csv": "--lengths: the text has no two pieces",
    "convert --out notes.txt/made": "--out: there is no folder notes.txt",
    "sweep --thresholds 3 --out x.csv": "--thresholds: invalid share",
    "sweep --alphas -1 --out x.csv": "--alphas: invalid share",
    "sweep --prefill -1 --out x.csv": "--prefill: invalid amount",
    "sweep --limit 0 --out x.csv": "--limit: invalid count",
    "sweep --out notes.txt": "--out: notes.txt exists, and is no table",
    "heads --limit -1 --out x.csv": "--limit: invalid count",
    "heads --moments nosuch --out x.csv": "--moments: invalid choice",
    "memory held --cache DynamicCache --model empty.txt": "--model: ",
    "memory held --out notes.txt": "--out: notes.txt exists, and is no table",
    "benchmark --out blank.txt": "--out: blank.txt exists, and is no table",
    "memory held --out one.csv": "--out: one.csv exists, and is no table",
    "trials --out two.csv": "--out: two.csv exists, and is no table",
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
    "reuse copies --model wide --tokens 9999999": "--tokens: the text has",
    "families --seconds nan": "--seconds: invalid amount",
    "triton_resources --architectures 1": "--architectures: invalid choice: 1",
    "triton_resources --dims 3": "--dims: invalid choice: 3",
}
WRITING = (  # tables; none writes over another's
    *("trials", "sweep", "heads", "codes rungs", "codes energies", "codes spreads", "memory soak", "benchmark"),
    *("latency prompt", "latency turns", "overhead step", "overhead launch", "prompts loss", "prompts rate", "demo"),
    *("reuse copies", "reuse restart", "families", "triton_resources", "gpu_step"),
)
WRONG |= {f"{command} --out held.csv": "--out: held.csv exists, and is no table of this command" for command in WRITING}
# Models of which nothing but a config is there.
UNSERVED = "--model: this command, with these options, does not serve latent attention"
WRONG |= {
    f"{command} --model latent --out x.csv": UNSERVED
    for command in ("heads", "codes rungs", "overhead step", "prompts loss", "latency prompt --prefill 4.4")
}
WRONG |= {f"trials {option} --model latent --out x.csv": UNSERVED for option in ("--peers", "--prefill 4")}
WRONG |= {"overhead step --model tiny-latent": UNSERVED}
WRONG |= {
    f"{command} 2049 --model short": "--model: short has 2048 positions, fewer than the "
    for command in (
        *(f"{name} --out x.csv --lengths" for name in ("trials", "sweep", "heads", "codes rungs")),
        *(f"{name} --tokens" for name in ("benchmark", "latency prompt", "latency turns", "overhead step")),
        *(f"{name} --tokens" for name in ("prompts loss", "memory soak", "reuse copies")),
        "memory held --cache DynamicCache --tokens",
    )
}


@pytest.fixture
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("root:x:0:0\nof somebody else, and precious\n")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "blank.txt").write_text("\nprecious\n")
    (tmp_path / "held.csv").write_text("cache,held_mib,peak_mib,machine\nDynamicCache,1.0,2.0,one\n")
    (tmp_path / "one.csv").write_text("held_mib,machine\n1.0,one\n")
    (tmp_path / "two.csv").write_text("kv_read,machine\n1.0,one\n")
    DeepseekV3Config().save_pretrained(tmp_path / "latent")
    LlamaConfig(max_position_embeddings=2048).save_pretrained(tmp_path / "short")
    (wide := tmp_path / "wide").mkdir()  # the needle model with more positions than any text has tokens
    for file in needle.FOLDER.glob("*.*"):
        (wide / file.name).symlink_to(file)
    (wide / "config.json").unlink()
    config = json.loads((needle.FOLDER / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**8}))
    monkeypatch.chdir(tmp_path)
    # The real one reads thousands of files.
    monkeypatch.setattr("eval.shared.lm_tasks.TaskManager", lambda metadata: SimpleNamespace(all_tasks=["prose_niah"]))


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("line", WRONG)
def test_one_line_says_what_is_wrong(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = line.split()
    before = {path: path.read_bytes() for path in Path().rglob("*.*")}
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"eval.{name}").main(arguments)
    assert ended.value.code == 2
    assert WRONG[line] in capsys.readouterr().err.splitlines()[-1]
    assert {path: path.read_bytes() for path in Path().rglob("*.*")} == before


def test_a_table_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(SystemExit):
        benchmark.main(["--out", str(tmp_path / "x.csv")])
    assert capsys.readouterr().err.strip().endswith(f"--out: {tmp_path / 'x.csv'} cannot be written")


def test_a_process_of_a_command_that_fails_says_why_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_alone("memory", "held", tokens=0)
    assert ended.value.code == 2
    assert "--tokens, --new-tokens and --rounds must be at least 1" in capfd.readouterr().err.splitlines()[-1]
