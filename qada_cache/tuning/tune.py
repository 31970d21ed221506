"""`qada tune`: a curve of settings, a choice by a budget, and its confirmation on other text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedModel

from .. import tuned_choice
from ..cache import QAdACache
from ..sketch.segments import MIN_TOKENS
from ..state.shared import TOKEN_THRESHOLD
from .choosing import Budget, Setting, together
from .measuring import measure
from .pieces import Piece

TOKEN_THRESHOLDS = (1.0, 2.0, 3.0, TOKEN_THRESHOLD, 8.0, 12.0, 20.0)  # the more careful, the smaller
LEAST_TOKENS = MIN_TOKENS + 256  # of a prompt: with fewer the bulk is read whole


@dataclass(frozen=True)
class Outcome:
    """The curve, the choice and its confirmation.

    Attributes:
        everything: reading everything, on the pieces that were chosen by.
        settings: each of `TOKEN_THRESHOLDS`, on the same.
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
    steps = len(pieces) * (2 + len(TOKEN_THRESHOLDS)) + len(held_out) * 3
    with tqdm(total=steps, unit="step") as bar:

        def measured(places: Sequence[Piece], token_thresholds: Sequence[float], what: str) -> list[Setting]:
            found = []
            for place, piece in enumerate(places):
                said = f"{what} {place + 1} of {len(places)}"
                bar.set_postfix_str(said)
                everything, figures = measure(model, piece, token_thresholds, bar.update)
                found.append([everything, *figures])
            columns = zip((None, *token_thresholds), zip(*found, strict=True), strict=True)
            return [together(token_threshold, column) for token_threshold, column in columns]

        everything, *settings = measured(pieces, TOKEN_THRESHOLDS, "piece")
        chosen, again = budget.chosen(settings), None
        if chosen is not None and chosen.token_threshold is not None:
            again = measured(held_out, [chosen.token_threshold], "held-out piece")[1]
    sizes = {"tokens": pieces[0].prompt.shape[1], "following": pieces[0].following.shape[1]}
    counts = {"pieces": len(pieces), "held_out": len(held_out)}
    return Outcome(everything, settings, budget, chosen, again, **counts, **sizes)


def keep(model: PreTrainedModel, outcome: Outcome) -> Path:
    """Keep the choice with the model's key moments; the file.

    Raises:
        OSError: as `tuned_choice.keep`.
    """
    assert outcome.chosen is not None
    assert outcome.chosen.token_threshold is not None
    options = replace(QAdACache(model, tuned=False).options, token_threshold=outcome.chosen.token_threshold)
    figures = asdict(outcome)
    return tuned_choice.keep(model, options, {name: figures[name] for name in figures if name != "settings"})
