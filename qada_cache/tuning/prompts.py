"""`qada tune --prefill`: loss and time of prompts read by selection, a choice by them, and what is said of it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..cache import QAdACache
from ..kernels.cpu.selected_prompt import find_fewest
from ..kernels.prompt_choice import MAX_DIM, MIN_TOKENS
from ..models import find_inputs_device
from ..stats import CacheStats
from ..versions import pass_cache
from .estimates import Estimate, estimate
from .measuring import Piece, compare_logits

THRESHOLDS = {"cpu": (4.4, 12.0, 30.0), "cuda": (12.0, 25.0, 60.0)}  # from the most careful on, by the device
LAST = 512  # tokens of a prompt whose predictions are compared
MOST_TIME = 0.9  # of the exact reading's: less is gained by chance as well


class PromptFigures(NamedTuple):
    """Figures of one reading of a prompt."""

    kl: float  # mean KL divergence of its last tokens' predictions from those of the exact reading, in nats
    top1: float  # share of these tokens whose likeliest next token is the same
    pairs: float  # share of the causal query-key pairs that were computed
    seconds: float


@torch.inference_mode()
def measure_prompt(
    model: PreTrainedModel, ids: Tensor, thresholds: Sequence[float], **options: Any
) -> Iterator[PromptFigures]:
    """Figures of reading a prompt `[1, tokens]` exactly, then at each `prefill_threshold`, every time at once into a
    new cache of these options. The model is in eval mode."""
    full, seconds, _ = _read(model, ids, QAdACache(model, **options, prefill_threshold=0.0))
    yield PromptFigures(0.0, 1.0, 1.0, seconds)
    for threshold in thresholds:
        logits, seconds, stats = _read(model, ids, QAdACache(model, **options, prefill_threshold=threshold))
        pairs = stats.prompt_read_share if stats.prompt_pairs else 1.0
        yield PromptFigures(*compare_logits(full, logits), pairs, seconds)


def _read(model: PreTrainedModel, ids: Tensor, cache: QAdACache) -> tuple[Tensor, float, CacheStats]:
    """Logits `[LAST, vocabulary]` on the CPU, seconds, and what was computed."""
    ids, begin = ids.to(find_inputs_device(model)), time.perf_counter()
    logits = model(input_ids=ids, **pass_cache(cache), logits_to_keep=LAST).logits[0].cpu()  # waits for the device
    return logits, time.perf_counter() - begin, cache.stats()


def find_thresholds(model: PreTrainedModel) -> tuple[float, ...]:
    """Those that are measured where the model's inputs are."""
    return THRESHOLDS.get(find_inputs_device(model).type, THRESHOLDS["cpu"])


@torch.inference_mode()
def check_selects(model: PreTrainedModel, prompt: Tensor, **options: Any) -> None:
    """Raise ValueError unless `prefill_threshold` changes how this model reads a prompt `[1, tokens]` here, under these
    `options` of `QAdACache`."""
    cache = QAdACache(model, prefill_threshold=find_thresholds(model)[0], **options)
    fewest = find_fewest(sinks=cache.options.sink_tokens, window=cache.options.window)
    if find_inputs_device(model).type == "cuda":
        fewest = MIN_TOKENS
    if prompt.shape[1] < fewest:
        raise ValueError(
            f"--prefill: a prompt of {prompt.shape[1]} tokens is read exactly whatever prefill_threshold is: give "
            f"--tokens of at least {fewest}"
        )
    if not _read(model, prompt[:, :fewest], cache)[2].prompt_pairs:
        raise ValueError(
            f"--prefill: prompts of this {model.config.model_type} model in {model.dtype} are read exactly here, as "
            "selection needs a CPU with AVX2 and FMA or NEON, a compiler, float32 or, without AMX, bfloat16, or a GPU "
            f"of capability 8.0, Triton, 16-bit numbers and heads of up to {MAX_DIM} channels; sdpa attention over all "
            "tokens without sinks or soft cap, and kernels other than torch's: leave out --prefill"
        )


@dataclass(frozen=True)
class PromptSetting:
    """One `prefill_threshold` over all prompts; 0 reads exactly."""

    threshold: float
    kl: Estimate  # KL divergence of predictions from those of the exact reading, nats
    top1: float  # mean share of predictions with the same likeliest token
    pairs: float  # mean share of pairs of tokens that were computed
    seconds: float  # the median
    time: float  # over that of the exact reading of the same prompt, the median


@dataclass(frozen=True)
class PromptOutcome:
    """The settings, the choice and its confirmation."""

    settings: list[PromptSetting]  # on the prompts that were chosen by; the first reads exactly
    kl: float  # the budget: the most of a setting, in nats
    chosen: PromptSetting | None  # None: none is surely within the budget and faster
    again: PromptSetting | None  # the chosen setting's figures on the held-out prompts
    pieces: int  # how many were chosen by
    held_out: int  # number of held-out prompts
    tokens: int  # of each

    @property
    def recommended(self) -> float:
        """The threshold chosen if the prompts that were held out bear it out: on average; else 0."""
        if self.chosen is None or self.again is None:
            return 0.0
        borne_out = self.again.kl.mean <= self.kl and self.again.time <= MOST_TIME
        return self.chosen.threshold if borne_out else 0.0


def choose(settings: Sequence[PromptSetting], kl: float) -> PromptSetting | None:
    """The fastest, of those whose KL's upper end is within the budget, if it is faster than the exact reading."""
    within = [one for one in settings if one.kl.high <= kl and one.time <= MOST_TIME]
    return min(within, key=lambda one: one.time, default=None)


def tune_prompts(
    model: PreTrainedModel, pieces: Sequence[Piece], held_out: Sequence[Piece], kl: float
) -> PromptOutcome:
    """Measure thresholds on the prompts of `pieces`, two or more; choose one, and measure it again on `held_out`."""

    def measure_all(places: Sequence[Piece], thresholds: Sequence[float], what: str) -> list[PromptSetting]:
        by_prompt = []
        for place, piece in enumerate(places, start=1):
            steps, name = measure_prompt(model, piece.prompt, thresholds), f"{what} {place} of {len(places)}"
            by_prompt.append(list(tqdm(steps, name, total=1 + len(thresholds), unit="reading")))
        exact = [figures[0] for figures in by_prompt]
        every = zip((0.0, *thresholds), zip(*by_prompt, strict=True), strict=True)
        return [summarize(threshold, figures, exact) for threshold, figures in every]

    settings = measure_all(pieces, find_thresholds(model), "prompt")
    chosen = choose(settings[1:], kl)
    again = None if chosen is None else measure_all(held_out, [chosen.threshold], "held-out prompt")[1]
    return PromptOutcome(settings, kl, chosen, again, len(pieces), len(held_out), pieces[0].prompt.shape[1])


def summarize(threshold: float, figures: Sequence[PromptFigures], exact: Sequence[PromptFigures]) -> PromptSetting:
    """One setting's figures of all prompts, beside those of their exact readings."""
    kl, top1, pairs, seconds = zip(*figures, strict=True)
    times = [one.seconds / other.seconds for one, other in zip(figures, exact, strict=True)]
    return PromptSetting(threshold, estimate(kl), fmean(top1), fmean(pairs), median(seconds), median(times))


def make_table(outcome: PromptOutcome) -> list[dict[str, str]]:
    """The settings as a table; its first row reads exactly."""
    return [
        {
            "prefill_threshold": f"{one.threshold:g}" if one.threshold else "exactly read",
            "KL": f"{one.kl.mean:.5f}",
            "KL interval": f"{one.kl.low:.5f} - {one.kl.high:.5f}",
            "likeliest same": f"{one.top1:.3f}",
            "pairs computed": f"{one.pairs:.1%}",
            "s/prompt": f"{one.seconds:.2f}",
            "of exact": f"{one.time:.2f}",
        }
        for one in outcome.settings
    ]


def write_sentences(outcome: PromptOutcome) -> list[str]:
    """Sentences on the measurement and the recommendation."""
    measured = (
        f"Figures of the prompts of the same {outcome.pieces} pieces, each read at once, over its last {LAST} tokens: "
        "means, and medians of times."
    )
    if outcome.recommended:
        return [measured, f"{_confirm(outcome)} It is recommended for prompts of {outcome.tokens} tokens."]
    return [measured, f"No prefill_threshold is recommended: {_say_why(outcome)}."]


def _confirm(outcome: PromptOutcome) -> str:
    chosen, again = outcome.chosen, outcome.again
    assert chosen is not None
    assert again is not None
    return (
        f"On {outcome.held_out} held-out prompts prefill_threshold={chosen.threshold:g} has KL {again.kl.mean:.5f}, "
        f"likeliest token the same {again.top1:.3f}, and {again.time:.2f} of the exact reading's time."
    )


def _say_why(outcome: PromptOutcome) -> str:
    """Why none is recommended."""
    if outcome.chosen is not None:
        return f"the fastest that is surely within KL {outcome.kl:g} is not confirmed. {_confirm(outcome)[:-1]}"
    within = [one for one in outcome.settings[1:] if one.kl.high <= outcome.kl]
    if not within:
        return f"none is surely within KL {outcome.kl:g}, the interval of none ends there"
    fastest = min(within, key=lambda one: one.time)
    return (
        f"of those surely within KL {outcome.kl:g} the fastest, {fastest.threshold:g}, takes {fastest.time:.2f} of the "
        f"exact reading's time, and {MOST_TIME:g} is the most that counts as faster (longer prompts gain more)"
    )
