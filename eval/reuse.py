"""One document read once, and asked about again: `python -m eval.reuse`.

    python -m eval.reuse copies --tokens 7500 --out eval/results/prefix_reuse.csv
    python -m eval.reuse restart --model smollm2 --tokens 7500 --out eval/results/restart-smollm2.csv

`copies`: many questions at once, time and memory. Every question goes to a cache of its own that holds the document,
and all of these caches stay, as those of users who are talking with a server. They are copies (`copy.deepcopy`) of one
that has read it, or each loads its file, or each reads it again. Memory is the process's proportional share (`Pss`), in
which pages that several caches have in common count once; of it, what lies in a file can be dropped and read again. It
is known on Linux alone.

`restart`: a second question in a new process, time to its first token. One process reads the document and a question,
answers it, and keeps both in a `PrefixStore`; a turn on top says what another turn writes. Then every way of answering
a second question has processes of its own: by DynamicCache and by QAdACache, which read everything again, and by the
store, whose files lie in memory or are read from the disk. By the store another process takes a third turn, and one
answers behind a document of which a token near the end is another. Loading the model, its moments and kernels is left
out. The answers are compared with those of the first process, which kept its cache and cropped it.
"""

import argparse
import copy
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from eval.shared import language_model
from eval.shared.processes import SMAPS, count_process, run_alone
from eval.shared.tables import make_parser, report, table_of, to_count
from qada_cache import PrefixStore, QAdACache, prepare
from qada_cache.tuning.measuring import read_default_text
from qada_cache.versions import pass_cache

Rows = list[dict[str, Any]]
Texts = tuple[PreTrainedModel, Tensor, Callable[[Tensor, str], Tensor]]
AGAIN = 1  # number of questions for which the document is read again: that takes as long every time
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
FIRST, DYNAMIC, READ_AGAIN = "read and kept", "DynamicCache, read again", "QAdACache, read again"
STORED, FROM_DISK = "PrefixStore", "PrefixStore, files from the disk"
THIRD, EDITED = "PrefixStore, a third turn", "PrefixStore, an edit near the end"
WAYS = (DYNAMIC, READ_AGAIN, STORED, FROM_DISK)  # ways of answering the second question
TURN = "\n\nQuestion: And what does a name refer to, in a block of code that is executed?\nAnswer:"
FROM_END = 200  # tokens of the document from its edited token to its end


def load_texts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Texts:
    """The model, the document `[1, tokens]`, and a function that appends a question to token ids."""
    with language_model.check_loading(parser):
        model, tokenizer = language_model.load(options.model, tokens=options.tokens)
        document = tokenizer(read_default_text(), return_tensors="pt", verbose=False).input_ids[:, : options.tokens]
        if (tokens := document.shape[1]) < options.tokens:
            parser.error(f"--tokens: the text has {tokens} tokens, which are fewer than {options.tokens}")
        prepare(model)

    def append_text(ids: Tensor, text: str) -> Tensor:
        return torch.cat([ids, tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids], dim=1)

    return model, document, append_text


@dataclass
class Round:
    """The answers, seconds and memory of one way of having a cache for every question.

    Attributes:
        answers: each answer's token ids.
        got, answered: seconds to have each cache, and seconds to answer with it.
        held: bytes by `count_process`, less those before the first cache.
    """

    answers: list[list[int]]
    got: list[float]
    answered: list[float]
    held: dict[str, int]


@torch.inference_mode()
def ask(
    model: PreTrainedModel, texts: list[Tensor], get: Callable[[], DynamicCache], *, tokens: int, bar: tqdm
) -> Round:
    """Answer every text `[1, tokens]`, document and question, by a cache of its own. All caches stay till the end."""
    before, caches, measured = count_process(), [], Round([], [], [], {})
    for text in texts:
        begin = time.perf_counter()
        caches.append(get())
        ready = time.perf_counter()
        answered_ids = language_model.answer(model, text, caches[-1], tokens)
        measured.answers.append(answered_ids[0, text.shape[1] :].tolist())
        measured.got.append(ready - begin)
        measured.answered.append(time.perf_counter() - ready)
        bar.update()
    measured.held = {name: size - before[name] for name, size in count_process().items()}
    return measured


@torch.inference_mode()
def read(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> DynamicCache:
    """Returns `cache`, after it has read `ids` `[1, tokens]`."""
    model(ids, **pass_cache(cache), logits_to_keep=1)
    return cache


def measure_copies(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Rows:
    """A row for every way of having caches."""
    if not AGAIN <= options.questions <= len(QUESTIONS):
        parser.error(f"--questions must be {AGAIN} to {len(QUESTIONS)}")
    if not SMAPS.exists():
        parser.error("this system does not say what memory a process shares")
    model, ids, append_text = load_texts(parser, options)
    texts = [append_text(ids, question) for question in QUESTIONS[: options.questions]]
    rounds: dict[str, Round] = {}
    with tqdm(total=5 * len(texts) + AGAIN, unit="answer") as bar, tempfile.TemporaryDirectory() as folder:

        def go(name: str, get: Callable[[], DynamicCache], questions: list[Tensor]) -> None:
            bar.set_postfix_str(name)
            rounds[name] = ask(model, questions, get, tokens=options.answer, bar=bar)

        go(DYNAMIC, lambda: read(model, ids, DynamicCache(config=model.config)), texts[:AGAIN])
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
    for name, measured in rounds.items():
        compared = rounds[COPIED if name.startswith("Dynamic") else PLAIN].answers
        same = sum(one == other for one, other in zip(measured.answers, compared, strict=False))
        rows.append(
            {
                "way": name,
                "document_tokens": ids.shape[1],
                "questions": len(measured.answers),
                "answer_tokens": options.answer,
                "same": f"{same}/{len(measured.answers)}",
                "mib_each": f"{measured.held['all'] / len(measured.answers) / 2**20:.1f}",
                "of_it_file_mib": f"{measured.held['file'] / len(measured.answers) / 2**20:.1f}",
                "first_cache_s": f"{measured.got[0]:.3f}",
                "further_cache_s": f"{mean(measured.got[1:]):.3f}" if measured.got[1:] else "",
                "answer_s": f"{mean(measured.answered):.3f}",
            }
        )
    return rows


def answer(model: PreTrainedModel, ids: Tensor, make: Callable[[], Cache], tokens: int) -> tuple[dict[str, Any], Cache]:
    """Answers `ids` `[1, tokens]` by the cache of `make`. Returns seconds, tokens read and token ids, and the cache."""
    clock, begin = language_model.Clock(), time.perf_counter()
    cache = make()
    ready, cached = time.perf_counter(), cache.get_seq_length()
    output = language_model.answer(model, ids, cache, tokens, streamer=clock)
    figures = {"cache_s": ready - begin, "first_token_s": clock.times[1] - begin, "read": ids.shape[1] - cached}
    return figures | {"ids": output[0].tolist(), "answer": output[0, ids.shape[1] :].tolist()}, cache


def drop_from_memory(folder: Path) -> None:
    """Ask the system to drop these files from its page cache, so that they are next read from the disk."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def go_back(cache: QAdACache, tokens: int) -> None:
    """Crop a cache to `tokens` tokens, or to fewer if its layers can only go back further."""
    if surplus := cache.get_seq_length() - cache.find_last_beginning(tokens):
        cache.crop(-surplus)


def run_way(parser: argparse.ArgumentParser, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one way, in this process. The first way writes all texts to a file, for the others."""
    model, document, append_text = load_texts(parser, options)
    store, texts = PrefixStore(options.folder / "store", max_bytes=2**40), options.folder / "texts.json"
    if way == FROM_DISK:
        drop_from_memory(options.folder / "store")
    if way != FIRST:
        ids = torch.tensor([json.loads(texts.read_text())[way]])
        makers = {DYNAMIC: lambda: DynamicCache(config=model.config), READ_AGAIN: lambda: QAdACache(model)}
        return answer(model, ids, makers.get(way, lambda: store.cache(model, ids)), options.answer)[0]

    def keep(ids: list[int]) -> dict[str, Any]:
        before, begin = store.stats().written_bytes, time.perf_counter()
        store.keep(cache, ids)
        return {"keep_s": time.perf_counter() - begin, "written": store.stats().written_bytes - before}

    first, second = (append_text(document, QUESTIONS[place]) for place in (0, 12))
    reply, cache = answer(model, first, lambda: store.cache(model, first), options.answer)
    whole = keep(reply["ids"])
    turn_answer, _ = answer(model, append_text(torch.tensor([reply["ids"]]), TURN), lambda: cache, options.answer)
    turn = keep(turn_answer["ids"])
    answers, texts_by_way = {}, dict.fromkeys(WAYS, second)
    texts_by_way |= {THIRD: append_text(torch.tensor([turn_answer["ids"]]), QUESTIONS[3]), EDITED: second.clone()}
    place = document.shape[1] - min(FROM_END, document.shape[1])
    texts_by_way[EDITED][0, place] += 1
    common = {THIRD: cache.get_seq_length(), STORED: document.shape[1], EDITED: place}  # first tokens in common
    for way, tokens in common.items():
        go_back(cache, tokens)
        answers[way] = answer(model, texts_by_way[way], lambda: cache, options.answer)[0]["answer"]
    texts.write_text(json.dumps({way: ids[0].tolist() for way, ids in texts_by_way.items()}))
    stats, paths = store.stats(), list((options.folder / "store").iterdir())
    sizes = {"bytes": stats.bytes, "files_bytes": sum(path.stat().st_size for path in paths)}
    sizes["disk_bytes"] = sum(path.stat().st_blocks * 512 for path in paths)
    turn_tokens = len(turn_answer["ids"]) - len(reply["ids"])
    return reply | sizes | {"whole": whole, "turn": turn, "turn_tokens": turn_tokens, "kept": answers}


def measure_restart(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Rows:
    """A row for every way of answering, with medians over rounds. Each way has a process of its own in each round."""
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder: there is no folder {options.folder}")
    if options.way:
        if options.folder is None:
            parser.error("--way: its --folder is to be given too")
        print(json.dumps(run_way(parser, options.way, options)))
        return []
    rounds: dict[str, list[dict[str, Any]]] = {}
    with tqdm(total=options.rounds * (3 + len(WAYS)), unit="process") as bar:
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                for way in (FIRST, *WAYS, THIRD, EDITED):
                    bar.set_postfix_str(way)
                    arguments = {"model": options.model, "tokens": options.tokens, "answer": options.answer, "way": way}
                    rounds.setdefault(way, []).append(run_alone("reuse", "restart", **arguments, folder=folder))
                    bar.update()
    rows, dynamic = [], median(each["first_token_s"] for each in rounds[DYNAMIC])
    for way, results in rounds.items():
        expected = [each["kept"].get(way, each["kept"][STORED]) for each in rounds[FIRST]]
        same = [each["answer"] == answer_ids for each, answer_ids in zip(results, expected, strict=True)]
        seconds = {name: median(each[name] for each in results) for name in ("cache_s", "first_token_s")}
        row = {
            "way": way,
            "document_tokens": options.tokens,
            "tokens_read": results[0]["read"],
            **{name: f"{value:.3f}" for name, value in seconds.items()},
            "of_dynamic": f"{seconds['first_token_s'] / dynamic:.3f}",
            "as_kept": "" if way == FIRST else f"{sum(same)}/{len(same)}",
        }
        for part in ("whole", "turn"):
            row[f"{part}_keep_s"] = f"{median(each[part]['keep_s'] for each in results):.3f}" if way == FIRST else ""
            row[f"{part}_mib"] = f"{results[0][part]['written'] / 2**20:.1f}" if way == FIRST else ""
        for name in ("turn_tokens", "bytes", "files_bytes", "disk_bytes"):
            row[name] = results[0][name] if way == FIRST else ""
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = make_parser("reuse", __doc__)
    parts = parser.add_subparsers(required=True, metavar="copies|restart")
    copies = parts.add_parser("copies", help="many questions about one document at once")
    restart = parts.add_parser("restart", help="a second question about it in a new process")
    copies.set_defaults(measure=measure_copies)
    restart.set_defaults(measure=measure_restart)
    for part, figure in ((copies, "further_cache_s"), (restart, "as_kept")):
        add = part.add_argument
        add("--model", default=language_model.DEFAULT, help=language_model.HELP)
        add("--tokens", type=to_count, default=7500, help="of the document (default: %(default)s)")
        add("--answer", type=to_count, default=16, help="tokens of every answer (default: %(default)s)")
        add("--out", type=table_of("way", figure), help="CSV table to write")
    add = copies.add_argument
    add("--questions", type=int, default=len(QUESTIONS), help=f"{AGAIN} to {len(QUESTIONS)} (default: %(default)s)")
    add = restart.add_argument
    add("--rounds", type=to_count, default=3, help="of all ways; figures are medians (default: %(default)s)")
    add("--folder", type=Path, help="where the store's folder is made, on the disk to be measured (default: /tmp's)")
    ways = (FIRST, *WAYS, THIRD, EDITED)
    add("--way", choices=ways, help="one way alone, by the folder of a store, as its processes are called")
    options = parser.parse_args(arguments)
    if rows := options.measure(parser, options):
        report(rows, options.out, model=language_model.label(options.model), threads=torch.get_num_threads())
    return 0


if __name__ == "__main__":
    sys.exit(main())
