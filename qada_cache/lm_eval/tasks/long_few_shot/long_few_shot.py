"""Documents of `long_gsm8k` and `long_mbpp`: a few real examples hidden among many made from SQuAD, then a question.

Every example of a prompt stands in the same frame. Nothing but the real ones shows how the question is to be answered
(GSM8K's "#### 72", MBPP's Python), and they are seldom near the end.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import datasets
from datasets import Dataset, Split

REAL, MADE = 5, 55  # examples in a prompt, the paper's numbers

Row = Mapping[str, Any]


class Example(NamedTuple):
    """One example in its frame: the text up to where the answer begins, and the answer up to the frame's end."""

    question: str
    answer: str


def frame_gsm8k(question: str, answer: str) -> Example:
    """A question and its worked answer as `long_gsm8k` shows them."""
    return Example(f"Question: {question.strip()}\nAnswer:", f" {answer.strip()}")


def frame_mbpp(task: str, tests: str, code: str) -> Example:
    """A task, the tests of its solution and the solution as `long_mbpp` shows them."""
    code = code.replace("\r\n", "\n").strip()  # almost all of MBPP's code, and none of SQuAD, has \r\n: a giveaway
    return Example(f"Task: {task.strip()}\nTests:\n{tests.strip()}\n[BEGIN]\n", f"{code}\n[DONE]")


def hide(real: Sequence[Example], made: Sequence[Example], question: str, seed: int) -> str:
    """The prompt: `REAL` and `MADE` examples drawn at random, all in random order, then `question`, unanswered.

    An example of the same question is never among them. The same arguments give the same prompt.

    Raises:
        ValueError: too few examples to draw from.
    """
    real = [example for example in real if example.question != question]
    if len(real) < REAL or len(made) < MADE:
        raise ValueError(
            f"{len(real)} real and {len(made)} made examples to draw from, {REAL} and {MADE} are needed: "
            "the data sets must be whole"
        )
    draw = random.Random(seed)
    examples = draw.sample(real, REAL) + draw.sample(made, MADE)
    draw.shuffle(examples)
    return "\n\n".join([*(example.question + example.answer for example in examples), question])


def make_gsm8k_documents(train: Iterable[Row], test: Iterable[Row], squad: Iterable[Row]) -> list[dict[str, str]]:
    """A `prompt` and its `target`, the final number, of each test row; its number in the split is the seed."""
    real = [frame_gsm8k(row["question"], row["answer"]) for row in train]
    made = [frame_gsm8k(f"{row['context']} {row['question']}", row["answers"]["text"][0]) for row in squad]
    return [
        {
            "prompt": hide(real, made, frame_gsm8k(row["question"], row["answer"]).question, seed),
            "target": row["answer"].rpartition("####")[2].strip(),
        }
        for seed, row in enumerate(test)
    ]


def make_mbpp_documents(examples: Iterable[Row], test: Iterable[Row], squad: Iterable[Row]) -> list[dict[str, str]]:
    """A `prompt` and its `target`, the tests, of each test row; its number in the split is the seed."""

    def frame(row: Row) -> Example:
        return frame_mbpp(row["text"], "\n".join(row["test_list"]), row["code"])

    real = [frame(row) for row in examples]
    made = [frame_mbpp(row["question"], row["context"], row["answers"]["text"][0]) for row in squad]
    return [
        {"prompt": hide(real, made, frame(row).question, seed), "target": "\n".join(row["test_list"])}
        for seed, row in enumerate(test)
    ]


def load_squad() -> Dataset:
    """Rows of SQuAD: `context`, `question` and `answers`."""
    return datasets.load_dataset("rajpurkar/squad", split="validation")


def long_gsm8k(**metadata: Any) -> dict[str, Dataset]:
    """GSM8K's test split, its examples drawn from the training split. `metadata` is lm-eval's, and not used."""
    gsm8k = datasets.load_dataset("openai/gsm8k", "main")
    documents = make_gsm8k_documents(gsm8k["train"], gsm8k["test"], load_squad())
    return {"test": Dataset.from_list(documents, split=Split.TEST)}


def long_mbpp(**metadata: Any) -> dict[str, Dataset]:
    """MBPP's test split, its examples drawn from the ten of the split for prompts. `metadata` is not used."""
    mbpp = datasets.load_dataset("google-research-datasets/mbpp", "full")
    documents = make_mbpp_documents(mbpp["prompt"], mbpp["test"], load_squad())
    return {"test": Dataset.from_list(documents, split=Split.TEST)}
