"""`python -m eval.benchmark`: which methods it times, where, and in what order; what is timed is right."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import tiny
from small_sketch import small_sketch
from transformers import DynamicCache

from eval import benchmark
from eval.benchmark import CUDNN, OTHERS, allow_cudnn, decode, list_runs, select_methods
from eval.shared import timing, workloads
from eval.shared.counting import count_bus_bytes
from eval.shared.tables import read
from eval.shared.workloads import FEW_FRACTIONS, RESIDENT_TOKENS, TOKENS, Work, fill, list_methods
from qada_cache import QAdACache, StaticHeads


def make_work(device: str) -> Work:
    model = SimpleNamespace(device=torch.device(device), config=tiny().config)
    part = torch.zeros(1, 2, 300, 8)
    return Work(model, [(part, part)] * 2, torch.zeros(1, 4, dtype=torch.long), 2, False, 0)


def test_bulks_lie_in_three_places_on_an_accelerator() -> None:
    found = list_methods(make_work("cuda"), 1.0).keys()
    kinds = ("QAdACache", "QAdACache resident", "QAdACache budget")
    assert {f"{kind} f={fraction:g}" for kind in kinds for fraction in FEW_FRACTIONS} <= found
    assert {f"{of}, {bits} bits" for of in ("QAdACache f=1", TOKENS) for bits in (8, 4)} <= found
    assert {TOKENS, RESIDENT_TOKENS, f"{RESIDENT_TOKENS}, 8 bits", CUDNN, "DynamicCache, offloading"} <= found
    assert found - list_methods(make_work("cpu"), 1.0).keys() >= {CUDNN, RESIDENT_TOKENS, "QAdACache budget f=1"}
    assert CUDNN not in list_methods(make_work("mps"), 1.0)


def test_methods_by_name() -> None:
    """An exact one alone, though others begin like it; baselines always."""
    made = list_methods(make_work("cuda"), 1.0)
    assert select_methods(made, None) is made
    assert list(select_methods(made, [TOKENS])) == [name for name in made if name in {*OTHERS, TOKENS}]
    begin = {name for name in made if name.startswith("QAdACache res")}
    assert len(begin) == 6
    assert select_methods(made, ["QAdACache res", "always bulk"]).keys() == {*OTHERS, *begin, "always bulk"}
    with pytest.raises(ValueError, match="--methods: none is 'QAda', of no context, DynamicCache"):
        select_methods(made, [TOKENS, "QAda"])


def test_what_is_compiled_is_not_timed() -> None:
    """But cuDNN's attention, which plans for each length as it meets it."""
    names = ["no context", CUDNN, TOKENS]
    runs = list_runs(names, 2, accelerated=True)
    assert runs[:3] == [("no context", False), (CUDNN, True), (TOKENS, False)]
    assert runs[3:] == [("no context", True), (TOKENS, True)] * 2
    assert list_runs(["no context", TOKENS], 1, accelerated=False) == [("no context", True), (TOKENS, True)]


@pytest.mark.parametrize("allowed", [True, False])
def test_cudnn_is_as_before(allowed: bool) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with allow_cudnn(allowed):
        assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_bytes_over_the_bus() -> None:
    """Bytes over the bus are those read of a bulk on the host; there are none for a bulk on the device."""
    model = tiny()
    part = torch.randn(1, 2, 300, 8)
    work = Work(model, [(part, part)] * 2, torch.ones(1, 1, dtype=torch.long), 0, False, 0)
    options = {"criterion": "dense", "token_threshold": 0.0, "moments": "current"}
    for offloading, expected in ((True, 2 * 2 * 2 * (300 - 16 - 111) * 8 * 4), (False, 0)):
        cache = fill(QAdACache(model, **options, offloading=offloading), work)
        decode(work, cache)
        assert count_bus_bytes(cache, 1) == pytest.approx(expected, rel=0.05), offloading
    assert count_bus_bytes(fill(DynamicCache(config=model.config), work), 1) == 0


def test_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method has its row, and nothing is timed that is not right."""
    monkeypatch.setattr(timing, "SIZE", 1 << 20)
    arguments = ["--model", "tiny", "--tokens", "300", "--steps", "2", "--rounds", "1", "--device", "cpu"]
    table = tmp_path / "t.csv"
    with small_sketch(64):
        assert benchmark.main([*arguments, "--out", str(table)]) == 0
    rows = {row["method"]: row for row in read(table)}
    assert table.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    forced = {f"QAdACache f={fraction:g}" for fraction in workloads.FRACTIONS}
    dense = {"DynamicCache", "StaticCache", "always bulk"}
    coded = {f"{of}, {bits} bits" for of in ("QAdACache f=1", workloads.TOKENS) for bits in (8, 4)}
    assert (
        set(rows) - {"QuantizedCache, quanto", "QuantizedCache, hqq"}
        == {"no context", "sinks + window", workloads.TOKENS} | dense | forced | coded
    )
    less, more = (float(rows[f"QAdACache f={fraction:g}"]["read_mib"]) for fraction in (0.05, 0.34))
    assert less < float(rows[workloads.TOKENS]["read_mib"]) <= more  # a twentieth of the tokens, and the sketch
    assert float(rows["sinks + window"]["read_mib"]) < float(rows["QAdACache f=0.34"]["read_mib"])
    assert float(rows["DynamicCache"]["read_mib"]) <= float(rows["QAdACache f=1"]["read_mib"])
    assert float(rows["DynamicCache"]["against_dynamic"]) == float(rows["StaticCache"]["against_static"]) == 1.0
    assert all(float(rows[name]["over_limit"]) > 0 for name in (*forced, workloads.TOKENS))
    assert float(rows["QAdACache f=0.1"]["host_mib"]) > float(rows["DynamicCache"]["host_mib"]) == 0

    nothing = StaticHeads(torch.zeros(4, 4, dtype=torch.bool))
    monkeypatch.setattr(benchmark, "flag_heads", lambda work, fraction: nothing)
    with pytest.raises(RuntimeError, match=r"at f = 1 is off by .* of DynamicCache's logits"):
        benchmark.main([*arguments, "--methods", "QAdACache f=1"])


@pytest.mark.slow
def test_benchmark_of_a_model_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a context of its own, so its own flags are timed; a path without a model is an error that says so."""
    monkeypatch.setattr(timing, "SIZE", 1 << 20)
    model = workloads.make_model("tiny", dtype=torch.float32, device=torch.device("cpu"), positions=400)
    model.save_pretrained(tmp_path / "mine")
    arguments = ["--tokens", "300x2", "--steps", "2", "--rounds", "1", "--dtype", "float32", "--device", "cpu"]
    assert benchmark.main([*arguments, "--model", str(tmp_path / "mine"), "--out", str(tmp_path / "t.csv")]) == 0
    rows = {row["method"]: row for row in read(tmp_path / "t.csv")}
    assert float(rows["QAdACache, whole heads"]["p50_ms"]) > 0
    assert {row["batch"] for row in rows.values()} == {"2"}
    with pytest.raises(SystemExit):
        benchmark.main([*arguments, "--model", str(tmp_path / "nothing")])


def test_flagged_share_of_heads() -> None:
    model = workloads.make_model("tiny", dtype=torch.float32, device=torch.device("cpu"), positions=64)
    work = workloads.make_random_work(model, tokens=10, batch=1, steps=1, warm_up=0, seed=0)
    for fraction, count in ((0.0, 0), (0.1, 2), (0.34, 5), (1.0, 16)):
        table = workloads.flag_heads(work, fraction).long_context
        assert int(table.sum()) == count
        assert int(table.sum(dim=1).max() - table.sum(dim=1).min()) <= 1
