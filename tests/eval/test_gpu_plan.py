"""The arithmetic of what a GPU would hold: bytes are those of a cache, times its heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval import gpu_plan
from eval.shared.tables import read
from eval.shared.workloads import fill, load, make_random_work
from qada_cache import QAdACache

OPTIONS = ["--models", "tiny", "--tokens", "3000", "--batches", "1", "2", "--bus", "10", "--memory", "100"]


def test_bytes_are_those_of_a_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_plan.main([*OPTIONS, "--out", str(tmp_path / "plan.csv")]) == 0
    rows = read(tmp_path / "plan.csv")
    assert [row["cache"] for row in rows[:6]] == [
        "DynamicCache", "DynamicCache, offloading=True", "QAdACache",
        *(f"QAdACache, offloading=True, device_budget={budget}" for budget in ("0", "0.25", "1")),
    ]  # fmt: skip
    model, _, _ = load("tiny", dtype=torch.bfloat16, device=torch.device("cpu"), positions=3000)
    work = make_random_work(model, tokens=3000, batch=2, steps=1, warm_up=0, seed=0)
    cache = QAdACache(config=model.config, moments="current", offloading=True)
    stats = fill(cache, work).stats()
    dense, _, kept, offloaded, quarter, resident = (float(row["device_gib"]) for row in rows[6:])
    assert offloaded == pytest.approx(stats.device_bytes / 2**30, rel=0.02, abs=0.005)
    assert dense == pytest.approx(2 * 2 * 2 * 4 * 4 * 64 * 3000 / 2**30, abs=0.005)
    assert offloaded < quarter < resident == kept
    assert "the sketch" in capsys.readouterr().out


def test_times_are_bytes_over_bandwidths(tmp_path: Path) -> None:
    rows = {}
    for bus in (10, 20):
        out = tmp_path / f"{bus}.csv"
        assert (
            gpu_plan.main(
                ["--models", "llama-3-8b", "--tokens", "2048", "--batches", "8", "--bus", str(bus), "--out", str(out)]
            )
            == 0
        )
        rows[bus] = {row["cache"]: float(row["cache_ms"]) for row in read(out)}
    assert rows[10]["DynamicCache"] == rows[20]["DynamicCache"]
    whole = 2 * 2 * 8 * 32 * 8 * 128 * 2048
    assert rows[10]["DynamicCache"] == pytest.approx(whole / 2e12 * 1e3, abs=0.1)
    moved = rows[10]["DynamicCache, offloading=True"] - rows[20]["DynamicCache, offloading=True"]
    assert moved == pytest.approx(whole / 20e9 * 1e3, abs=0.2)


def test_a_table_without_the_default(tmp_path: Path) -> None:
    table = tmp_path / "summary.csv"
    table.write_text("model,task,length,criterion,rule,threshold,read,bytes_read\nm,prose,3072,local,any,0.0,,0.0\n")
    with pytest.raises(ValueError, match=r"has no row of prose for the default, sketch of 1.5 bits, 4.4"):
        gpu_plan.read_token_share(table)
