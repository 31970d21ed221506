"""Our task folder alone, and a model with given answers, for tests of lm-eval's tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

import qada_cache

FOLDER = Path(qada_cache.__file__).parent / "lm_eval" / "tasks"


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
