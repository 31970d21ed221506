"""The tasks shipped beside `needle`: found by name, their prompts, their scores, and one run end to end."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install qada-cache[eval])")

import evaluate  # noqa: E402
import requests  # noqa: E402
from datasets import Dataset  # noqa: E402
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval_rows import GSM8K_TEST, MBPP_TEST, SQUAD, HotpotQA, gsm8k_row, load_dataset, mbpp_row  # noqa: E402

import qada_cache  # noqa: E402
from qada_cache import needle  # noqa: E402
from qada_cache.lm_eval import QAdALM, startup  # noqa: E402
from qada_cache.lm_eval.tasks.long_few_shot import long_few_shot  # noqa: E402

startup.install()  # for an environment in which the package is not installed; test_lm_eval_startup is about the others

FOLDER = Path(qada_cache.__file__).parent / "lm_eval" / "tasks"
LM_EVAL_TASKS = Path(lm_eval.__file__).parent / "tasks"
RULER = ["niah_multiquery", *(f"ruler_{name}" for name in ("vt", "cwe", "fwe", "qa_squad", "qa_hotpot"))]
LONGBENCH = [
    f"longbench_{name}"
    for name in (
        *("qasper", "multifieldqa_en", "multifieldqa_zh", "narrativeqa", "2wikimqa"),
        *("musique", "hotpotqa", "qmsum", "vcsum", "triviaqa"),
    )
]


def documents(task: str, *, real: range = range(20)) -> list[dict[str, str]]:
    """Of eight test rows, numbered from 1000; the real examples are drawn from rows of the numbers `real`."""
    if task == "long_gsm8k":
        return long_few_shot.gsm8k_documents([gsm8k_row(number) for number in real], GSM8K_TEST, SQUAD)
    return long_few_shot.mbpp_documents([mbpp_row(number) for number in real], MBPP_TEST, SQUAD)


# Of each task: where an example starts, what all of it is, and what only a real one has.
FRAMES = {
    "long_gsm8k": (r"\n\n(?=Question: )", r"Question: \S.*\S\nAnswer: \S[^\r]*\S", "####"),
    "long_mbpp": (r"\n\n(?=Task: )", r"Task: \S.*\S\nTests:\n\S[^\r]*\S\n\[BEGIN\]\n\S[^\r]*\S\n\[DONE\]", "return"),
}
both_tasks = pytest.mark.parametrize("task", FRAMES)


def examples(task: str, document: dict[str, str]) -> tuple[list[str], str]:
    """A prompt's examples, and the question after them."""
    *before, question = re.split(FRAMES[task][0], document["prompt"])
    return before, question


class Answers(LM):
    """A language model that answers every document by a function of it."""

    def __init__(self, answer: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self.answer = answer

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self.answer(request.doc) for request in requests]

    def loglikelihood(self, requests: list[Any]) -> Any:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def scores(lm: LM, task: str, manager: TaskManager, **options: Any) -> dict[str, Any]:
    return lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, bootstrap_iters=0, **options)["results"][
        task
    ]


def some_tasks(*folders: Path, **metadata: Any) -> TaskManager:
    """Ours, and those of the other folders: indexing all of lm-eval's takes seconds."""
    return TaskManager(include_path=[FOLDER, *folders], include_defaults=False, metadata=metadata)


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    return some_tasks()


@pytest.fixture(scope="module")
def all_tasks() -> TaskManager:
    return TaskManager()


@pytest.mark.parametrize("name", ["needle", "qada_ruler", "qada_longbench", *FRAMES, "qada_context_free"])
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


@both_tasks
def test_five_real_examples_among_fifty_five_of_one_format(task: str) -> None:
    _, frame, mark = FRAMES[task]
    for document in documents(task):
        before, _ = examples(task, document)
        assert len(set(before)) == 60
        assert sum(mark in example for example in before) == 5
        assert sum("mason" in example for example in before) == 55
        assert [example for example in before if not re.fullmatch(frame, example)] == []


@both_tasks
def test_the_question_ends_where_an_answer_would_begin(task: str) -> None:
    for document, gsm8k, mbpp in zip(documents(task), GSM8K_TEST, MBPP_TEST, strict=True):
        _, question = examples(task, document)
        if task == "long_gsm8k":
            assert question == f"Question: {gsm8k['question']}\nAnswer:"
        else:
            assert question == "\n".join([f"Task: {mbpp['text']}", "Tests:", *mbpp["test_list"], "[BEGIN]", ""])


@both_tasks
def test_the_order_is_random_and_repeatable(task: str) -> None:
    first, again = documents(task), documents(task)
    assert first == again
    mark = FRAMES[task][2]
    places = [[place for place, text in enumerate(examples(task, it)[0]) if mark in text] for it in first]
    assert len({tuple(where) for where in places}) == len(places)  # each document has its own order,
    assert min(min(where) for where in places) < 10  # and real examples stand anywhere
    assert max(max(where) for where in places) >= 50
    assert len({frozenset(examples(task, document)[0]) for document in first}) == len(first)


@both_tasks
def test_a_question_is_never_among_its_examples(task: str) -> None:
    """Real examples to draw from are five and the first test row itself."""
    before, question = examples(task, documents(task, real=range(995, 1001))[0])
    assert sum(example.startswith(question) for example in before) == 0
    assert sum(FRAMES[task][2] in example for example in before) == 5


@both_tasks
def test_too_few_rows_are_refused(task: str) -> None:
    with pytest.raises(ValueError, match="4 real and 90 made examples to draw from, 5 and 55 are needed"):
        documents(task, real=range(4))


# What a model says, and what each of the two filters makes of it.
GSM8K_ANSWERS = [
    (" Both hold {target}.\n#### {target}", 1.0, 1.0),
    (" Of 3 bags: #### ${target}.", 1.0, 1.0),
    (" Both hold 12, no, {target}.", 0.0, 1.0),
    (" Both hold {target}, not 12.", 0.0, 0.0),
    (" {target} minus 5.\n#### -{target}", 0.0, 0.0),
    (" Five.\n#### five", 0.0, 0.0),
    (" 12.\n#### {plain}", 1.0, 1.0),  # without the comma of 1,007
    (" 12.\n#### {plain}.5", 0.0, 0.0),
]


def test_gsm8k_is_scored_by_the_final_number(manager: TaskManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    targets = [document["target"] for document in documents("long_gsm8k")]
    assert targets[0] == "1,001"
    says = {
        target: answer.format(target=target, plain=target.replace(",", ""))
        for target, (answer, *_) in zip(targets, GSM8K_ANSWERS, strict=True)
    }
    lm = Answers(lambda document: says[document["target"]])
    results = lm_eval.simple_evaluate(
        lm, tasks=["long_gsm8k"], task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    scored = {(sample["filter"], sample["doc_id"]): sample for sample in results["samples"]["long_gsm8k"]}
    for number, (answer, strict, flexible) in enumerate(GSM8K_ANSWERS):
        assert scored["strict-match", number]["exact_match"] == strict, answer
        assert scored["flexible-extract", number]["exact_match"] == flexible, answer


class CodeEval:
    """Instead of the Hub's metric of this name, which is a download: runs code that this file wrote."""

    def compute(self, *, references: list[str], predictions: list[list[str]], k: list[int]) -> Any:
        assert k == [1]
        passed = [self.passes(code, tests) for (code,), tests in zip(predictions, references, strict=True)]
        return {"pass@1": sum(passed) / len(passed)}, {}

    @staticmethod
    def passes(code: str, tests: str) -> bool:
        try:
            exec(f"{code}\n{tests}", {})
        except AssertionError:
            return False
        return True


@pytest.fixture
def code_eval(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    utils = "lm_eval.tasks.mbpp.utils"
    sys.modules.pop(utils, None)
    monkeypatch.setattr(evaluate, "load", lambda name: {"code_eval": CodeEval()}[name])
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    yield
    sys.modules.pop(utils, None)


def solution(document: dict[str, Any]) -> str:
    name, number = re.findall(r"(add_(\d+))", document["target"])[0]
    return f"def {name}(value):\n    return value + {number}\n"


@pytest.mark.usefixtures("code_eval")
def test_mbpp_is_scored_by_its_tests(manager: TaskManager) -> None:
    allowed = {"confirm_run_unsafe_code": True}
    assert scores(Answers(solution), "long_mbpp", manager, **allowed)["pass_at_1,none"] == 1.0
    wrong = Answers(lambda document: solution(document).replace("+", "-"))
    assert scores(wrong, "long_mbpp", manager, **allowed)["pass_at_1,none"] == 0.0


@pytest.mark.usefixtures("code_eval")
def test_mbpp_runs_no_code_unless_told_to(manager: TaskManager) -> None:
    with pytest.raises(ValueError, match="long_mbpp which is marked as unsafe"):
        scores(Answers(solution), "long_mbpp", manager)


def test_long_gsm8k_end_to_end(manager: TaskManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    lm = QAdALM(str(needle.FOLDER), device="cpu")
    results = scores(lm, "long_gsm8k", manager, limit=2, gen_kwargs={"max_gen_toks": 8})
    assert results["exact_match,flexible-extract"] == 0.0  # the model has no words for it
    assert 0.0 < results["cache_sparsity,none"] <= 1.0
    assert results["cache_host_bytes,none"] > 0


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
