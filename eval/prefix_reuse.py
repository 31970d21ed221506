"""One document read once, many questions about it at once: time and memory, `python -m eval.prefix_reuse`.

    python -m eval.prefix_reuse --out eval/results/prefix_reuse.csv

Every question goes to a cache of its own that holds the document, and all of these caches stay, as those of users who
are talking with a server. They are copies (`copy.deepcopy`) of one that has read it, or each loads its file, or each
reads it again. Memory is the process's proportional share (`Pss`), in which pages that several caches have in common
count once; of it, what lies in a file can be dropped and read again. It is known on Linux alone.
"""

import argparse
import contextlib
import copy
import ctypes
import functools
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from eval.shared import language_model
from eval.shared.tables import align, new_file, write
from qada_cache import QAdACache, prepare
from qada_cache.machine import describe_machine
from qada_cache.tuning.measuring import read_default_text
from qada_cache.versions import pass_cache

AGAIN = 1  # of the questions, those for which the document is read again: it takes as long every time
COPIED = "DynamicCache, deepcopy"
PLAIN = "QAdACache, load that shares nothing"
QUESTIONS = tuple(
    f"\n\nQuestion: {question}\nAnswer:"
    for question in (
        *("What is an object?", "What is a type?", "What is a value?", "What does a name refer to?"),
        *("What is a block?", "What is a scope?", "What is a module?", "What is a package?"),
        *("What is an exception?", "What is a function?", "What is a class?", "What is an iterator?"),
        *("What is a coroutine?", "What is a literal?", "What is an operator?", "What is an attribute?"),
    )
)


def count_held() -> dict[str, int]:
    """Bytes of this process in memory, all and what lies in files; a page that is mapped several times counts once."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # what was freed, and glibc keeps for later, is not held
        ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {name: int(size.split()[0]) * 1024 for name, size in (line.split(":") for line in lines)}
    return {"all": found["Pss"], "file": found["Pss_File"]}


@dataclass
class Round:
    """How one way of having a cache for every question did.

    Attributes:
        answers: tokens of each.
        got, answered: seconds to have each cache, and for each answer.
        held: as `count_held`, more than before the first of them.
    """

    answers: list[list[int]]
    got: list[float]
    answered: list[float]
    held: dict[str, int]


@torch.inference_mode()
def ask(
    model: PreTrainedModel, texts: list[Tensor], get: Callable[[], DynamicCache], *, answer: int, bar: tqdm
) -> Round:
    """Put every text `[1, tokens]`, document and question, to a cache of its own; all of these stay till the end."""
    before, caches, found = count_held(), [], Round([], [], [], {})
    for text in texts:
        begin = time.perf_counter()
        caches.append(get())
        ready = time.perf_counter()
        told = language_model.answer(model, text, caches[-1], answer)
        found.answers.append(told[0, text.shape[1] :].tolist())
        found.got.append(ready - begin)
        found.answered.append(time.perf_counter() - ready)
        bar.update()
    found.held = {name: size - before[name] for name, size in count_held().items()}
    return found


@torch.inference_mode()
def read(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> DynamicCache:
    """The cache, which has read the document."""
    model(ids, **pass_cache(cache), logits_to_keep=1)
    return cache


def measure(model: PreTrainedModel, ids: Tensor, texts: list[Tensor], *, answer: int) -> list[dict[str, Any]]:
    """A row for every way, `ids` `[1, tokens]` being the document."""
    prepare(model)
    rounds: dict[str, Round] = {}
    with tqdm(total=5 * len(texts) + AGAIN, unit="answer") as bar, tempfile.TemporaryDirectory() as folder:

        def go(name: str, get: Callable[[], DynamicCache], asked: list[Tensor]) -> None:
            bar.set_postfix_str(name)
            rounds[name] = ask(model, asked, get, answer=answer, bar=bar)

        go("DynamicCache, read again", lambda: read(model, ids, DynamicCache(config=model.config)), texts[:AGAIN])
        prefix = read(model, ids, DynamicCache(config=model.config))
        go(COPIED, functools.partial(copy.deepcopy, prefix), texts)
        prefix = read(model, ids, QAdACache(model))
        prefix.save(path := Path(folder) / "document.safetensors")
        go(PLAIN, lambda: QAdACache.load(path, model, mmap=False), texts)
        go("QAdACache, deepcopy", functools.partial(copy.deepcopy, prefix), texts)
        go("QAdACache, load", lambda: QAdACache.load(path, model), texts)
        prefix = QAdACache.load(path, model)
        go("QAdACache, load once and deepcopy", functools.partial(copy.deepcopy, prefix), texts)
    rows = []
    for name, found in rounds.items():
        copied = rounds[COPIED if name.startswith("Dynamic") else PLAIN].answers
        same = sum(one == other for one, other in zip(found.answers, copied, strict=False))
        rows.append(
            {
                "way": name,
                "document_tokens": ids.shape[1],
                "questions": len(found.answers),
                "answer_tokens": answer,
                "same": f"{same}/{len(found.answers)}",
                "mib_each": f"{found.held['all'] / len(found.answers) / 2**20:.1f}",
                "of_it_file_mib": f"{found.held['file'] / len(found.answers) / 2**20:.1f}",
                "first_cache_s": f"{found.got[0]:.3f}",
                "further_cache_s": f"{mean(found.got[1:]):.3f}" if found.got[1:] else "",
                "answer_s": f"{mean(found.answered):.3f}",
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.prefix_reuse", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default=language_model.DEFAULT, help=language_model.HELP)
    add("--tokens", type=int, default=7500, help="of the document (default: %(default)s)")
    add("--questions", type=int, default=len(QUESTIONS), help=f"{AGAIN} to {len(QUESTIONS)} (default: %(default)s)")
    add("--answer", type=int, default=16, help="tokens of every answer (default: %(default)s)")
    add("--out", type=new_file, help="table to write, a CSV file")
    options = parser.parse_args(arguments)
    if not AGAIN <= options.questions <= len(QUESTIONS):
        parser.error(f"--questions must be {AGAIN} to {len(QUESTIONS)}")
    if not Path("/proc/self/smaps_rollup").exists():
        parser.error("this system does not say what memory a process shares")
    with language_model.check_loading(parser):
        model, tokenizer = language_model.load(options.model)
    ids = tokenizer(read_default_text(), return_tensors="pt", verbose=False).input_ids[:, : options.tokens]
    questions = [tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids for text in QUESTIONS]
    texts = [torch.cat([ids, question], dim=1) for question in questions[: options.questions]]
    rows = measure(model, ids, texts, answer=options.answer)
    print(f"{describe_machine()}; {torch.get_num_threads()} threads")
    print(align(rows))
    if options.out:
        name = language_model.label(options.model)
        write(options.out, rows, model=name, threads=torch.get_num_threads(), machine=describe_machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
