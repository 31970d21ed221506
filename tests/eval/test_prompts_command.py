"""`python -m eval.prompts`: what selection loses of a prompt, and how fast attention is."""

from pathlib import Path

import needle
import pytest
import torch

from eval import prompts
from eval.shared.tables import read
from qada_cache.kernels.cpu import prompt


def test_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lower the threshold, the less is lost, and the more is read; nothing, where no kernel selects."""
    table, model = tmp_path / "table.csv", ["loss", "--model", str(needle.FOLDER), "--dtype", "float32"]
    arguments = ["--tokens", "1500", "--documents", "1", "--thresholds", "1e-9", "100", "--out", str(table)]
    assert prompts.main([*model, *arguments, "--texts", "prose", "code"]) == 0
    rows = read(table)
    assert [row["text"] for row in rows] == ["prose", "prose", "code", "code"]
    for low, high in (rows[:2], rows[2:]):
        assert abs(float(low["kl"])) < 1e-5
        assert float(low["kl"]) <= float(high["kl"])
        assert float(high["pairs"]) <= float(low["pairs"]) <= 1
    with pytest.raises(SystemExit):
        prompts.main([*model, "--tokens", "512"])
    assert "--tokens must be above 512" in capsys.readouterr().err


def test_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are told apart where the kernel runs; elsewhere a line says that it does not."""
    table = tmp_path / "table.csv"
    if prompt.build(64, 64, torch.bfloat16) is not None:
        arguments = ["rate", "--tokens", "600", "--dims", "64", "--rounds", "1", "--out", str(table)]
        assert prompts.main(arguments) == 0
        rows = read(table)
        assert [row["dtype"] for row in rows] == ["bfloat16", "float32"]
        for row in rows:
            assert 0.3 < float(row["error"]) < 3
            assert float(row["faster"]) > 0
    monkeypatch.setattr(prompt, "serves", lambda *_, **__: False)
    with pytest.raises(SystemExit):
        prompts.main(["rate"])
    assert "neither AVX2 nor NEON" in capsys.readouterr().err
