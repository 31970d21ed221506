"""The tasks that the package brings: found by name, groups of lm-eval's own, prompts that need no context."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install qada-cache[eval])")

import needle  # noqa: E402
import requests  # noqa: E402
from datasets import Dataset  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval_rows import HotpotQA  # noqa: E402
from stand_ins import FOLDER, Answers, scores, some_tasks  # noqa: E402

from qada_cache.lm_eval import QAdALM, startup  # noqa: E402

startup.install()  # for an environment in which the package is not installed; test_lm_eval_startup is about the others

LM_EVAL_TASKS = Path(lm_eval.__file__).parent / "tasks"
OURS = ["qada_ruler", "qada_longbench", "long_gsm8k", "long_mbpp", "qada_context_free"]
RULER = ["niah_multiquery", *(f"ruler_{name}" for name in ("vt", "cwe", "fwe", "qa_squad", "qa_hotpot"))]
LONGBENCH = [
    f"longbench_{name}"
    for name in (
        *("qasper", "multifieldqa_en", "multifieldqa_zh", "narrativeqa", "2wikimqa"),
        *("musique", "hotpotqa", "qmsum", "vcsum", "triviaqa"),
    )
]


@pytest.mark.parametrize("name", OURS)
def test_every_task_is_found_by_name(all_tasks: TaskManager, name: str) -> None:
    assert all_tasks.task_index[name].yaml_path.is_relative_to(FOLDER)
    assert all_tasks.match_tasks([name]) == [name]


def stub_download(task: ConfigurableTask, *_: Any) -> None:
    """Instead of a task's data: one empty document."""
    fields = dict.fromkeys(("input", "gen_prefix", "context", "question"), "") | {"outputs": [""], "answers": [""]}
    task.dataset = {"test": Dataset.from_list([fields])}


@pytest.fixture
def no_haystack(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module that RULER's needle prompts import downloads a tokenizer and pairs words for ten seconds."""
    haystack = ModuleType("lm_eval.tasks.ruler.prepare_niah")
    vars(haystack).update(generate_samples=None, get_haystack=None)
    monkeypatch.setitem(sys.modules, haystack.__name__, haystack)
    yield
    sys.modules.pop("lm_eval.tasks.ruler.niah_utils", None)


@pytest.mark.usefixtures("no_haystack")
def test_ruler_runs_at_the_papers_lengths_or_those_asked_for(
    all_tasks: TaskManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wonderwords")
    monkeypatch.setattr(ConfigurableTask, "download", stub_download)
    loaded = all_tasks.load("qada_ruler")
    assert loaded["group_map"] == {"qada_ruler": RULER}
    assert all(task.config.metadata["max_seq_lengths"] == [8192, 16384] for task in loaded["tasks"].values())
    asked = some_tasks(LM_EVAL_TASKS / "ruler", max_seq_lengths=[4096]).load("qada_ruler")["tasks"]
    assert all(task.config.metadata["max_seq_lengths"] == [4096] for task in asked.values())
    assert all(task.VERSION == 1.0 for task in asked.values())

    metrics = {task: {"8192,none": 0.25 * (task == "ruler_vt"), "sample_len": 500} for task in RULER}
    assert loaded["groups"]["qada_ruler"].aggregate(metrics)["8192,none"] == pytest.approx(0.25 / 6)


@pytest.mark.filterwarnings("ignore:Using slow pure-python SequenceMatcher")  # fuzzywuzzy, of lm-eval's metrics
def test_longbench_has_the_papers_tasks(all_tasks: TaskManager, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all_tasks.task_index["qada_longbench"].cfg["task"] == LONGBENCH
    assert all_tasks.task_index.keys() >= set(LONGBENCH)
    for module in ("jieba", "rouge"):
        pytest.importorskip(module)
    monkeypatch.setattr(ConfigurableTask, "download", stub_download)
    loaded = all_tasks.load("qada_longbench")
    assert loaded["group_map"] == {"qada_longbench": LONGBENCH}
    metrics = {task: {"score,none": 0.5 * (task == "longbench_qmsum"), "sample_len": 200} for task in LONGBENCH}
    assert loaded["groups"]["qada_longbench"].aggregate(metrics)["score,none"] == pytest.approx(0.05)


def test_context_free_prompts_ask_for_nothing_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "get", lambda url, timeout: HotpotQA)
    manager = some_tasks(max_seq_lengths=[600, 900], pretrained=str(needle.FOLDER))
    (task,) = manager.load("qada_context_free")["tasks"].values()
    tokenizer = needle.load_tokenizer()
    for number, document in enumerate(task.test_docs()):
        prompt = task.fewshot_context(document, 0, gen_prefix=task.doc_to_prefix(document))
        length = (600, 900)[number // 40]
        assert length / 2 < len(tokenizer(prompt).input_ids) + 128 <= length
        assert prompt.endswith("\n\nQuestion: Can you describe LLMs in a few sentences? Answer:")
        assert f"Town {3 * (number % 40)} is old" in prompt
        assert "Is town" not in prompt

    assert scores(Answers(lambda document: " They are models of text. "), task.task_name, manager)[
        "answer_words,none"
    ] == pytest.approx(5.0)
    lm = QAdALM(str(needle.FOLDER), device="cpu")
    results = scores(lm, task.task_name, manager, limit=1, gen_kwargs={"max_gen_toks": 8})
    assert 0.0 < results["cache_sparsity,none"] <= 1.0
