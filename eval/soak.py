"""A very long generation, its beginning beside its end: `python -m eval.soak`.

    python -m eval.soak --model tiny --tokens 20000 --dtype float32 --out eval/results

Every step decodes one token after a prompt, with QAdACache by default: of one row, and of two rows of which one is
padded on the left to the other's length. Nothing but the context should grow: a step's time as the bytes that are read
do, the process by the bytes that the cache holds. `p99` over `p50` tells whether some steps do what many should share.
"""

import gc
import sys
import time
from pathlib import Path
from statistics import median_high, quantiles
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from eval.shared.timing import load_model, make_timing_parser, report, wait
from qada_cache import QAdACache, prepare
from qada_cache.versions import pass_cache

PART = 10  # the first and the last tenth of the steps are compared


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

    def hold() -> None:
        gc.collect()
        stats = cache.stats()
        held.append({"device": stats.device_bytes, "host": stats.host_bytes, "process": measure_resident()})

    hold()
    for place in range(prompt, prompt + tokens):
        begin = time.perf_counter()
        model(ids[:, place : place + 1], attention_mask=mask[:, : place + 1], **pass_cache(cache))
        wait(model.device)
        seconds.append(time.perf_counter() - begin)
        bar.update()
    hold()
    return seconds, held


def make_row(name: str, prompt: int, seconds: list[float], held: list[dict[str, float]]) -> dict[str, Any]:
    """One run, as a row of the table: milliseconds, and MiB (2^20 bytes)."""
    part = max(len(seconds) // PART, 2)
    first, last = seconds[:part], seconds[-part:]
    before, after = held
    return {
        "rows": name,
        "prompt": prompt,
        "tokens": len(seconds),
        "first_p50_ms": f"{1e3 * median_high(first):.2f}",
        "last_p50_ms": f"{1e3 * median_high(last):.2f}",
        "p99_over_p50": f"{quantiles(seconds, n=100)[98] / median_high(seconds):.2f}",
        "worst_over_p50": f"{max(seconds) / median_high(seconds):.2f}",
        **{
            f"{when}_{what}_mib": f"{state[what] / 2**20:.1f}"
            for when, state in (("first", before), ("last", after))
            for what in state
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the soak; returns the exit status."""
    parser = make_timing_parser("soak", __doc__ or "", table="soak-MODEL-DEVICE.csv")
    add = parser.add_argument
    add("--prompt", type=int, default=2048, help="tokens read at first (default: %(default)s)")
    add("--tokens", type=int, default=20000, help="tokens decoded after it (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.tokens < 2 * PART or options.prompt < 2:
        parser.error(f"--tokens must be at least {2 * PART}, --prompt at least 2")
    model, _, _ = load_model(parser, options, tokens=options.prompt + options.tokens)
    made = []
    with tqdm(total=2 * options.tokens, unit="token") as bar:
        for padded, name in ((False, "one"), (True, "two, one padded")):
            found = soak(model, prompt=options.prompt, tokens=options.tokens, padded=padded, seed=options.seed, bar=bar)
            made.append(make_row(name, options.prompt, *found))
    report(options, made, "soak")
    return 0


if __name__ == "__main__":
    sys.exit(main())
