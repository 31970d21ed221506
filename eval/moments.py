"""Which key moments, and which group rule, keep the needle model's recall: `python -m eval.moments`.

One table: recall of the facts asked for, query heads local, and KV heads whose bulk is read, for moments of several
prompts, made in several ways, at several thresholds. Every prompt is read once; each way of deciding then answers its
questions from a copy of that state. Beside it, the error of moments made length-free from a short prompt.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.forking import forked
from eval.machine import machine
from eval.tables import plain, write
from qada_cache import KeyMoments, QAdACache, needle

THRESHOLDS = (0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.3, 0.6, 0.9)
RULES = ("head", "mean", "all")
LONG = 1024  # the paper takes the first T - 1024 keys of the other prompt, for T tokens in all
SHORT = 1024  # tokens that length-free moments come from


@dataclass
class Variant:
    """One way of deciding, and what came of it."""

    tokens: int
    moments: str
    group_rule: str
    threshold: float
    options: dict
    asked: int = 0
    right: int = 0
    sparsities: list[tuple[float, float]] = field(default_factory=list)

    def row(self) -> dict[str, str]:
        """As a row of the table."""
        local, kv_local = (sum(share) / len(share) for share in zip(*self.sparsities, strict=True))
        return {
            "prompt tokens": str(self.tokens),
            "moments": self.moments,
            "group_rule": self.group_rule,
            "threshold": f"{self.threshold:g}",
            "questions": str(self.asked),
            "recall": f"{self.right / self.asked:.3f}",
            "q heads local": f"{local:.3f}",
            "KV heads read": f"{1 - kv_local:.3f}",
        }


@torch.no_grad()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: QAdACache, questions: list[str]
) -> Iterator[str]:
    """The model's greedy answers to questions asked one after the other."""
    last = torch.empty(1, 0, dtype=torch.long)
    for question in questions:
        asked = tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
        last = model(torch.cat([last, asked], dim=1), past_key_values=cache).logits[:, -1:].argmax(-1)
        yield tokenizer.decode(last[0])


def text_moments(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, **options: object
) -> KeyMoments:
    """Moments of all of a text."""
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[0]
    return KeyMoments.collect(model, prompt=ids, progress=False, **options)  # type: ignore[arg-type]  # for collect to check


def at_length(moments: KeyMoments, length: int) -> KeyMoments:
    """Moments for bulks of `length` tokens, used at any other length as they are."""
    mean, covariance = (moment[None].float() for moment in moments.at(length))
    return replace(moments, mean=mean, covariance=covariance, lengths=(length,), rotations=(), _placed={})


def variants(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[Variant]:
    """What is compared on prompts of `tokens` tokens."""
    whole = tokens - LONG
    long_words, short_words = needle.random_words(tokens=whole), needle.random_words(tokens=SHORT)
    default = KeyMoments.collect(model, progress=False)
    analytic = text_moments(model, tokenizer, short_words, scheme="analytic")
    spread = text_moments(model, tokenizer, short_words, scheme="spread")
    bulk = whole - default.sink_tokens
    made: dict[str, object] = {
        "default": default,
        "random-words, long prompt": text_moments(model, tokenizer, long_words, scheme="prompt"),
        f"random-words, analytic at {bulk}": at_length(analytic, bulk),
        f"random-words, spread at {bulk}": at_length(spread, bulk),
        "single-word": text_moments(model, tokenizer, needle.single_word(tokens=whole), scheme="prompt"),
        "haystack": text_moments(model, tokenizer, needle.haystack(tokens=whole), scheme="prompt"),
        "current": "current",
    }
    found = [
        Variant(tokens, name, rule, threshold, {"moments": moments})
        for name, moments in made.items()
        for rule in ("all", "head")
        for threshold in (0.3, 0.6)
    ]
    found += [
        Variant(tokens, "default", rule, threshold, {"moments": default})
        for rule in RULES
        for threshold in THRESHOLDS
        if rule == "mean" or threshold not in (0.3, 0.6)
    ]
    found += [Variant(tokens, "oracle", rule, 0.3, {"criterion": "oracle"}) for rule in RULES]
    found += [Variant(tokens, "full attention", "head", 1.0, {"criterion": "dense"})]
    found += [Variant(tokens, "sinks + window", "head", 0.0, {"criterion": "local"})]
    for variant in found:
        variant.options |= {"group_rule": variant.group_rule, "threshold": variant.threshold}
    return found


def length_variants(model: PreTrainedModel, tokens: int) -> list[Variant]:
    """The default moments, but as for other lengths than the prompts' (the paper's figure 5g)."""
    default = KeyMoments.collect(model, progress=False)
    return [
        Variant(
            tokens,
            str(length),
            rule,
            0.3,
            {"moments": at_length(default, length), "group_rule": rule, "threshold": 0.3},
        )
        for length in (tokens // 16, tokens // 8, tokens // 4, tokens // 2, tokens, 2 * tokens, 4 * tokens, 16 * tokens)
        for rule in ("all", "head")
    ]


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, found: list[Variant], seeds: int
) -> list[Variant]:
    """Every variant on the prompts of `seeds` seeds."""
    tokens = found[0].tokens
    for seed in tqdm(range(seeds), f"prompts of {tokens} tokens"):
        prompt = needle.make_prompt(tokens=tokens, seed=seed)
        read = QAdACache(model, moments="current")
        with torch.no_grad():
            model(tokenizer(prompt.context, return_tensors="pt").input_ids, past_key_values=read, logits_to_keep=1)
        for variant in found:
            cache = forked(read, model, **variant.options)
            given = list(answers(model, tokenizer, cache, prompt.questions))
            variant.asked += len(given)
            variant.right += sum(map(str.__eq__, given, prompt.answers))
            stats = cache.stats()
            variant.sparsities.append((stats.sparsity, stats.kv_sparsity))
    return found


def covariance_errors(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int) -> dict[str, float]:
    """Relative error (Frobenius norm) of covariances at `length`, against those of a random prompt of that length."""
    true = text_moments(model, tokenizer, needle.random_words(tokens=length + 16, seed=1), scheme="prompt")
    expected = true.at(length)[1]
    short = needle.random_words(tokens=SHORT)
    ways = {scheme: text_moments(model, tokenizer, short, scheme=scheme) for scheme in ("prompt", "spread", "analytic")}
    ways["default"] = KeyMoments.collect(model, progress=False)
    # What the best way could reach: another random prompt of the same length.
    ways["long prompt"] = text_moments(model, tokenizer, needle.random_words(tokens=length + 16), scheme="prompt")
    return {name: float((kept.at(length)[1] - expected).norm() / expected.norm()) for name, kept in ways.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.moments", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192], help="lengths (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=24, help="prompts, 16 questions each (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder to write moments-TOKENS.csv and moments_error.csv to")
    options = parser.parse_args()
    model, tokenizer = needle.load_model(), needle.load_tokenizer()

    rows = [
        {"bulk tokens": str(length), "moments": name, "covariance error": f"{error:.3f}"}
        for length in (3072, 7168, 15360)
        for name, error in covariance_errors(model, tokenizer, length).items()
    ]
    begin = time.perf_counter()
    kept = KeyMoments.collect(model, progress=False)
    collecting = time.perf_counter() - begin
    begin = time.perf_counter()
    kept.at(15361)
    rows.append({"bulk tokens": "", "moments": "seconds to collect", "covariance error": f"{collecting:.2f}"})
    rows.append(
        {
            "bulk tokens": "",
            "moments": "seconds of .at(length)",
            "covariance error": f"{time.perf_counter() - begin:.4f}",
        }
    )
    print(plain(rows))
    if options.out:
        write(options.out / "moments_error.csv", rows, machine=machine())
    for tokens in options.tokens:
        for name, found in (
            (f"moments-{tokens}", variants(model, tokenizer, tokens)),
            (f"moment_lengths-{tokens}", length_variants(model, tokens)),
        ):
            rows = [variant.row() for variant in measure(model, tokenizer, found, options.seeds)]
            print(plain(rows))
            if options.out:
                write(options.out / f"{name}.csv", rows, machine=machine())


if __name__ == "__main__":
    main()
