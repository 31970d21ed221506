"""Whether blended moments, or a threshold for every layer, read less at the same recall: `python -m eval.combinations`.

    python -m eval.combinations --out eval/results        # writes combinations.csv

On the needle model, with `group_rule` "head" and "all": the default moments of random words blended with the prompt's
own, by weight (1: as they are, which is what `QAdACache` does; 0: the prompt's alone; a blend has the mean and
covariance of the mixture), and thresholds that differ from layer to layer, fitted on other prompts than those measured.
Every combination is swept over thresholds and gets the one that reads least at a recall of 0.99; the last columns
compare it with the plain way, likewise swept, on the same prompts: the change of KV heads read, and its 95% interval
over prompts drawn again with replacement. A combination that wins has an interval below zero.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.machine import machine
from eval.tables import plain, write
from eval.trials import Outcome, Way, read_context, run
from qada_cache import KeyMoments, needle
from qada_cache.criterion import logit

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
THRESHOLDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.95, 0.99)
RULES = ("head", "all")
RECALL = 0.99
STEPS = (-math.inf, -4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0)  # that one layer's logit may move in the fit
ROUNDS = 2  # of the fit over the layers
FIRST_FIT = 1000  # seed of the first prompt that thresholds are fitted on
ROWS = 128  # ways that share a pass, for memory's sake
DRAWS = 2000
SHIFTS = tuple(step / 4 for step in range(-16, 17, 2))  # of fitted thresholds together, on the logit scale
BY_LAYER = "thresholds by layer"
CHANGE = ("change", "from", "to")


@dataclass
class Bench:
    """The model, and prompts that it has read."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    moments: KeyMoments
    prompts: list[tuple[needle.NeedlePrompt, list[tuple[Tensor, Tensor]]]]

    def outcomes(self, ways: Sequence[Way]) -> list[list[Outcome]]:
        """What came of each way on each prompt."""
        found = []
        for prompt, context in tqdm(self.prompts, f"{len(ways)} ways", leave=False):
            parts = [ways[start : start + ROWS] for start in range(0, len(ways), ROWS)]
            took = [run(self.model, self.tokenizer, prompt, context, part, self.moments) for part in parts]
            found.append([outcome for part in took for outcome in part])
        return [list(column) for column in zip(*found, strict=True)]


def least(ways: Sequence[Way], measured: list[list[Outcome]]) -> int | None:
    """Index of the way that reads least at the recall wanted; None if none has it."""
    total = [sum(each[1:], each[0]) for each in measured]
    reached = [index for index in range(len(ways)) if total[index].recall >= RECALL]
    return min(reached, key=lambda index: total[index].read, default=None)


def shifted(way: Way, layers: Sequence[int], step: float) -> Way:
    """The way with some layers' thresholds moved by `step` on the logit scale."""
    moved = list(way.thresholds)
    for layer in layers:
        moved[layer] = torch.tensor(logit(moved[layer]) + step, dtype=torch.float64).sigmoid().item()
    return Way(way.rule, tuple(moved), way.weight, way.name)


def fitted(rule: str, layers: int, bench: Bench) -> Way | None:
    """Thresholds by layer: from the least single one that reaches the recall, each layer in turn goes where the fewest
    KV heads are read without falling below it. None if no single threshold reaches it."""
    ways = [Way(rule, (threshold,) * layers) for threshold in THRESHOLDS]
    best = least(ways, bench.outcomes(ways))
    if best is None:
        return None
    way = ways[best]
    for _ in range(ROUNDS):
        for layer in reversed(range(layers)):
            ways = [way, *(shifted(way, [layer], step) for step in STEPS)]
            best = least(ways, bench.outcomes(ways))
            way = ways[best or 0]
    return way


def change(plainly: list[list[Outcome]], combined: list[list[Outcome]]) -> list[str]:
    """Relative change of what is read, and its 95% interval over prompts drawn again; thresholds are chosen anew on
    every draw, for both, so that the choice is part of the noise."""

    def table(measured: list[list[Outcome]]) -> tuple[Tensor, Tensor]:
        right = torch.tensor([[float(outcome.right) for outcome in each] for each in measured])
        return right, torch.tensor([[outcome.read for outcome in each] for each in measured])

    asked, prompts = plainly[0][0].asked, len(plainly[0])
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(prompts, (DRAWS, prompts), generator=generator)
    draws = torch.cat([torch.arange(prompts)[None], draws])  # the first is the prompts as they are
    least_read = []
    for right, read in map(table, (plainly, combined)):
        recall, share = right[:, draws].mean(dim=-1) / asked, read[:, draws].mean(dim=-1)
        least_read.append(share.masked_fill(recall < RECALL, math.inf).amin(dim=0))
    both = least_read[0].isfinite() & least_read[1].isfinite()
    relative = least_read[1] / least_read[0] - 1
    if not both[0]:
        return ["", "", ""]
    low, high = relative[1:][both[1:]].quantile(torch.tensor([0.025, 0.975])).tolist()
    return [f"{number:+.3f}" for number in (relative[0].item(), low, high)]


def table(tokens: int, seeds: int, fit_seeds: int) -> list[dict[str, str]]:
    """The rows of prompts of `tokens` tokens."""
    model, tokenizer = needle.load_model(), needle.load_tokenizer()
    layers, moments = model.config.num_hidden_layers, KeyMoments.collect(model, progress=False)

    def read(chosen: range) -> Bench:
        prompts = [needle.make_prompt(tokens=tokens, seed=seed) for seed in chosen]
        contexts = [
            (prompt, read_context(model, tokenizer, prompt)) for prompt in tqdm(prompts, "reading", leave=False)
        ]
        return Bench(model, tokenizer, moments, contexts)

    measured_on, fitted_on = read(range(seeds)), read(range(FIRST_FIT, FIRST_FIT + fit_seeds))
    rows = []
    for rule in RULES:
        single = [Way(rule, (threshold,) * layers) for threshold in THRESHOLDS]
        families = {f"weight {weight:g}": [replace(way, weight=weight) for way in single] for weight in WEIGHTS}
        by_layer = fitted(rule, layers, fitted_on)
        if by_layer is not None:
            families[BY_LAYER] = [shifted(by_layer, range(layers), shift) for shift in SHIFTS]
        measured = measured_on.outcomes([way for ways in families.values() for way in ways])
        found = {name: [measured.pop(0) for _ in ways] for name, ways in families.items()}
        for name, ways in families.items():
            best = least(ways, found[name])
            row = {"prompt tokens": str(tokens), "combination": name, "group_rule": rule}
            row |= dict.fromkeys(("thresholds", "questions", "recall", "KV heads read", *CHANGE), "")
            if best is None:
                top = max(sum(each[1:], each[0]).recall for each in found[name])
                row |= {"questions": str(seeds * 16), "recall": f"at most {top:.3f}"}
            else:
                total = sum(found[name][best][1:], found[name][best][0])
                shown = ways[best].thresholds if name == BY_LAYER else ways[best].thresholds[:1]
                row |= {
                    "thresholds": " ".join(f"{threshold:.3g}" for threshold in shown),
                    "questions": str(total.asked),
                    "recall": f"{total.recall:.3f}",
                    "KV heads read": f"{total.read:.4f}",
                    **dict(zip(CHANGE, change(found["weight 1"], found[name]), strict=True)),
                }
            rows.append(row)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.combinations", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192], help="lengths (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=24, help="prompts, 16 questions each (default: %(default)s)")
    parser.add_argument("--fit-seeds", type=int, default=8, help="prompts that thresholds are fitted on")
    parser.add_argument("--out", type=Path, help="folder to write combinations.csv to")
    options = parser.parse_args()
    rows = [row for tokens in options.tokens for row in table(tokens, options.seeds, options.fit_seeds)]
    print(plain(rows))
    if options.out:
        write(options.out / "combinations.csv", rows, machine=machine())


if __name__ == "__main__":
    main()
