"""What a cache holds, what the process takes for it, and what grows: `python -m eval.memory`.

    python -m eval.memory held --model smollm2 --tokens 7500 --dtype bfloat16 --out eval/results/memory-smollm2.csv
    python -m eval.memory soak --model tiny --tokens 20000 --dtype float32 --out eval/results/soak-tiny-cpu.csv

`held`: every cache has a process of its own, which loads the model, its key moments and kernels, reads a text and
decodes behind it. `held_mib` is what `stats()` counts, sketch, moments and room to grow included. `peak_mib` is the
most anonymous memory of the process above what it had before the text (`PeakMemory`, Linux), which is read at once or
in chunks (`--chunk`): what the cache holds, temporaries of the model and of the cache, and free memory that malloc
keeps. `over_dynamic` and `peak_over_dynamic` are these over DynamicCache's. `file_mib` is the size of the cache's file,
and `copy_mib` what each of 16 copies adds that decodes one token (`Pss`). A table that exists is added to.

`soak`: a very long generation, its beginning beside its end. Every step decodes one token after a prompt, with
QAdACache by default: of one row, and of two rows of which one is padded on the left to the other's length. Nothing but
the context should grow: a step's time as the bytes that are read do, the process by the bytes that the cache holds.
`p99` over `p50` tells whether some steps do what many should share.
"""

import argparse
import copy
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median_high, quantiles
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from eval.shared import language_model, timing
from eval.shared.processes import count_process, run_alone
from eval.shared.tables import make_parser, report, table_of
from qada_cache import QAdACache, prepare
from qada_cache.process_memory import PeakMemory
from qada_cache.stats import count_bytes
from qada_cache.tuning.measuring import read_default_text
from qada_cache.versions import pass_cache

DYNAMIC = "DynamicCache"
BITS = {"QAdACache": None, "QAdACache, 16 bits": 16, "QAdACache, 4 bits": 4}
CACHES = (DYNAMIC, *BITS)
COPIES = 16
PART = 10  # the first and the last tenth of a long generation's steps are compared
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
    before, copies = count_process()["all"], []
    for _ in range(COPIES):
        copies.append(copy.deepcopy(cache))
        model(torch.zeros(1, 1, dtype=torch.long), **pass_cache(copies[-1]))
    return (count_process()["all"] - before) // COPIES


@torch.inference_mode()
def hold(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, int]:
    """One cache, in this process."""
    with language_model.check_loading(parser):
        model, tokenizer = language_model.load(
            options.model, dtype=options.dtype, tokens=options.tokens + options.new_tokens
        )
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


def measure_held(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """A row for every cache, medians over rounds."""
    if min(options.tokens, options.new_tokens, options.rounds) < 1 or options.chunk < 0:
        parser.error("--tokens, --new-tokens and --rounds must be at least 1, --chunk at least 0")
    with PeakMemory() as memory:
        pass
    if memory.nbytes is None:
        parser.error("this system does not tell what a process takes: run it on Linux")
    if options.cache:
        print(json.dumps(hold(parser, options)))
        return
    found: dict[str, list[dict[str, int]]] = {name: [] for name in CACHES}
    given = {name: getattr(options, name) for name in ("model", "tokens", "dtype", "new_tokens", "chunk")}
    with tqdm(total=options.rounds * len(CACHES), unit="process") as bar:
        for _ in range(options.rounds):
            for name, taken in found.items():
                bar.set_postfix_str(name)
                taken.append(run_alone("memory", "held", **given, cache=name))
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
    report(rows, options.out, add=True, model=language_model.label(options.model), dtype=options.dtype)


def measure_resident() -> int:
    """Bytes of the process in memory; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


@torch.inference_mode()
def soak(
    model: PreTrainedModel, *, prompt: int, tokens: int, padded: bool, seed: int, bar: tqdm
) -> tuple[list[float], list[dict[str, float]]]:
    """Seconds of every step, and what was held after the prompt and at the end."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 if padded else 1
    ids = torch.randint(1, model.config.get_text_config().vocab_size, (rows, prompt + tokens), generator=generator)
    mask = torch.ones(rows, prompt + tokens, dtype=torch.long)
    mask[1:, : prompt // 2] = 0
    ids, mask = ids.to(model.device), mask.to(model.device)
    prepare(model)  # kernels are built once, for all caches
    cache, seconds, held = QAdACache(model), [], []
    model(ids[:, :prompt], attention_mask=mask[:, :prompt], **pass_cache(cache), logits_to_keep=1)

    def note() -> None:
        gc.collect()
        stats = cache.stats()
        held.append({"device": stats.device_bytes, "host": stats.host_bytes, "process": measure_resident()})

    note()
    for place in range(prompt, prompt + tokens):
        begin = time.perf_counter()
        model(ids[:, place : place + 1], attention_mask=mask[:, : place + 1], **pass_cache(cache))
        timing.wait(model.device)
        seconds.append(time.perf_counter() - begin)
        bar.update()
    note()
    return seconds, held


def make_row(name: str, prompt: int, seconds: list[float], held: list[dict[str, float]]) -> dict[str, Any]:
    """One run, as a row of the table: milliseconds, and MiB (2^20 bytes)."""
    part = max(len(seconds) // PART, 2)
    return {
        "rows": name,
        "prompt": prompt,
        "tokens": len(seconds),
        "first_p50_ms": f"{1e3 * median_high(seconds[:part]):.2f}",
        "last_p50_ms": f"{1e3 * median_high(seconds[-part:]):.2f}",
        "p99_over_p50": f"{quantiles(seconds, n=100)[98] / median_high(seconds):.2f}",
        "worst_over_p50": f"{max(seconds) / median_high(seconds):.2f}",
        **{
            f"{when}_{what}_mib": f"{size / MIB:.1f}"
            for when, state in zip(("first", "last"), held, strict=True)
            for what, size in state.items()
        },
    }


def measure_soak(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """A row for each batch."""
    if options.tokens < 2 * PART or options.prompt < 2:
        parser.error(f"--tokens must be at least {2 * PART}, --prompt at least 2")
    model, _, _ = timing.load_model(parser, options, tokens=options.prompt + options.tokens)
    rows = []
    with tqdm(total=2 * options.tokens, unit="token") as bar:
        for padded, name in ((False, "one"), (True, "two, one padded")):
            found = soak(model, prompt=options.prompt, tokens=options.tokens, padded=padded, seed=options.seed, bar=bar)
            rows.append(make_row(name, options.prompt, *found))
    timing.report(options, rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = make_parser("memory", __doc__)
    parts = parser.add_subparsers(required=True, metavar="held|soak")
    add = (part := parts.add_parser("held", help="bytes held, and what processes take")).add_argument
    part.set_defaults(measure=measure_held)
    add("--model", default=language_model.DEFAULT, help=language_model.HELP)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: %(default)s)")
    add("--tokens", type=int, default=7500, help="of the text (default: %(default)s)")
    add("--new-tokens", type=int, default=64, help="decoded behind it (default: %(default)s)")
    add("--chunk", type=int, default=0, help="`generate`'s prefill_chunk_size; 0 reads at once (default: %(default)s)")
    add("--rounds", type=int, default=1, help="of all caches; figures are medians (default: %(default)s)")
    add("--cache", choices=CACHES, help="one alone, in this process, as the others' are called")
    add("--out", type=table_of("cache", "held_mib", "peak_mib"), help="CSV table to write or to add to")
    part = parts.add_parser("soak", help="what grows over a long generation")
    add = timing.add_options(part, "first_p50_ms", "last_p50_ms")
    part.set_defaults(measure=measure_soak)
    add("--prompt", type=int, default=2048, help="tokens read at first (default: %(default)s)")
    add("--tokens", type=int, default=20000, help="tokens decoded after it (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.measure(parser, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
