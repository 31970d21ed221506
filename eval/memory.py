"""What a cache holds, and what the process takes for it: `python -m eval.memory`.

    python -m eval.memory --model smollm2 --tokens 7500 --dtype bfloat16 --out eval/results/memory-smollm2.csv

Every cache has a process of its own: it loads the model, its key moments and kernels, reads a text and decodes behind
it. `held_mib` is what `stats()` counts, sketch, moments and room to grow included. `peak_mib` is the most anonymous
memory of the process above what it had before the text (`PeakMemory`, Linux), which is read at once or in chunks
(`--chunk`): what the cache holds, temporaries of the model and of the cache, and free memory that malloc keeps.
`over_dynamic` and `peak_over_dynamic` are these over DynamicCache's. `file_mib` is the size of the cache's file, and
`copy_mib` what each of 16 copies adds that decodes one token (`Pss`). A table that exists is added to.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from eval.prefix_reuse import count_held
from eval.shared import language_model
from eval.shared.tables import new_file, report
from qada_cache import QAdACache, prepare
from qada_cache.process_memory import PeakMemory
from qada_cache.stats import count_bytes
from qada_cache.tuning.measuring import read_default_text
from qada_cache.versions import pass_cache

DYNAMIC = "DynamicCache"
BITS = {"QAdACache": None, "QAdACache, 16 bits": 16, "QAdACache, 4 bits": 4}
CACHES = (DYNAMIC, *BITS)
COPIES = 16
MIB = 2**20


def make(model: PreTrainedModel, name: str) -> Cache:
    """The cache of this name, empty."""
    return DynamicCache(config=model.config) if name == DYNAMIC else QAdACache(model, bulk_bits=BITS[name])


def measure_file(cache: QAdACache) -> int:
    """Bytes of the cache's file."""
    with tempfile.TemporaryDirectory() as folder:
        cache.save(path := Path(folder) / "cache.safetensors")
        return path.stat().st_size


def measure_copies(model: PreTrainedModel, cache: QAdACache) -> int:
    """Bytes that each of several copies adds which have decoded a token."""
    before, copies = count_held()["all"], []
    for _ in range(COPIES):
        copies.append(copy.deepcopy(cache))
        model(torch.zeros(1, 1, dtype=torch.long), **pass_cache(copies[-1]))
    return (count_held()["all"] - before) // COPIES


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, int]:
    """One cache, in this process."""
    model, tokenizer = language_model.load(options.model, dtype=options.dtype)
    ids = tokenizer(read_default_text(), return_tensors="pt", verbose=False).input_ids[:, : options.tokens]
    if ids.shape[1] < options.tokens:
        raise SystemExit(f"the text has {ids.shape[1]} tokens, which are fewer than {options.tokens}")
    prepare(model)

    def decode(given: torch.Tensor, tokens: int) -> Cache:
        cache = make(model, options.cache)
        chunk = {"prefill_chunk_size": options.chunk} if options.chunk else {}
        language_model.answer(model, given, cache, tokens, **chunk)
        return cache

    decode(ids[:, :1500], 2)  # kernels are built, and what libraries keep is there
    with PeakMemory() as memory:
        cache = decode(ids, options.new_tokens)
    peak = memory.nbytes
    assert peak is not None
    if not isinstance(cache, QAdACache):
        return {"held": sum(count_bytes(cache)), "peak": peak}
    stats = cache.stats()
    held, file = stats.device_bytes + stats.host_bytes, measure_file(cache)
    return {"held": held, "peak": peak, "file": file, "copy": measure_copies(model, cache)}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every cache, medians over rounds."""
    found: dict[str, list[dict[str, int]]] = {name: [] for name in CACHES}
    names = ("model", "tokens", "dtype", "new_tokens", "chunk")
    given = {name.replace("_", "-"): getattr(options, name) for name in names}
    with tqdm(total=options.rounds * len(CACHES), unit="process") as bar:
        for _ in range(options.rounds):
            for name, taken in found.items():
                bar.set_postfix_str(name)
                named = given | {"cache": name}
                told = [part for key, value in named.items() for part in (f"--{key}", str(value))]
                command = [sys.executable, "-m", "eval.memory", *told]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                taken.append(json.loads(done.stdout.splitlines()[-1]))
                bar.update()

    def take_median(name: str, what: str) -> int:
        return sorted(each[what] for each in found[name])[options.rounds // 2]

    rows = []
    for name in CACHES:
        row: dict[str, Any] = {"cache": name}
        row |= {of: getattr(options, of) for of in ("tokens", "new_tokens", "chunk")}
        for what, over in (("held", "over_dynamic"), ("peak", "peak_over_dynamic")):
            row[f"{what}_mib"] = f"{take_median(name, what) / MIB:.1f}"
            row[over] = f"{take_median(name, what) / take_median(DYNAMIC, what):.3f}"
        for what in ("file", "copy"):
            row[f"{what}_mib"] = "" if name == DYNAMIC else f"{take_median(name, what) / MIB:.1f}"
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.memory", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default=language_model.DEFAULT, help=language_model.HELP)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: %(default)s)")
    add("--tokens", type=int, default=7500, help="of the text (default: %(default)s)")
    add("--new-tokens", type=int, default=64, help="decoded behind it (default: %(default)s)")
    add("--chunk", type=int, default=0, help="`generate`'s prefill_chunk_size; 0 reads at once (default: %(default)s)")
    add("--rounds", type=int, default=1, help="of all caches; figures are medians (default: %(default)s)")
    add("--cache", choices=CACHES, help="one alone, in this process, as the others' are called")
    add("--out", type=new_file, help="table to write or to add to, a CSV file")
    options = parser.parse_args(arguments)
    if min(options.tokens, options.new_tokens, options.rounds) < 1 or options.chunk < 0:
        parser.error("--tokens, --new-tokens and --rounds must be at least 1, --chunk at least 0")
    with PeakMemory() as memory:
        pass
    if memory.nbytes is None:
        parser.error("this system does not tell what a process takes: run it on Linux")
    if options.cache:
        print(json.dumps(run(options)))
        return 0
    rows = measure(options)
    report(rows, options.out, add=True, model=language_model.label(options.model), dtype=options.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
