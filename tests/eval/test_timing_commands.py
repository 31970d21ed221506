"""The commands that time and weigh: every method has its row, and what is timed is right."""

import csv
import os
from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from small_sketch import small_sketch

from qada_cache import KeyMoments, StaticHeads
from qada_cache.kernels.cpu import prompt


def test_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method has its row, and nothing is timed that is not right."""
    from eval import benchmark
    from eval.shared import timing, workloads

    monkeypatch.setattr(timing, "SIZE", 1 << 20)
    arguments = ["--model", "tiny", "--tokens", "300", "--steps", "2", "--rounds", "1", "--device", "cpu"]
    with small_sketch(64):
        assert benchmark.main([*arguments, "--out", str(tmp_path)]) == 0
    with (tmp_path / "benchmark-tiny-cpu.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
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
        benchmark.main(arguments)


def test_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cache reads another prompt for its key moments, later ones do not; the user's folder is left alone."""
    from eval import first_token

    collected, collect = [], KeyMoments.collect
    monkeypatch.setattr(
        KeyMoments, "collect", lambda *given, **named: collected.append(given[2]) or collect(*given, **named)
    )
    before = os.environ.get("QADA_HOME")
    arguments = ["--model", "tiny", "--tokens", "300", "200", "--rounds", "1", "--device", "cpu", "--prefill", "3"]
    assert first_token.main([*arguments, "--out", str(tmp_path)]) == 0
    assert os.environ.get("QADA_HOME") == before
    assert collected == ["random-tokens"]
    with (tmp_path / "first_token-tiny-cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    selected = "QAdACache, prefill_threshold=3"
    of_first = ["DynamicCache", "StaticCache", "QAdACache, the first time", "QAdACache", selected]
    named = [("300", name) for name in of_first] + [("200", name) for name in of_first if "time" not in name]
    assert [(row["tokens"], row["method"]) for row in rows] == named
    assert all(float(row["first_token_s"]) > 0 and float(row["second_token_ms"]) > 0 for row in rows)


@pytest.mark.slow
def test_benchmark_of_a_model_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a context of its own, so its own flags are timed; a path without a model is an error that says so."""
    from eval import benchmark
    from eval.shared import timing
    from eval.shared.workloads import make_model

    monkeypatch.setattr(timing, "SIZE", 1 << 20)
    model = make_model("tiny", dtype=torch.float32, device=torch.device("cpu"), positions=400)
    model.save_pretrained(tmp_path / "mine")
    arguments = ["--tokens", "300x2", "--steps", "2", "--rounds", "1", "--dtype", "float32", "--device", "cpu"]
    assert benchmark.main([*arguments, "--model", str(tmp_path / "mine"), "--out", str(tmp_path)]) == 0
    with (tmp_path / "benchmark-mine-cpu.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert float(rows["QAdACache, whole heads"]["p50_ms"]) > 0
    assert {row["batch"] for row in rows.values()} == {"2"}
    with pytest.raises(SystemExit):
        benchmark.main([*arguments, "--model", str(tmp_path / "nothing")])


def test_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The context grows, what is on the device does not, but for moments; wrong arguments are said in a line."""
    from eval import soak

    arguments = ["--model", "tiny", "--prompt", "300", "--dtype", "float32", "--device", "cpu"]
    assert soak.main([*arguments, "--tokens", "300", "--out", str(tmp_path)]) == 0
    with (tmp_path / "soak-tiny-cpu.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["rows"] for row in rows] == ["one", "two, one padded"]
    for row in rows:
        assert float(row["last_host_mib"]) > float(row["first_host_mib"]) > 0
        moments = 4 * 4 * 64 * (1 + 64) * 4 / 2**20  # of layers, KV heads and dim: mean and covariance, float32
        more = float(row["last_device_mib"]) - float(row["first_device_mib"])
        assert -0.1 < more < 2 * moments + 0.1  # of two rows at most, which the first step asks for
    with pytest.raises(SystemExit):
        soak.main([*arguments, "--tokens", "3"])
    assert "--tokens must be at least 20" in capsys.readouterr().err


@needs_compiler
def test_step_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model by its sizes and of one with a tokenizer; the parts are the package's, and do not exceed the whole."""
    import needle

    from eval import step_overhead

    options = ["--dtype", "float32", "--steps", "3", "--rounds", "1", "--out", str(tmp_path)]
    for model, tokens in (("tiny", ["1500"]), (str(needle.FOLDER), ["2048"])):
        assert step_overhead.main(["--model", model, "--tokens", *tokens, *options]) == 0
        with (tmp_path / f"step_overhead-{Path(model).name}-cpu.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [row["tokens"] for row in rows] == tokens
        for row in rows:
            assert all(float(row[f"{part}_us"]) > 0 for part in step_overhead.PARTS)
            assert 0 < float(row["share"]) < 1
            assert float(row["in_turn"]) > 0
    assert "the_rest_us" in capsys.readouterr().out
    for wrong in (["--model", "nothing"], ["--out", str(tmp_path / "nowhere")], ["--tokens", "many"]):
        with pytest.raises(SystemExit, match="2"):
            step_overhead.main(wrong)


@pytest.mark.slow
def test_restart(tmp_path: Path) -> None:
    """Every process answers as the one that kept its cache; by the store it reads the question alone."""
    import needle

    from eval import restart

    table = tmp_path / "table.csv"
    arguments = ["--model", str(needle.FOLDER), "--tokens", "600", "--rounds", "1", "--answer", "3"]
    assert restart.main([*arguments, "--folder", str(tmp_path), "--out", str(table)]) == 0
    with table.open(encoding="utf-8") as file:
        first, *rows = csv.DictReader(file)
    assert [row["way"] for row in rows] == list(restart.WAYS)
    assert [row["as_kept"] for row in rows] == ["1/1"] * 4
    assert {row["tokens_read"] for row in rows[:2]} == {first["tokens_read"]}
    assert all(int(row["tokens_read"]) < 20 for row in rows[2:])
    assert first["bytes"] == first["files_bytes"]
    assert float(first["turn_mib"]) < 0.7 * float(first["whole_mib"])


def test_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,600 tokens fewer bits take less; wrong arguments are said in a line."""
    import needle

    from eval import memory

    monkeypatch.setattr(memory, "CACHES", ("DynamicCache", "QAdACache", "QAdACache, 4 bits"))
    table, model = tmp_path / "table.csv", ["--model", str(needle.FOLDER), "--dtype", "float32"]
    assert memory.main([*model, "--tokens", "1600", "--new-tokens", "2", "--chunk", "700", "--out", str(table)]) == 0
    with table.open(encoding="utf-8") as file:
        rows = {row["cache"]: row for row in csv.DictReader(file)}
    assert list(rows) == list(memory.CACHES)
    assert {row["chunk"] for row in rows.values()} == {"700"}
    held = {name: float(row["held_mib"]) for name, row in rows.items()}
    assert held["QAdACache, 4 bits"] < held["QAdACache"] < held["DynamicCache"]
    sizes = {name: float(row["file_mib"] or 0) for name, row in rows.items()}
    assert 0 == sizes["DynamicCache"] < sizes["QAdACache, 4 bits"] < sizes["QAdACache"] < held["DynamicCache"]
    assert all(float(row["peak_mib"]) >= 0.9 * held[name] for name, row in rows.items())
    assert 0 < float(rows["QAdACache"]["copy_mib"]) < 2 * held["QAdACache"]
    with pytest.raises(SystemExit):
        memory.main([*model, "--tokens", "0"])
    assert "--tokens, --new-tokens and --rounds must be at least 1" in capsys.readouterr().err


def test_prompt_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lower the threshold, the less is lost, and the more is read; nothing, where no kernel selects."""
    import needle

    from eval import prompt_loss

    table, model = tmp_path / "table.csv", ["--model", str(needle.FOLDER), "--dtype", "float32"]
    arguments = ["--tokens", "1500", "--documents", "1", "--thresholds", "1e-9", "100", "--out", str(table)]
    arguments += ["--texts", "prose", "code"]
    assert prompt_loss.main([*model, *arguments]) == 0
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == ["prose", "prose", "code", "code"]
    for low, high in (rows[:2], rows[2:]):
        assert abs(float(low["kl"])) < 1e-5
        assert float(low["kl"]) <= float(high["kl"])
        assert float(high["pairs"]) <= float(low["pairs"]) <= 1
    with pytest.raises(SystemExit):
        prompt_loss.main([*model, "--tokens", "512"])
    assert "--tokens must be above 512" in capsys.readouterr().err


def test_prompt_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are told apart where the kernel runs; elsewhere a line says that it does not."""
    from eval import prompt_rate

    table = tmp_path / "table.csv"
    if prompt.build(64, 64, torch.bfloat16) is not None:
        arguments = ["--tokens", "600", "--dims", "64", "--rounds", "1", "--out", str(table)]
        assert prompt_rate.main(arguments) == 0
        with table.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [row["dtype"] for row in rows] == ["bfloat16", "float32"]
        for row in rows:
            assert 0.3 < float(row["error"]) < 3
            assert float(row["faster"]) > 0
    monkeypatch.setattr(prompt, "serves", lambda *_, **__: False)
    with pytest.raises(SystemExit):
        prompt_rate.main([])
    assert "no AVX512-BF16" in capsys.readouterr().err


def test_prefix_reuse(tmp_path: Path) -> None:
    """Every way leads to the same answers."""
    import needle

    from eval import prefix_reuse

    table = tmp_path / "table.csv"
    arguments = ["--model", str(needle.FOLDER), "--tokens", "600", "--questions", "2", "--answer", "3"]
    assert prefix_reuse.main([*arguments, "--out", str(table)]) == 0
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["same"] for row in rows] == ["1/1", *["2/2"] * 5]
    assert len({row["way"] for row in rows}) == 6
