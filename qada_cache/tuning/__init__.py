"""`qada tune`: a curve of settings, a choice by a budget, its confirmation on other text, and what is said of them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from tqdm import tqdm
from transformers import PreTrainedModel

from .. import tuned_choice
from ..cache import QAdACache
from ..models.latent import check_tunable
from ..sketch import MIN_TOKENS
from ..state import THRESHOLD, TOKEN_THRESHOLD
from ..tuned_choice import Thresholds
from .estimates import Estimate, estimate
from .measuring import Figures, Piece, measure
from .prompts import PromptOutcome

SETTINGS = (  # from the most careful on; where few tokens are read, local heads save what is left, the sketch
    *map(Thresholds, (1.0, 2.0, 3.0, TOKEN_THRESHOLD, 8.0)),
    *(Thresholds(*pair) for pair in ((12.0, 0.7), (16.0, 0.4), (20.0, 0.3))),
)
FEWEST_BITS = 4  # of a bulk, which are tried for the choice
MIN_PROMPT_TOKENS = MIN_TOKENS + 256  # of a prompt: with fewer the bulk is read whole


@dataclass(frozen=True)
class Setting:
    """One setting, or reading everything, over all pieces; figures as in `Figures`, the last two as means."""

    thresholds: Thresholds | None  # None: everything is read
    kl: Estimate
    bytes_read: Estimate
    top1: float
    seconds: float
    bulk_bits: int | None = None  # None: the default's

    def __str__(self) -> str:
        return f"{self.thresholds}" + (f", bulk_bits={self.bulk_bits}" if self.bulk_bits else "")


@dataclass(frozen=True)
class Budget:
    """The most that a setting may cost; one of both is given, or a ValueError tells what is allowed."""

    kl: float | None = None  # mean KL divergence from reading everything, in nats
    bytes_read: float | None = None  # share of the bulk's bytes

    def __post_init__(self) -> None:
        if self.kl is not None and not 0 < self.kl < math.inf:  # also refuses nan
            raise ValueError(f"--kl must be positive and finite, got {self.kl}")
        if self.bytes_read is not None and not 0 < self.bytes_read <= 1:
            raise ValueError(f"--bytes must be a share in (0, 1], got {self.bytes_read}")

    def __str__(self) -> str:
        return f"KL {self.kl:g}" if self.kl is not None else f"{self.bytes_read:.1%} of the bytes"

    def is_within(self, setting: Setting, end: str) -> bool:
        """Whether the budget holds by this field of `Estimate`."""
        name = "bytes_read" if self.kl is None else "kl"
        return getattr(getattr(setting, name), end) <= getattr(self, name)

    def choose(self, settings: Sequence[Setting]) -> Setting | None:
        """The best by the figure without a budget, of those whose upper end is within the budget; None if none is."""
        within = [setting for setting in settings if self.is_within(setting, "high")]
        return min(within, key=lambda one: (one.kl if self.kl is None else one.bytes_read).mean, default=None)


def summarize(thresholds: Thresholds | None, figures: Sequence[Figures], bulk_bits: int | None = None) -> Setting:
    """One setting's figures of all pieces."""
    kl, top1, bytes_read, seconds = zip(*figures, strict=True)
    return Setting(thresholds, estimate(kl), estimate(bytes_read), fmean(top1), fmean(seconds), bulk_bits)


@dataclass(frozen=True)
class Outcome:
    """The curve, the choice and its confirmation."""

    everything: Setting  # on the pieces that were chosen by
    settings: list[Setting]  # each of `SETTINGS`, on the same; perhaps the one chosen of them, in `FEWEST_BITS`
    budget: Budget
    chosen: Setting | None  # one of them; None: none is surely within the budget
    again: Setting | None  # the chosen setting's figures on the held-out pieces
    pieces: int  # how many were chosen by
    held_out: int  # number of held-out pieces
    tokens: int  # of each piece
    following: int  # tokens after each

    @property
    def confirmed(self) -> bool:
        """Whether there is a choice and the pieces that were held out bear it out: on average."""
        return self.again is not None and self.budget.is_within(self.again, "mean")


def tune(model: PreTrainedModel, pieces: Sequence[Piece], held_out: Sequence[Piece], budget: Budget) -> Outcome:
    """Measure every setting on `pieces`, two or more; choose one, and measure that again on `held_out`. The one chosen
    for a KL is tried in `FEWEST_BITS` where the default's are few, and has them if that is within the KL as well.
    NotImplementedError, if the model has latent attention."""
    check_tunable(model.config.get_text_config(decoder=True))

    def measure_all(
        places: Sequence[Piece], settings: Sequence[Thresholds], what: str, bulk_bits: int | None = None
    ) -> list[Setting]:
        by_piece = []
        for place, piece in enumerate(places, start=1):
            steps, name = measure(model, piece, settings, bulk_bits), f"{what} {place} of {len(places)}"
            by_piece.append(list(tqdm(steps, name, total=1 + len(settings), unit="setting")))
        measured_as: list[Thresholds | None] = [None, *settings]
        every = zip(measured_as, zip(*by_piece, strict=True), strict=True)
        return [summarize(thresholds, figures, bulk_bits) for thresholds, figures in every]

    everything, *settings = measure_all(pieces, SETTINGS, "piece")
    chosen, again = budget.choose(settings), None
    if chosen is not None and (thresholds := chosen.thresholds) is not None:
        if budget.kl is not None and QAdACache(model).options.codes_tokens:
            fewer = measure_all(pieces, [thresholds], f"{FEWEST_BITS} bits, piece", FEWEST_BITS)[1]
            settings.append(fewer)
            chosen = fewer if budget.is_within(fewer, "high") else chosen
        again = measure_all(held_out, [thresholds], "held-out piece", chosen.bulk_bits)[1]
    tokens, following = pieces[0].prompt.shape[1], pieces[0].following.shape[1]
    return Outcome(everything, settings, budget, chosen, again, len(pieces), len(held_out), tokens, following)


def keep(model: PreTrainedModel, outcome: Outcome, prompts: PromptOutcome | None) -> Path:
    """Keep the choice that was made with the model's key moments, and what is recommended for prompts, as
    `tuned_choice.keep`."""
    figures, threshold = asdict(outcome), 0.0
    del figures["settings"]
    if prompts is not None:
        figures["prompts"], threshold = asdict(prompts), prompts.recommended
        del figures["prompts"]["settings"]
    chosen = figures["chosen"]
    cache = QAdACache(model, bulk_bits=chosen["bulk_bits"], prefill_threshold=threshold)
    options = replace(cache.options, **chosen["thresholds"])
    return tuned_choice.keep(model, options, figures)


def make_rows(outcome: Outcome) -> list[dict[str, str]]:
    """The curve as a table; its first row reads everything."""
    return [
        {
            "token_threshold": f"{one.thresholds.token_threshold:g}" if one.thresholds else "all is read",
            "threshold": f"{one.thresholds.threshold:g}" if one.thresholds else "",
            "bulk_bits": f"{one.bulk_bits or ''}",
            "KL": f"{one.kl.mean:.5f}",
            "KL interval": f"{one.kl.low:.5f} - {one.kl.high:.5f}",
            "likeliest same": f"{one.top1:.3f}",
            "bytes read": f"{one.bytes_read.mean:.1%}",
            "bytes interval": f"{one.bytes_read.low:.1%} - {one.bytes_read.high:.1%}",
            "ms/token": f"{1e3 * one.seconds:.1f}",
        }
        for one in (outcome.everything, *outcome.settings)
    ]


def write_sentences(outcome: Outcome) -> list[str]:
    """Sentences on the measurement, the choice, and its confirmation by other text."""
    measured = (
        f"Means of {outcome.pieces} pieces of {outcome.tokens} tokens, over the {outcome.following} tokens after each. "
        f"Intervals are of 90%, by Student's t over {outcome.pieces} pieces: in 1 of 20 cases the mean over all such "
        "text lies above the upper end. Bytes are those of stored keys and values, sinks and the newest left out, in "
        f"16 bits a value, the sketch included. The defaults are {TOKEN_THRESHOLD:g} and {THRESHOLD:g}."
    )
    confirmed = outcome.again
    if outcome.chosen is None or confirmed is None:
        return [measured, f"No setting is surely within {outcome.budget}: the interval of none ends there."]
    verdict = "The choice is" if outcome.confirmed else "That exceeds the budget: the choice is not"
    return [
        measured,
        f"Chosen for {outcome.budget}: {outcome.chosen}.",
        f"On {outcome.held_out} pieces that were held out: KL {confirmed.kl.mean:.5f}, likeliest token the same "
        f"{confirmed.top1:.3f}, {confirmed.bytes_read.mean:.1%} of the bytes. {verdict} confirmed.",
    ]


def plot(outcome: Outcome, path: Path) -> None:
    """KL against bytes, with intervals, the budget and the choice."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()

    def place(one: Setting) -> tuple[float, float]:
        return 100 * one.bytes_read.mean, one.kl.mean

    shares, means = zip(*map(place, outcome.settings), strict=True)
    below = [one.kl.mean - one.kl.low for one in outcome.settings]
    above = [one.kl.high - one.kl.mean for one in outcome.settings]
    axes.errorbar(shares, means, yerr=(below, above), marker="o", capsize=3, label="settings, 90% intervals")
    for one in outcome.settings:
        name = str(one).removeprefix("token_threshold=")
        axes.annotate(name, place(one), textcoords="offset points", xytext=(5, 5))
    if outcome.budget.kl is not None:
        axes.axhline(outcome.budget.kl, color="grey", linestyle="--", label="budget")
    elif outcome.budget.bytes_read is not None:
        axes.axvline(100 * outcome.budget.bytes_read, color="grey", linestyle="--", label="budget")
    if outcome.chosen is not None:
        axes.scatter(*place(outcome.chosen), s=140, facecolors="none", edgecolors="tab:red", label="chosen", zorder=3)
    if outcome.again is not None:
        axes.scatter(*place(outcome.again), marker="x", color="tab:red", label="held out", zorder=3)
    axes.set(xlabel="bytes read, % of the bulk", ylabel="KL from reading everything, nats", ylim=(0, None))
    axes.legend()
    figure.savefig(path)
