"""lm-eval's index of tasks, whose documents are as long as they are to be in tokens of a model."""

import argparse
import atexit
import itertools
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from eval.shared.language_model import find_hflm_source, find_source
from eval.shared.tables import NEAR


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


def find_task_manager(name: str, length: int, documents: int | None) -> TaskManager:
    """That of a model by its name on the command line."""
    where, gguf = find_hflm_source(name)
    return make_task_manager(where, length, gguf.get("gguf_file"), documents)


def check_tasks(
    parser: argparse.ArgumentParser, names: Sequence[str], model: str, lengths: Sequence[int], documents: int | None
) -> None:
    """End the program if lm-eval has no such task, and there is no such YAML file; or if one has no documents of one of
    the lengths, or none that is longer than what a cache always reads."""
    known = set(find_task_manager(model, lengths[0], documents).all_tasks)
    if unknown := [name for name in names if name not in known and not Path(name).is_file()]:
        parser.error(f"--tasks: lm-eval has no task {', '.join(unknown)}")
    tokenizer = AutoTokenizer.from_pretrained(**find_source(model))
    for name, length in itertools.product(names, lengths):
        try:
            tasks = find_task_manager(model, length, documents).load([name])["tasks"].values()
        except (OSError, ValueError) as error:
            parser.error(f"--tasks {name} --lengths {length}: {shorten(str(error), 400)}")
        for task in tasks:
            task.build_all_requests(limit=documents)
        prompts = (instance.args[0] for task in tasks for instance in task.instances)
        if all(len(tokenizer(prompt, verbose=False).input_ids) <= NEAR + 2 for prompt in prompts):
            parser.error(f"--tasks {name} --lengths {length}: its prompts are sinks and window, or hardly more")
