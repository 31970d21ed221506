"""`qada tune`: a curve of settings, a choice by a budget, its confirmation on other text, and what is said of them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from tqdm import tqdm
from transformers import PreTrainedModel

from .. import tuned_choice
from ..cache import QAdACache
from ..sketch import MIN_TOKENS
from ..state import THRESHOLD, TOKEN_THRESHOLD
from ..tuned_choice import Thresholds
from .measuring import Figures, Piece, measure

# 95% quantiles of Student's t, by degrees of freedom from 1 on; beyond the table the last one serves, which is larger.
_T_95 = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
)
SETTINGS = (  # from the most careful on; where few tokens are read, local heads save what is left, the sketch
    *(Thresholds(token_threshold) for token_threshold in (1.0, 2.0, 3.0, TOKEN_THRESHOLD, 8.0)),
    Thresholds(12.0, 0.7),
    Thresholds(16.0, 0.4),
    Thresholds(20.0, 0.3),
)
MIN_PROMPT_TOKENS = MIN_TOKENS + 256  # of a prompt: with fewer the bulk is read whole


@dataclass(frozen=True)
class Estimate:
    """The mean over a text, estimated from pieces of it by Student's t.

    Attributes:
        mean: of the pieces.
        low, high: the true mean lies below either with a probability of 5%, and of 95%: an interval of 90%.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Setting:
    """One setting, or reading everything, over all pieces.

    Attributes:
        thresholds: None: everything is read.
        kl, bytes_read: as in `Figures`.
        top1, seconds: means over pieces, as in `Figures`.
    """

    thresholds: Thresholds | None
    kl: Estimate
    bytes_read: Estimate
    top1: float
    seconds: float


@dataclass(frozen=True)
class Budget:
    """The most that a setting may cost; one of both is given.

    Attributes:
        kl: mean KL divergence from reading everything, in nats.
        bytes_read: share of the bulk's bytes.

    Raises:
        ValueError: it is not positive, or more than all bytes.
    """

    kl: float | None = None
    bytes_read: float | None = None

    def __post_init__(self) -> None:
        if self.kl is not None and not 0 < self.kl < math.inf:  # also refuses nan
            raise ValueError(f"--kl must be positive and finite, got {self.kl}")
        if self.bytes_read is not None and not 0 < self.bytes_read <= 1:
            raise ValueError(f"--bytes must be a share in (0, 1], got {self.bytes_read}")

    def __str__(self) -> str:
        return f"KL {self.kl:g}" if self.kl is not None else f"{self.bytes_read:.1%} of the bytes"

    def _spent(self, setting: Setting) -> Estimate:
        return setting.bytes_read if self.kl is None else setting.kl

    @property
    def _most(self) -> float:
        found = self.bytes_read if self.kl is None else self.kl
        assert found is not None
        return found

    def choose(self, settings: Sequence[Setting]) -> Setting | None:
        """The best setting surely within the budget, by the figure without a budget; None if there is none.

        That is: the upper end of the interval is within. Bytes are least for a KL budget, KL is for one of bytes.
        """
        within = [setting for setting in settings if self._spent(setting).high <= self._most]
        return min(within, key=lambda one: (one.kl if self.kl is None else one.bytes_read).mean, default=None)

    def confirmed(self, setting: Setting) -> bool:
        """Whether the figures on held-out text are within the budget on average."""
        return self._spent(setting).mean <= self._most


def estimate(values: Sequence[float]) -> Estimate:
    """The mean over a text, not negative, from one value a piece; one piece says nothing of the error."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, 0.0, math.inf)
    error = _T_95[min(len(values) - 2, len(_T_95) - 1)] * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, max(0.0, mean - error), mean + error)


def summarize(thresholds: Thresholds | None, figures: Sequence[Figures]) -> Setting:
    """One setting's figures of all pieces."""
    return Setting(
        thresholds,
        kl=estimate([one.kl for one in figures]),
        bytes_read=estimate([one.bytes_read for one in figures]),
        top1=fmean(one.top1 for one in figures),
        seconds=fmean(one.seconds for one in figures),
    )


@dataclass(frozen=True)
class Outcome:
    """The curve, the choice and its confirmation.

    Attributes:
        everything: reading everything, on the pieces that were chosen by.
        settings: each of `SETTINGS`, on the same.
        budget: what a setting may cost.
        chosen: one of them; None: none is surely within the budget.
        again: the chosen one, on the pieces that were held out.
        pieces, held_out: numbers of pieces.
        tokens, following: tokens of each piece, and after it.
    """

    everything: Setting
    settings: list[Setting]
    budget: Budget
    chosen: Setting | None
    again: Setting | None
    pieces: int
    held_out: int
    tokens: int
    following: int

    @property
    def confirmed(self) -> bool:
        """Whether there is a choice and the pieces that were held out bear it out."""
        return self.again is not None and self.budget.confirmed(self.again)


def tune(model: PreTrainedModel, pieces: Sequence[Piece], held_out: Sequence[Piece], budget: Budget) -> Outcome:
    """Measure every setting on `pieces`, choose one, and measure that again on `held_out`.

    Args:
        model: in eval mode.
        pieces: to choose by; two or more, as one says nothing of how sure its figures are.
        held_out: to confirm by.
        budget: what a setting may cost.
    """
    steps = len(pieces) * (2 + len(SETTINGS)) + len(held_out) * 3
    with tqdm(total=steps, unit="step") as bar:

        def measured(places: Sequence[Piece], settings: Sequence[Thresholds], what: str) -> list[Setting]:
            found = []
            for place, piece in enumerate(places):
                said = f"{what} {place + 1} of {len(places)}"
                bar.set_postfix_str(said)
                everything, figures = measure(model, piece, settings, bar.update)
                found.append([everything, *figures])
            columns = zip((None, *settings), zip(*found, strict=True), strict=True)
            return [summarize(thresholds, column) for thresholds, column in columns]

        everything, *settings = measured(pieces, SETTINGS, "piece")
        chosen, again = budget.choose(settings), None
        if chosen is not None and chosen.thresholds is not None:
            again = measured(held_out, [chosen.thresholds], "held-out piece")[1]
    sizes = {"tokens": pieces[0].prompt.shape[1], "following": pieces[0].following.shape[1]}
    counts = {"pieces": len(pieces), "held_out": len(held_out)}
    return Outcome(everything, settings, budget, chosen, again, **counts, **sizes)


def keep(model: PreTrainedModel, outcome: Outcome) -> Path:
    """Keep the choice with the model's key moments; the file.

    Raises:
        OSError: as `tuned_choice.keep`.
    """
    assert outcome.chosen is not None
    assert outcome.chosen.thresholds is not None
    options = replace(QAdACache(model, tuned=False).options, **asdict(outcome.chosen.thresholds))
    figures = asdict(outcome)
    return tuned_choice.keep(model, options, {name: figures[name] for name in figures if name != "settings"})


def rows(outcome: Outcome) -> list[dict[str, str]]:
    """The curve as a table; its first row reads everything."""
    named = [("all is read", ""), *((f"{one.token_threshold:g}", f"{one.threshold:g}") for one in SETTINGS)]
    return [
        {
            "token_threshold": token_threshold,
            "threshold": threshold,
            "KL": f"{one.kl.mean:.5f}",
            "KL interval": f"{one.kl.low:.5f} - {one.kl.high:.5f}",
            "likeliest same": f"{one.top1:.3f}",
            "bytes read": f"{one.bytes_read.mean:.1%}",
            "bytes interval": f"{one.bytes_read.low:.1%} - {one.bytes_read.high:.1%}",
            "ms/token": f"{1e3 * one.seconds:.1f}",
        }
        for (token_threshold, threshold), one in zip(named, (outcome.everything, *outcome.settings), strict=True)
    ]


def sentences(outcome: Outcome) -> list[str]:
    """Sentences on the measurement, the choice, and its confirmation by other text."""
    lines = [
        f"Means of {outcome.pieces} pieces of {outcome.tokens} tokens, over the {outcome.following} tokens after each. "
        f"Intervals are of 90%, by Student's t over {outcome.pieces} pieces: in 1 of 20 cases the mean over all such "
        "text lies above the upper end. Bytes are those of keys and values outside sinks and window, in 16 bits a "
        f"value, the sketch included. The defaults are {TOKEN_THRESHOLD:g} and {THRESHOLD:g}."
    ]
    if outcome.chosen is None:
        return [*lines, f"No setting is surely within {outcome.budget}: the interval of none ends there."]
    assert outcome.again is not None
    found = outcome.again
    return [
        *lines,
        f"Chosen for {outcome.budget}: {outcome.chosen.thresholds}.",
        f"On {outcome.held_out} pieces that were held out: KL {found.kl.mean:.5f}, likeliest token the same "
        f"{found.top1:.3f}, {found.bytes_read.mean:.1%} of the bytes. "
        + (
            "The choice is confirmed." if outcome.confirmed else "That exceeds the budget: the choice is not confirmed."
        ),
    ]


def plot(outcome: Outcome, path: Path) -> None:
    """KL against bytes, with intervals, the budget and the choice."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    means = [one.kl.mean for one in outcome.settings]
    shares = [100 * one.bytes_read.mean for one in outcome.settings]
    below = [one.kl.mean - one.kl.low for one in outcome.settings]
    above = [one.kl.high - one.kl.mean for one in outcome.settings]
    axes.errorbar(shares, means, yerr=(below, above), marker="o", capsize=3, label="settings, 90% intervals")
    for one, share, mean in zip(outcome.settings, shares, means, strict=True):
        name = str(one.thresholds).removeprefix("token_threshold=")
        axes.annotate(name, (share, mean), textcoords="offset points", xytext=(5, 5))
    if outcome.budget.kl is not None:
        axes.axhline(outcome.budget.kl, color="grey", linestyle="--", label="budget")
    elif outcome.budget.bytes_read is not None:
        axes.axvline(100 * outcome.budget.bytes_read, color="grey", linestyle="--", label="budget")
    if outcome.chosen is not None:
        place = 100 * outcome.chosen.bytes_read.mean, outcome.chosen.kl.mean
        axes.scatter(*place, s=140, facecolors="none", edgecolors="tab:red", label="chosen", zorder=3)
    if outcome.again is not None:
        place = 100 * outcome.again.bytes_read.mean, outcome.again.kl.mean
        axes.scatter(*place, marker="x", color="tab:red", label="held out", zorder=3)
    axes.set(xlabel="bytes read, % of the bulk", ylabel="KL from reading everything, nats", ylim=(0, None))
    axes.legend()
    figure.savefig(path)
