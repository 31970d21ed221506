"""lm-eval's index of tasks, whose documents are as long as they are to be in tokens of a model."""

import argparse
import atexit
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from eval.shared.language_model import find_hflm_source


@cache
def make_tokenizer_folder(model: str, gguf_file: str) -> str:
    """One that this process keeps: RULER's own tasks load a tokenizer without the name of the GGUF file it is in."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    AutoTokenizer.from_pretrained(model, gguf_file=gguf_file).save_pretrained(folder.name)
    return folder.name


@cache
def make_task_manager(
    model: str, length: int, gguf_file: str | None = None, documents: int | None = None
) -> TaskManager:
    """lm-eval's index of tasks, slow to make; their metadata are a length, documents if given, and the tokenizer."""
    metadata: dict[str, Any] = {"pretrained": model, "max_seq_lengths": [length]}
    if gguf_file is not None:
        metadata["tokenizer"] = make_tokenizer_folder(model, gguf_file)
    if documents is not None:
        metadata["documents"] = documents
    return TaskManager(metadata=metadata)


def find_task_manager(name: str, length: int, documents: int) -> TaskManager:
    """That of a model by its name on the command line."""
    where, gguf = find_hflm_source(name)
    return make_task_manager(where, length, gguf.get("gguf_file"), documents)


def check_tasks(parser: argparse.ArgumentParser, names: Sequence[str], manager: TaskManager) -> None:
    """End the program if lm-eval has no such task, and there is no such YAML file."""
    known = set(manager.all_tasks)
    if unknown := [name for name in names if name not in known and not Path(name).is_file()]:
        parser.error(f"--tasks: lm-eval has no task {', '.join(unknown)}")
