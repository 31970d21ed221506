"""The outcome of `qada tune` as a table, sentences and a picture."""

from pathlib import Path

from ..state.options import TOKEN_THRESHOLD
from . import Outcome


def rows(outcome: Outcome) -> list[dict[str, str]]:
    """The curve as a table; its first row reads everything."""
    names = {None: "all is read", TOKEN_THRESHOLD: f"{TOKEN_THRESHOLD:g}, the default"}
    return [
        {
            "token_threshold": names.get(one.token_threshold, f"{one.token_threshold or 0:g}"),
            "KL": f"{one.kl.mean:.5f}",
            "KL interval": f"{one.kl.low:.5f} - {one.kl.high:.5f}",
            "likeliest same": f"{one.same:.3f}",
            "bytes read": f"{one.bytes_read.mean:.1%}",
            "bytes interval": f"{one.bytes_read.low:.1%} - {one.bytes_read.high:.1%}",
            "ms/token": f"{1e3 * one.seconds:.1f}",
        }
        for one in (outcome.everything, *outcome.settings)
    ]


def sentences(outcome: Outcome) -> list[str]:
    """Sentences on the measurement, the choice, and its confirmation by other text."""
    lines = [
        f"Means of {outcome.pieces} pieces of {outcome.tokens} tokens, over the {outcome.following} tokens after each. "
        f"Intervals are of 90%, by Student's t over {outcome.pieces} pieces: in 1 of 20 cases the mean over all such "
        "text lies above the upper end. Bytes are those of keys and values outside sinks and window, in 16 bits a "
        "value, the sketch included."
    ]
    if outcome.chosen is None:
        return [*lines, f"No setting is surely within {outcome.budget}: the interval of none ends there."]
    assert outcome.again is not None
    found = outcome.again
    return [
        *lines,
        f"Chosen for {outcome.budget}: token_threshold={outcome.chosen.token_threshold:g}.",
        f"On {outcome.held_out} pieces that were held out: KL {found.kl.mean:.5f}, likeliest token the same "
        f"{found.same:.3f}, {found.bytes_read.mean:.1%} of the bytes. "
        + (
            "The choice is confirmed." if outcome.confirmed else "That exceeds the budget: the choice is not confirmed."
        ),
    ]


def plot(outcome: Outcome, path: Path) -> None:
    """KL against bytes, with intervals, the budget and the choice.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'qada-cache[plot]'") from error
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    means = [one.kl.mean for one in outcome.settings]
    shares = [100 * one.bytes_read.mean for one in outcome.settings]
    below = [one.kl.mean - one.kl.low for one in outcome.settings]
    above = [one.kl.high - one.kl.mean for one in outcome.settings]
    axes.errorbar(shares, means, yerr=(below, above), marker="o", capsize=3, label="token_threshold, 90% interval")
    for one, share, mean in zip(outcome.settings, shares, means, strict=True):
        axes.annotate(f"{one.token_threshold:g}", (share, mean), textcoords="offset points", xytext=(5, 5))
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
