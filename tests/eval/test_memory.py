"""`python -m eval.memory`: what is held is less in fewer bits, and grows with the context alone."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import needle
import pytest

from eval import memory
from eval.shared import processes, workloads
from eval.shared.tables import read


def hold_here(command: str, part: str, **options: Any) -> dict[str, Any]:
    """Stands in for `run_alone`: measures in this process."""
    assert (command, part) == ("memory", "held")
    told = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert memory.main([part, *told]) == 0
    return json.loads(printed.getvalue())


@pytest.mark.usefixtures("default_bits")  # as processes have it
def test_held(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 1,600 tokens in fewer bits takes less memory; wrong arguments get one line."""
    monkeypatch.setattr(memory, "run_alone", hold_here)
    monkeypatch.setattr(memory, "CACHES", ("DynamicCache", "QAdACache", "QAdACache, 4 bits"))
    table, model = tmp_path / "table.csv", ["held", "--model", str(needle.FOLDER), "--dtype", "float32"]
    assert memory.main([*model, "--tokens", "1600", "--new-tokens", "2", "--chunk", "700", "--out", str(table)]) == 0
    rows = {row["cache"]: row for row in read(table)}
    assert list(rows) == list(memory.CACHES)
    assert {row["chunk"] for row in rows.values()} == {"700"}
    held = {name: float(row["held_mib"]) for name, row in rows.items()}
    assert held["QAdACache, 4 bits"] < held["QAdACache"] < held["DynamicCache"]
    sizes = {name: float(row["file_mib"] or 0) for name, row in rows.items()}
    assert 0 == sizes["DynamicCache"] < sizes["QAdACache, 4 bits"] < sizes["QAdACache"] < held["DynamicCache"]
    assert all(float(row["peak_mib"]) >= 0.9 * held[name] for name, row in rows.items())
    assert 0 < float(rows["QAdACache"]["copy_mib"]) < 2 * held["QAdACache"]
    for name, row in rows.items():
        assert float(row["over_dynamic"]) == pytest.approx(held[name] / held["DynamicCache"], abs=0.05)
    with pytest.raises(SystemExit):
        memory.main([*model, "--tokens", "0"])
    assert "--tokens, --new-tokens and --rounds must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_of_its_own() -> None:
    told = {"model": needle.FOLDER, "tokens": 1600, "dtype": "float32", "new_tokens": 2, "chunk": 0}
    found = processes.run_alone("memory", "held", **told, cache="QAdACache, 4 bits")
    assert found["peak"] > found["held"] > found["file"] > found["copy"] > 0


def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The context grows, what is on the device does not, but for moments; wrong arguments are said in a line."""
    table, (hidden, mlp, _, *sizes) = tmp_path / "t.csv", workloads.GEOMETRIES["tiny"]
    monkeypatch.setitem(workloads.GEOMETRIES, "tiny", (hidden, mlp, 2, *sizes))
    arguments = ["soak", "--model", "tiny", "--prompt", "300", "--dtype", "float32", "--device", "cpu"]
    assert memory.main([*arguments, "--tokens", "140", "--out", str(table)]) == 0
    rows = read(table)
    assert [row["rows"] for row in rows] == ["one", "two, one padded"]
    for row in rows:
        assert float(row["last_host_mib"]) > float(row["first_host_mib"]) > 0
        moments = 2 * 4 * 64 * (1 + 64) * 4 / 2**20  # of layers, KV heads and dim: mean and covariance, float32
        more = float(row["last_device_mib"]) - float(row["first_device_mib"])
        assert -0.1 < more < 2 * moments + 0.1  # of two rows at most, which the first step asks for
    with pytest.raises(SystemExit):
        memory.main([*arguments, "--tokens", "3"])
    assert "--tokens must be at least 20" in capsys.readouterr().err
