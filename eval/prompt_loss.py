"""What a prompt read by selection loses, and its time: `python -m eval.prompt_loss`.

    python -m eval.prompt_loss --model smollm2 --tokens 3072 --thresholds 1 4.4 --out eval/results/prompt_loss.csv

Prose, or code, is read at once, exactly and at each `prefill_threshold`, in turn. `kl` is the mean divergence of the
last 512 tokens' predictions from those of the exact reading, `kl_worst` a document's largest, `same` the share of them
with the same likeliest token. `pairs` is the share of all pairs of a query and an earlier key that are computed.
`seconds` is the least time of a reading, `exact_seconds` that of the exact one.
"""

import argparse
import itertools
import sys
import time
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from eval.shared.language_model import DEFAULT, HELP, check_loading, label, load
from eval.shared.selecting import count_pairs
from eval.shared.tables import new_file, report
from eval.shared.texts import CODE, PROSE, read_code, read_prose
from qada_cache import QAdACache
from qada_cache.kernels.cpu import selected_prompt
from qada_cache.versions import pass_cache

LAST = 512  # tokens


@torch.inference_mode()
def read(model: PreTrainedModel, ids: torch.Tensor, threshold: float) -> tuple[torch.Tensor, float, int]:
    """Log probabilities after the last tokens of a prompt, seconds, and the far pairs that were read."""
    with count_pairs() as pairs:
        cache, begin = QAdACache(model, moments="current", prefill_threshold=threshold), time.perf_counter()
        logits = model(ids, **pass_cache(cache), logits_to_keep=LAST).logits[0]
    return logits.float().log_softmax(dim=-1), time.perf_counter() - begin, sum(pairs)


def count_near_pairs(tokens: int, sinks: int, window: int) -> int:
    """Of one head, pairs that are computed whatever is selected."""
    segment, block = selected_prompt.SEGMENT, selected_prompt.BLOCK
    selecting = selected_prompt.find_selecting(tokens, sinks=sinks, window=window)
    pairs, first = tokens * (tokens + 1) // 2, -(-sinks // segment) * segment
    for start in range(selecting.start, selecting.stop, block):
        far = (start - window + 1) // segment * segment - first
        pairs -= far * min(block, selecting.stop - start)
    return pairs


def measure(model: PreTrainedModel, documents: list[torch.Tensor], thresholds: list[float]) -> list[dict[str, Any]]:
    """A row for each threshold."""
    found: dict[float, list[dict[str, float]]] = {threshold: [] for threshold in thresholds}
    config, bar = model.config, tqdm(total=len(documents) * (len(thresholds) + 1), unit="prompt")
    heads, options = config.num_hidden_layers * config.num_attention_heads, QAdACache(model, moments="current").options
    for ids in documents:
        full, exact_seconds, _ = read(model, ids, 0.0)
        bar.update()
        tokens = ids.shape[1]
        for threshold in thresholds:
            told, seconds, pairs = read(model, ids, threshold)
            bar.update()
            computed = pairs + heads * count_near_pairs(tokens, options.sink_tokens, options.window)
            found[threshold].append(
                {
                    "kl": float((full.exp() * (full - told)).sum(dim=-1).mean()),
                    "same": float((full.argmax(dim=-1) == told.argmax(dim=-1)).float().mean()),
                    "pairs": computed / (heads * tokens * (tokens + 1) / 2),
                    "seconds": seconds,
                    "exact_seconds": exact_seconds,
                }
            )
    bar.close()
    return [summarize(threshold, rows) for threshold, rows in found.items()]


def summarize(threshold: float, rows: list[dict[str, float]]) -> dict[str, Any]:
    """Documents in one row."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        "threshold": threshold,
        "documents": len(rows),
        "kl": f"{mean(columns['kl']):.5f}",
        "kl_worst": f"{max(columns['kl']):.5f}",
        "same": f"{mean(columns['same']):.3f}",
        "pairs": f"{mean(columns['pairs']):.3f}",
        "seconds": f"{min(columns['seconds']):.2f}",
        "exact_seconds": f"{min(columns['exact_seconds']):.2f}",
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.prompt_loss", description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default=DEFAULT, help=HELP)
    add("--texts", nargs="+", default=[PROSE], choices=(PROSE, CODE), help="(default: %(default)s)")
    add("--tokens", type=int, default=3072, help="of a prompt (default: %(default)s)")
    add("--documents", type=int, default=2, help="of each text (default: %(default)s)")
    add("--thresholds", type=float, nargs="+", default=[4.4], help="(default: 4.4)")
    add("--dtype", default="auto", help="(default: the model's own)")
    add("--out", type=new_file, help="table to write, a CSV file")
    options = parser.parse_args(arguments)
    if options.tokens <= LAST or options.documents < 1:
        parser.error(f"--tokens must be above {LAST}, --documents at least 1")
    with check_loading(parser):
        model, tokenizer = load(options.model, dtype=options.dtype, device="cpu")
    told = {"model": label(options.model), "dtype": str(model.dtype).removeprefix("torch."), "tokens": options.tokens}
    rows = []
    for text in options.texts:
        pieces = (read_code if text == CODE else read_prose)(tokenizer, length=options.tokens, following=0)
        taken = [document.prompt for document in itertools.islice(pieces, options.documents)]
        rows += [told | {"text": text} | row for row in measure(model, taken, options.thresholds)]
    report(rows, options.out, threads=torch.get_num_threads())
    return 0


if __name__ == "__main__":
    sys.exit(main())
