"""`python -m eval.sweep` and `eval.heads`: one prefill for many variants changes nothing, and tables go on where they
stopped; what is recorded is true."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import needs_compiler, needs_vectors
from reference import gaussian_log_bulk, log_mass
from small_sketch import small_sketch
from transformers import AutoTokenizer

pytest.importorskip("lm_eval", reason="the commands run on lm-eval")
import needle

from eval import heads, sweep
from eval.shared import lm_tasks
from eval.shared.tables import read
from qada_cache import KeyMoments, StaticHeads
from qada_cache.attention import decode
from qada_cache.kernels.cpu import selected_prompt


def test_static_heads_from_the_oracle() -> None:
    """The share alpha of heads that were local most often is local; ties and unknown heads stay long-context last."""
    share = torch.tensor([[0.9, 0.1, 0.5], [1.0, torch.nan, 0.2]])
    for alpha, local in ((0.0, []), (1 / 6, [3]), (0.34, [0, 3]), (0.5, [0, 2, 3]), (1.0, [0, 1, 2, 3, 4, 5])):
        table = StaticHeads.from_oracle(share, alpha).long_context
        assert (~table).flatten().nonzero().squeeze(-1).tolist() == local
    assert not StaticHeads.from_oracle(share, 0.84).long_context[0, 1]
    assert StaticHeads.from_oracle(share, 0.84).long_context[1, 1]
    for wrong in ((share, 1.5), (share, -0.1), (share[0], 0.5)):
        with pytest.raises(ValueError, match="from_oracle takes shares"):
            StaticHeads.from_oracle(*wrong)


@pytest.fixture
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests' tasks alone: the index of lm-eval's own takes seconds to make. No index outlives a test."""
    folder = Path(__file__).parents[1] / "lm_eval" / "tiny_tasks"
    ours = functools.partial(lm_tasks.TaskManager, include_path=[folder], include_defaults=False)
    monkeypatch.setattr(lm_tasks, "TaskManager", ours)
    lm_tasks.make_task_manager.cache_clear()
    yield
    lm_tasks.make_task_manager.cache_clear()


@pytest.mark.usefixtures("own_tasks")
def test_sweep(tmp_path: Path) -> None:
    """Every criterion on the needle task, then more thresholds into the same table."""
    table = tmp_path / "sweep.csv"
    arguments = ["--model", str(needle.FOLDER), "--tasks", "needle", "--lengths", "1024", "--limit", "2"]
    arguments += ["--alphas", "0.5", "--out", str(table), "--moments"]

    assert sweep.main([*arguments, "current", "--thresholds", "1", "--tokens"]) == 0
    found = {row["criterion"]: row for row in read(table)}
    assert list(found) == ["dense", "local", "selected", "oracle", "qada", "static oracle"]
    reads = {name: float(row["bytes_read"]) for name, row in found.items()}
    assert [reads[name] for name in ("dense", "local", "oracle", "qada")] == [1, 0, 1, 1]
    assert 0 < reads["static oracle"] < 1
    assert found["selected"]["moments"] == "current+random-tokens"
    assert {row["documents"] for row in read(table)} == {"2"}
    assert {row["group_rule"] for row in read(table) if row["criterion"] in ("oracle", "qada")} == {"any"}
    assert [found[name]["score_stderr"] for name in ("dense", "local")] == ["0.0000", "0.0000"]  # all right, all wrong
    assert found["dense"]["score"] == found["oracle"]["score"] == found["qada"]["score"]
    assert float(found["local"]["score"]) < float(found["dense"]["score"])
    assert [float(found[name]["q_heads_local"]) for name in ("dense", "local", "qada")] == [0, 1, 0]
    assert float(found["static oracle"]["q_heads_local"]) == 0.5
    before = read(table)
    assert sweep.main([*arguments, "current", "random-words", "--thresholds", "1", "0.3"]) == 0
    assert read(table)[: len(before)] == before
    added = [(row["criterion"], row["moments"], row["threshold"]) for row in read(table)[len(before) :]]
    assert added == [
        ("oracle", "", "0.3"),
        ("qada", "current", "0.3"),
        ("qada", "random-words", "1.0"),
        ("qada", "random-words", "0.3"),
    ]


@needs_compiler
@needs_vectors
@pytest.mark.usefixtures("own_tasks")
def test_sweep_of_selected_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each threshold's prompts are read once for both of its variants; a table of exact ones goes on."""
    called: list[float] = []
    original = selected_prompt.selected_attention
    monkeypatch.setattr(selected_prompt, "LEAST_FAR", 192)
    monkeypatch.setattr(
        selected_prompt,
        "selected_attention",
        lambda *given, **told: called.append(told["threshold"]) or original(*given, **told),
    )
    table = tmp_path / "sweep.csv"
    arguments = ["--model", str(needle.FOLDER), "--tasks", "needle", "--lengths", "1024", "--limit", "1", "--tokens"]
    arguments += ["--thresholds", "--static", "--out", str(table)]
    assert sweep.main(arguments) == 0
    assert not called
    for _ in range(2):
        assert sweep.main([*arguments, "--prefill", "0", "1e-9", "100"]) == 0
    layers = json.loads((needle.FOLDER / "config.json").read_text())["num_hidden_layers"]
    assert sorted(called) == [1e-9] * layers + [100] * layers
    rows = read(table)
    ways = [(row["criterion"], float(row["prefill"])) for row in rows]
    exact = [("dense", 0), ("local", 0), ("selected", 0)]
    assert ways == [*exact, ("dense", 1e-9), ("selected", 1e-9), ("dense", 100), ("selected", 100)]
    scores = dict(zip(ways, (float(row["score"]) for row in rows), strict=True))
    assert scores["dense", 1e-9] == scores["dense", 0]
    assert scores["selected", 1e-9] == scores["selected", 0]
    assert {row["bits"] for row in rows} == {"16"}


@pytest.mark.usefixtures("own_tasks")
def test_sweep_of_bits(tmp_path: Path) -> None:
    """Prompts are read once more for each number of bits, and bulks of fewer are read in fewer bytes."""
    table = tmp_path / "sweep.csv"
    arguments = ["--model", str(needle.FOLDER), "--tasks", "needle", "--lengths", "1024", "--limit", "1", "--tokens"]
    with small_sketch(64):
        for bits in (["16"], ["8", "16", "4"]):
            assert sweep.main([*arguments, "--thresholds", "--static", "--out", str(table), "--bits", *bits]) == 0
    rows = [row for row in read(table) if row["criterion"] == "selected"]
    assert [row["bits"] for row in rows] == ["16", "8", "4"]
    shares = [float(row["bytes_read"]) for row in rows]
    assert shares[0] > shares[1] > shares[2]


@pytest.mark.usefixtures("own_tasks")
def test_recorded_truth_and_estimates(tmp_path: Path) -> None:
    """Both recorded masses, and the estimate by random words' moments, equal float64 of the same keys and queries."""
    calls: list[tuple[Any, ...]] = []
    original = decode.estimate_log_bulk

    def spy(layer: Any, store: Any, query: Any, rows: Any, plan: Any) -> Any:
        bulk = [store.bulk.keys[0, :, : store.bulk.lengths[0]]]
        recent = store.near_keys[0, :, store.sinks + store.end - (store.lengths[0] - store.flushed[0]) :]
        grouped_queries = query.states[0, :, 0].unflatten(0, (len(recent), -1))
        calls.append((layer.index, grouped_queries, bulk[0], recent[:, : store.lengths[0] - store.flushed[0]],
                      store.near_keys[0, :, : store.sinks], query.scaling))  # fmt: skip
        return original(layer, store, query, rows, plan)

    out = tmp_path / "heads.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "estimate_log_bulk", spy)
        arguments = ["--model", str(needle.FOLDER), "--tasks", "needle", "--lengths", "1024", "--limit", "1"]
        assert heads.main([*arguments, "--out", str(out)]) == 0
    rows = read(out)
    assert len(rows) == 4 * 8
    model, tokenizer = needle.load_model(), needle.load_tokenizer()
    mean, covariance = KeyMoments.collect(model, tokenizer, progress=False).at(1024 - 128 + 64)  # rounded up
    for row in rows:
        layer, head = int(row["layer"]), int(row["head"])
        index, grouped_queries, bulk, recent, sinks, scaling = calls[layer - 4]  # the first ones are `prepare`'s
        assert index == layer
        query, group = grouped_queries[head // 2, head % 2], head // 2
        far = torch.cat([bulk[group], recent[group, :-112]])
        near = torch.cat([sinks[group], recent[group, -112:]])
        estimate = gaussian_log_bulk(
            query=query,
            mean=mean[layer, group],
            covariance=covariance[layer, group],
            bulk_tokens=len(far),
            scaling=scaling,
        )
        for column, expected in (
            ("log_local", log_mass(query=query, keys=near, scaling=scaling)),
            ("log_bulk", log_mass(query=query, keys=far, scaling=scaling)),
            ("random-words", estimate),
        ):
            assert float(row[column]) == pytest.approx(float(expected), abs=2e-3), (column, layer, head)


@pytest.mark.usefixtures("own_tasks")
@pytest.mark.parametrize("command", [sweep, heads])
def test_lengths_without_prompts(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task that cannot be so short, or whose prompts are read whole, is named before the model is loaded."""
    arguments = ["--model", str(needle.FOLDER), "--tasks", "needle", "--limit", "2", "--out", str(tmp_path / "t.csv")]
    monkeypatch.setattr(lm_tasks, "NEAR", 700)
    for lengths, said in (
        (["1024", "140"], "140: 48 facts need at least 193 tokens"),
        (["600"], "600: its prompts are sinks"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main([*arguments, "--lengths", *lengths])
        assert f"error: --tasks needle --lengths {said}" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_of_a_gguf_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that do not know the file's name find it in a folder."""
    asked: list[tuple[str, str]] = []

    def from_pretrained(where: str, *, gguf_file: str) -> Any:
        asked.append((where, gguf_file))
        return needle.load_tokenizer()

    monkeypatch.setattr(lm_tasks.AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(lm_tasks, "TaskManager", lambda metadata: metadata)
    for length in (600, 700):
        told = lm_tasks.make_task_manager("somewhere", length, "model.gguf")
        assert (told["pretrained"], told["max_seq_lengths"]) == ("somewhere", [length])
    assert asked == [("somewhere", "model.gguf")]
    monkeypatch.undo()
    lm_tasks.make_task_manager.cache_clear()
    found = AutoTokenizer.from_pretrained(told["tokenizer"])
    text = "The grass is green."
    assert found(text).input_ids == needle.load_tokenizer()(text).input_ids
