"""`long_gsm8k` and `long_mbpp`: their prompts, their scores, and one run end to end."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install qada-cache[eval])")

import evaluate  # noqa: E402
import needle  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval_rows import GSM8K_TEST, MBPP_TEST, SQUAD, gsm8k_row, load_dataset, mbpp_row  # noqa: E402
from stand_ins import Answers, scores, some_tasks  # noqa: E402

from qada_cache.lm_eval import QAdALM, startup  # noqa: E402
from qada_cache.lm_eval.tasks.long_few_shot import long_few_shot  # noqa: E402

startup.install()  # for an environment in which the package is not installed


def documents(task: str, *, real: range = range(20)) -> list[dict[str, str]]:
    """The task's documents for eight test rows, numbered from 1000. Real examples are drawn from rows `real`."""
    if task == "long_gsm8k":
        return long_few_shot.make_gsm8k_documents([gsm8k_row(number) for number in real], GSM8K_TEST, SQUAD)
    return long_few_shot.make_mbpp_documents([mbpp_row(number) for number in real], MBPP_TEST, SQUAD)


# Patterns for each task: the start of an example, a whole example, and a text that only a real one has.
FRAMES = {
    "long_gsm8k": (r"\n\n(?=Question: )", r"Question: \S.*\S\nAnswer: \S[^\r]*\S", "####"),
    "long_mbpp": (r"\n\n(?=Task: )", r"Task: \S.*\S\nTests:\n\S[^\r]*\S\n\[BEGIN\]\n\S[^\r]*\S\n\[DONE\]", "return"),
}
both_tasks = pytest.mark.parametrize("task", FRAMES)


def examples(task: str, document: dict[str, str]) -> tuple[list[str], str]:
    """A prompt's examples, and the question after them."""
    *before, question = re.split(FRAMES[task][0], document["prompt"])
    return before, question


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    return some_tasks()


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


# A model's answer, and its score by each of the two filters.
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
