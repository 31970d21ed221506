"""The arithmetic of what GPUs would hold and take: bytes are those of a cache, times its heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval import gpu_plan
from eval.shared import gpus
from eval.shared.gpus import Gpu
from eval.shared.tables import read
from eval.shared.workloads import fill, load, make_random_work
from qada_cache import QAdACache

SLOW = Gpu(1, 100.0, 10.0, 4, 1.0, "sm_80")


def make_plan(folder: Path, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, *options: str) -> dict[str, dict[str, str]]:
    """The rows of one GPU, by cache."""
    monkeypatch.setattr(gpu_plan, "GPUS", {"slow": gpu})
    out = folder / "plan.csv"
    assert gpu_plan.main([*options, "--out", str(out)]) == 0
    return {row["cache"]: row for row in read(out)}


@pytest.mark.parametrize("bits", [16, 8])
def test_bytes_are_those_of_a_cache(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_plan(tmp_path, monkeypatch, SLOW, "--models", "tiny", "--tokens", "3000", "--batches", "32")
    assert len(rows) == 4 + 3 * 4
    model, _, _ = load("tiny", dtype=torch.bfloat16, device=torch.device("cpu"), positions=3000)
    work = make_random_work(model, tokens=3000, batch=2, steps=1, warm_up=0, seed=0)
    cache = QAdACache(config=model.config, moments="current", offloading=True, bulk_bits=bits)
    stats = fill(cache, work).stats()
    names = ("offloading=False", *(f"device_budget={budget}" for budget in ("0", "0.25", "1")))
    kept, offloaded, quarter, resident = (
        float(rows[f"QAdACache, bulk_bits={bits}, {name}"]["device_gib"]) for name in names
    )
    assert offloaded == pytest.approx(16 * stats.device_bytes / 2**30, rel=0.02, abs=0.005)
    assert float(rows["DynamicCache"]["device_gib"]) == pytest.approx(2 * 2 * 32 * 4 * 4 * 64 * 3000 / 2**30, abs=0.005)
    assert offloaded < quarter < resident == kept


def test_a_token_takes_the_largest_of_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--models", "llama-3-8b", "--tokens", "2048", "--batches", "8"
    whole = 2 * 2 * 8 * 32 * 8 * 128 * 2048
    rows = make_plan(tmp_path, monkeypatch, SLOW, *options)
    for row in rows.values():
        times = {name: float(row[f"{name}_ms"] or 0) for name in ("bytes", "issue", "host")}
        assert float(row["token_ms"]) == max(times.values()) == times[row["bound"]]
    static, dynamic, ours = (
        rows[name] for name in ("StaticCache", "DynamicCache", "QAdACache, bulk_bits=16, device_budget=0")
    )
    # DynamicCache copies all it holds.
    assert float(dynamic["bytes_ms"]) - float(static["bytes_ms"]) == pytest.approx(2e3 * whole / 100e9, abs=0.2)
    bus = make_plan(tmp_path, monkeypatch, SLOW._replace(bus_gb_s=20.0), *options)["DynamicCache, offloading=True"]
    moved = float(rows["DynamicCache, offloading=True"]["bytes_ms"]) - float(bus["bytes_ms"])
    assert moved == pytest.approx(1e3 * whole / 20e9, abs=0.2)
    fast = make_plan(tmp_path, monkeypatch, SLOW._replace(memory_gb_s=1e5, bus_gb_s=1e5), *options)
    assert fast["QAdACache, bulk_bits=16, device_budget=0"]["bound"] == "issue"
    assert fast["DynamicCache"]["bound"] == "host"
    fast = make_plan(tmp_path, monkeypatch, SLOW._replace(schedulers=400), *options)
    found = float(fast["QAdACache, bulk_bits=16, device_budget=0"]["issue_ms"])
    assert found == pytest.approx(float(ours["issue_ms"]) / 100, abs=0.1)


def test_instructions_of_a_step() -> None:
    """Of every kernel, four warps, as often as there are blocks of tokens."""
    rows = read(gpus.RESOURCES)
    like = {"dim": "128", "group": "4", "sketch": "1.5", "architecture": "sm_90"}
    code = {row["kernel"]: int(row["instructions"]) for row in rows if like.items() <= row.items()}
    found = gpus.count_instructions(
        dim=128, group=4, tokens=1025, segments=2, sketch="1.5", architecture="sm_90"
    )  # 5 blocks of 256
    assert found == 4 * (7 * code["local_kernel"] + 5 * code["estimate_kernel"] + 5 * code["selected_kernel"])
    larger = gpus.count_instructions(dim=128, group=7, tokens=1025, segments=2, sketch="1.5", architecture="sm_90")
    assert larger > 1.5 * found


def test_what_is_assumed(tmp_path: Path) -> None:
    out = tmp_path / "assumed.csv"
    assert gpu_plan.main(["--assumptions", "--out", str(out)]) == 0
    rows = read(out)
    assert {row["of"] for row in rows} == {"H100", "A100", "RTX 4090", "tokens", "kernels", "host"}
    assert all(row["value"] for row in rows)


def test_a_table_without_the_default(tmp_path: Path) -> None:
    table = tmp_path / "summary.csv"
    table.write_text("model,task,length,criterion,rule,threshold,read,bytes_read\nm,prose,3072,local,any,0.0,,0.0\n")
    with pytest.raises(ValueError, match=r"has no row of prose for the default, sketch of 1.5 bits, 4.4"):
        gpu_plan.read_token_share(table)
