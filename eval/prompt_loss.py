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
from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from eval.shared.language_model import DEFAULT, HELP, check_loading, label, load
from eval.shared.tables import new_file, report
from eval.shared.texts import CODE, PROSE, read_code, read_prose
from qada_cache.tuning.prompts import LAST, PromptFigures, measure_prompt


def measure(model: PreTrainedModel, documents: list[torch.Tensor], thresholds: list[float]) -> list[dict[str, Any]]:
    """A row for each threshold."""
    readings = (measure_prompt(model, ids, thresholds, moments="current") for ids in documents)
    found = [list(tqdm(each, total=1 + len(thresholds), unit="prompt")) for each in readings]
    exact, *every = zip(*found, strict=True)
    return [summarize(threshold, figures, exact) for threshold, figures in zip(thresholds, every, strict=True)]


def summarize(threshold: float, figures: Sequence[PromptFigures], exact: Sequence[PromptFigures]) -> dict[str, Any]:
    """Documents in one row."""
    kl, top1, pairs, seconds = zip(*figures, strict=True)
    return {
        "threshold": threshold,
        "documents": len(figures),
        "kl": f"{mean(kl):.5f}",
        "kl_worst": f"{max(kl):.5f}",
        "same": f"{mean(top1):.3f}",
        "pairs": f"{mean(pairs):.3f}",
        "seconds": f"{min(seconds):.2f}",
        "exact_seconds": f"{min(one.seconds for one in exact):.2f}",
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
