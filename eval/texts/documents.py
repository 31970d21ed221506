"""Texts that ways of deciding are tried on: some to be continued, and questions of lm-eval tasks, with answers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qada_cache.tuning.pieces import default_text

PROSE, CODE = "prose", "code"
SPARSE = ", sparse question"


@dataclass(frozen=True)
class Document:
    """One text, and how it goes on.

    Args:
        task: `PROSE`, `CODE`, or an lm-eval task; `SPARSE` behind it if its question is read sparsely.
        length: tokens asked for.
        index: which of the task's documents.
        prompt: int64 `[1, tokens]`.
        answer: int64 `[1, tokens]`, what comes next; of a task, the answer that is right.
        expected: that answer as text; "" of what is to be continued.
        question: the last tokens of the prompt, so many, that are not read with the text but in a call of their own.
    """

    task: str
    length: int
    index: int
    prompt: Tensor
    answer: Tensor
    expected: str = ""
    question: int = 1

    @property
    def text(self) -> Tensor:
        """int64 `[1, tokens]`: the prompt without its question."""
        return self.prompt[:, : -self.question]

    @property
    def following(self) -> Tensor:
        """int64 `[1, tokens]`, fed after the text: the question, and the answer but for its last token."""
        return torch.cat([self.prompt[:, -self.question :], self.answer[:, :-1]], dim=1)


def with_dense_question(document: Document) -> Document:
    """The same, but its question is read exactly, as the text is: all but its last token, where every answer begins."""
    return replace(document, task=document.task.removesuffix(SPARSE), question=1)


def is_continued(task: str) -> bool:
    """Whether documents of the task are pieces of text, rather than questions."""
    return task.partition(":")[0] in (PROSE, CODE)


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that begins a text, if the tokenizer puts one there."""
    return [index for index in tokenizer("").input_ids[:1] if index == tokenizer.bos_token_id]


def prose(
    tokenizer: PreTrainedTokenizerBase, *, length: int, following: int, text: Path | None = None
) -> Iterator[Document]:
    """Pieces of `length` tokens one after the other, and the `following` tokens after each; as many as the text has."""
    whole = text.read_text(encoding="utf-8") if text else default_text()
    ids = tokenizer(whole, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids
    begin = beginning(tokenizer)
    piece = length - len(begin) + following
    task = f"{PROSE}:{text.stem}" if text else PROSE
    for index in range(ids.shape[1] // piece):
        taken = torch.cat([torch.tensor([begin], dtype=torch.long), ids[:, index * piece : (index + 1) * piece]], dim=1)
        yield Document(task, length, index, taken[:, :length], taken[:, length:])


def task_documents(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    count: int,
    manager: TaskManager,
) -> Iterator[Document]:
    """The first documents of an lm-eval task, asked in its own words, and their answers.

    The last line of a prompt is its `question`, to be read sparsely.

    Raises:
        ValueError: a document has several answers, which have no one order.
    """
    made = manager.load([task])["tasks"][task]
    made.build_all_requests(limit=count)
    for index, instance in enumerate(made.instances):
        target = made.doc_to_target(instance.doc)
        answers = [target] if isinstance(target, str) else target
        if len(answers) != 1:
            raise ValueError(f"{task} has {len(answers)} answers a document, and trials take one: use eval.sweep")
        asked = instance.args[0]
        text, newline, last = asked.rpartition("\n")
        told, question, answer = (
            tokenizer(part, return_tensors="pt", add_special_tokens=special, verbose=False).input_ids
            for part, special in ((text + newline, True), (last, False), (f" {answers[0].strip()}", False))
        )
        prompt = torch.cat([told, question], dim=1)  # the text is read before the question is known
        yield Document(task + SPARSE, length, index, prompt, answer, answers[0].strip(), question.shape[1])
