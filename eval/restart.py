"""A second question about one document in a new process: time to its first token, `python -m eval.restart`.

    python -m eval.restart --model smollm2 --tokens 7500 --out eval/results/restart-smollm2.csv

One process reads a document and a question, answers it, and keeps both in a `PrefixStore`; a turn on top says what
another turn writes. Then every way of answering a second question has processes of its own: by DynamicCache and by
QAdACache, which read everything again, and by the store, whose files lie in memory or are read from the disk. Loading
the model, its moments and kernels is left out. The answers are compared with those of the first process, which kept its
cache and cropped it to the document.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eval.shared import language_model
from eval.shared.tables import align, new_file, write
from qada_cache import PrefixStore, QAdACache, prepare
from qada_cache.machine import describe_machine
from qada_cache.tuning.measuring import read_default_text

FIRST, DYNAMIC, AGAIN = "read and kept", "DynamicCache, read again", "QAdACache, read again"
STORED, FROM_DISK = "PrefixStore", "PrefixStore, files from the disk"
WAYS = (DYNAMIC, AGAIN, STORED, FROM_DISK)  # of answering the second question
QUESTIONS = ("\n\nQuestion: What is an object?\nAnswer:", "\n\nQuestion: What is a coroutine?\nAnswer:")
TURN = "\n\nQuestion: And what does a name refer to, in a block of code that is executed?\nAnswer:"


class FirstToken(BaseStreamer):
    """When the first token came, after the prompt."""

    def __init__(self) -> None:
        self.puts, self.when = 0, 0.0

    def put(self, value: Tensor) -> None:
        """As `generate` calls it: with the prompt, then with each token."""
        self.puts += 1
        if self.puts == 2:
            self.when = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to do."""


def answer(model: PreTrainedModel, ids: Tensor, make: Callable[[], Cache], tokens: int) -> tuple[dict[str, Any], Cache]:
    """What it took to answer `ids` `[1, tokens]` by the cache that `make` makes, and that cache."""
    streamer, begin = FirstToken(), time.perf_counter()
    cache = make()
    ready, held = time.perf_counter(), cache.get_seq_length()
    told = language_model.answer(model, ids, cache, tokens, streamer=streamer)
    took = {"cache_s": ready - begin, "first_token_s": streamer.when - begin, "read": ids.shape[1] - held}
    return took | {"ids": told[0].tolist(), "answer": told[0, ids.shape[1] :].tolist()}, cache


def drop_from_memory(folder: Path) -> None:
    """Have the system forget what it holds of these files, as far as it heeds that."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_way(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """One way, in this process."""
    model, tokenizer = language_model.load(options.model)
    prepare(model)
    document = tokenizer(read_default_text(), return_tensors="pt", verbose=False).input_ids[:, : options.tokens]

    def cut_behind(ids: Tensor, text: str) -> Tensor:
        return torch.cat([ids, tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids], dim=1)

    first, second = (cut_behind(document, question) for question in QUESTIONS)
    store = PrefixStore(options.folder, max_bytes=2**40)
    if way == DYNAMIC:
        return answer(model, second, lambda: DynamicCache(config=model.config), options.answer)[0]
    if way == AGAIN:
        return answer(model, second, lambda: QAdACache(model), options.answer)[0]
    if way != FIRST:
        if way == FROM_DISK:
            drop_from_memory(options.folder)
        return answer(model, second, lambda: store.cache(model, second), options.answer)[0]

    def keep(ids: list[int]) -> dict[str, Any]:
        before, begin = store.stats().written_bytes, time.perf_counter()
        store.keep(cache, ids)
        seconds = time.perf_counter() - begin
        return {"keep_s": seconds, "written": store.stats().written_bytes - before}

    found, cache = answer(model, first, lambda: store.cache(model, first), options.answer)
    whole = keep(found["ids"])
    told, _ = answer(model, cut_behind(torch.tensor([found["ids"]]), TURN), lambda: cache, options.answer)
    turn = keep(told["ids"])
    cache.crop(document.shape[1] - cache.get_seq_length())
    kept, _ = answer(model, second, lambda: cache, options.answer)
    stats, paths = store.stats(), list(Path(options.folder).iterdir())
    sizes = {"bytes": stats.bytes, "files_bytes": sum(path.stat().st_size for path in paths)}
    sizes["disk_bytes"] = sum(path.stat().st_blocks * 512 for path in paths)
    return (
        found
        | sizes
        | {"whole": whole, "turn": turn, "turn_tokens": len(told["ids"]) - len(found["ids"]), "kept": kept}
    )


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every way, medians over rounds; each in processes of its own."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    with tqdm(total=options.rounds * (1 + len(WAYS)), unit="process") as bar:
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                for way in (FIRST, *WAYS):
                    bar.set_postfix_str(way)
                    named = {"model": options.model, "tokens": options.tokens, "answer": options.answer, "way": way}
                    named["folder"] = folder
                    command = [sys.executable, "-m", "eval.restart"]
                    command += [part for name, value in named.items() for part in (f"--{name}", str(value))]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    rounds.setdefault(way, []).append(json.loads(done.stdout.splitlines()[-1]))
                    bar.update()
    rows, dynamic = [], median(each["first_token_s"] for each in rounds[DYNAMIC])
    for way, found in rounds.items():
        told = [each["answer"] == own["kept"]["answer"] for each, own in zip(found, rounds[FIRST], strict=True)]
        seconds = {name: median(each[name] for each in found) for name in ("cache_s", "first_token_s")}
        row = {
            "way": way,
            "document_tokens": options.tokens,
            "tokens_read": found[0]["read"],
            **{name: f"{value:.3f}" for name, value in seconds.items()},
            "of_dynamic": f"{seconds['first_token_s'] / dynamic:.3f}",
            "as_kept": "" if way == FIRST else f"{sum(told)}/{len(told)}",
        }
        for part in ("whole", "turn"):
            row[f"{part}_keep_s"] = f"{median(each[part]['keep_s'] for each in found):.3f}" if way == FIRST else ""
            row[f"{part}_mib"] = f"{found[0][part]['written'] / 2**20:.1f}" if way == FIRST else ""
        for name in ("turn_tokens", "bytes", "files_bytes", "disk_bytes"):
            row[name] = found[0][name] if way == FIRST else ""
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.restart", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default=language_model.DEFAULT, help=language_model.HELP)
    add("--tokens", type=int, default=7500, help="of the document (default: %(default)s)")
    add("--answer", type=int, default=16, help="tokens of every answer (default: %(default)s)")
    add("--rounds", type=int, default=3, help="of all ways; figures are medians (default: %(default)s)")
    add("--folder", type=Path, help="where the store's folder is made, on the disk to be measured (default: /tmp's)")
    add("--way", choices=(FIRST, *WAYS), help="one way alone, by the folder of a store, as its processes are called")
    add("--out", type=new_file, help="table to write, a CSV file")
    options = parser.parse_args(arguments)
    if min(options.tokens, options.answer, options.rounds) < 1:
        parser.error("--tokens, --answer and --rounds must be at least 1")
    if options.way:
        print(json.dumps(run_way(options.way, options)))
        return 0
    rows = measure(options)
    print(f"{describe_machine()}; {torch.get_num_threads()} threads")
    print(align(rows))
    if options.out:
        name = language_model.label(options.model)
        write(options.out, rows, model=name, threads=torch.get_num_threads(), machine=describe_machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
