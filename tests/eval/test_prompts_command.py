"""`python -m eval.prompts`: what selection loses of a prompt, and how fast attention is."""

from pathlib import Path

import needle
import pytest
import sampled_prompt_reference as reference
import torch

from eval import prompts
from eval.shared import sampled
from eval.shared.tables import read
from qada_cache.kernels import sampled_prompt
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
    for wrong, told in ((["--tokens", "512"], "be above 512"), (["--thresholds", "4.4", "-1"], "not be negative")):
        with pytest.raises(SystemExit):
            prompts.main([*model, *wrong])
        assert f"{wrong[0]} must {told}" in capsys.readouterr().err


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


@pytest.mark.parametrize("size", [64, 128])
def test_samples_of_prompts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's sampled attention, with scores that are not rounded, reads the tokens that the float64 reference takes,
    and weighs them as it does."""
    monkeypatch.setattr(sampled, "CODES", torch.float64)
    monkeypatch.setattr(sampled_prompt, "SHORT", 700 if size == 128 else 701)
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 700, 16, generator=made).double() for heads in (4, 2, 2))
    told, out = {"scaling": 0.5, "threshold": 60.0, "sinks": 5}, torch.empty(1, 4, 700, 16, dtype=torch.float64)
    pairs = sampled.sampled_attention(query, key, value, **told, window=1, out=out)
    wanted = 0
    for head in range(4):
        own = query[0, head], key[0, head // 2]
        for block in range(blocks := -(-700 // size)):
            begin, some = block * size, block < blocks - 1
            found = reference.probabilities(*own, begin, size, **told, floor=1 / 64, stride=16).ceil().int()
            taken = reference.sample(found, block, head) if some else range(begin)
            chosen = {token: int(found[token]) if some else 256 for token in taken}
            rows = slice(begin, begin + size)
            exact = reference.attend(*own, value[0, head // 2], begin, size, chosen, 0.5)
            torch.testing.assert_close(out[0, head, rows], exact)
            wanted += len(chosen) * len(exact) + len(exact) * (len(exact) + 1) // 2
    assert int(pairs) == wanted < 0.9 * 4 * 700 * 701 / 2


def test_prompts_read_as_gpus_read_them(tmp_path: Path) -> None:
    table, model = tmp_path / "table.csv", ["loss", "--model", str(needle.FOLDER), "--dtype", "float32", "--sampled"]
    assert (
        prompts.main([*model, "--tokens", "1100", "--documents", "1", "--thresholds", "1e-9", "--out", str(table)]) == 0
    )
    (row,) = read(table)
    assert float(row["kl"]) < 1e-5
    assert float(row["pairs"]) == 1


def test_loss_of_scaled_keys(tmp_path: Path) -> None:
    """A row for each spread. Channels are weighed, so no more is read or lost: without, 0.5 would be lost here."""
    table, model = tmp_path / "table.csv", ["loss", "--model", str(needle.FOLDER), "--dtype", "float32"]
    arguments = ["--tokens", "1500", "--documents", "1", "--thresholds", "1e-9", "100", "--spreads", "0", "2"]
    assert prompts.main([*model, *arguments, "--out", str(table)]) == 0
    rows = read(table)
    assert [float(row["spread"]) for row in rows] == [0, 0, 2, 2]
    for plain, scaled in zip(rows[:2], rows[2:], strict=True):
        assert abs(float(scaled["kl"]) - float(plain["kl"])) < 1e-4
        assert abs(float(scaled["pairs"]) - float(plain["pairs"])) < 0.01
