"""The figures of `trials.csv`, which `python -m eval.trials` writes: what is lost against what is read."""

from collections import defaultdict
from statistics import mean

from matplotlib.figure import Figure

from eval.drawing.canvas import canvas
from eval.reporting.tables import Rows, cells
from eval.texts.documents import is_continued
from qada_cache.state.shared import SKETCH_BITS

Way = tuple[str, str, str, str]
ABSENT = 1  # so many of the ways a panel may lack; where more were not tried there is nothing to compare

# What a figure compares: label, (criterion, moments, rule, how tokens are chosen and by which heads), style.
MOMENTS = (
    ("current prompt", ("qada", "current", "any", ""), "o-"),
    ("random words", ("qada", "random-words", "any", ""), "s-"),
    ("random tokens", ("qada", "random-tokens", "any", ""), "^-"),
    ("wiki", ("qada", "wiki", "any", ""), "v-"),
    ("single word", ("qada", "single-word", "any", ""), "x-"),
    ("current and random words", ("qada", "current+random-words", "any", ""), "d-"),
    ("current and random tokens", ("qada", "current+random-tokens", "any", ""), "p-"),
)
TOKENS = (
    (
        "QAdACache, tokens",
        ("qada", "current+random-tokens", "any", f"sketch of {SKETCH_BITS} bits, threshold 0.95"),
        "o-",
    ),
    ("whole heads", ("qada", "current+random-tokens", "any", ""), "p-"),
    ("whole heads, oracle", ("oracle", "", "any", ""), "o:"),
    ("a share of the tokens, by true score", ("dense", "", "any", "true"), "s:"),
    ("pages of 16 by bounds", ("dense", "", "any", "pages of 16"), "x-"),
)


def _curve(rows: Rows, way: Way, *, answers: bool) -> list[tuple[float, float]]:
    """Share of the bulk's bytes read, and KL divergence or the share found of what full attention finds."""
    points = defaultdict(list)
    for row in rows:
        if _way(row) == way:
            points[row["threshold"], row.get("read", "")].append(row)
    made, documents = [], len({row["document"] for row in rows})
    for group in points.values():
        if len(group) < documents / 2:  # a point of some of the texts says another thing than its neighbours
            continue
        loss = [float(row["kl"]) for row in group]
        if answers:
            loss = [float(row["found"]) for row in group if row["right"] == "1"]
        if loss:
            made.append((mean(float(row.get("bytes_read") or row["kv_read"]) for row in group), mean(loss)))
    return sorted(made)


def _way(row: dict[str, str]) -> Way:
    read = row.get("read", "").partition(", ")[0]
    if row["criterion"] == "qada" and read:  # a curve of what heads read, not of which ones
        read += f", threshold {row['threshold']}"
    return row["criterion"], row["moments"], row["rule"], read


def _draw(rows: Rows, ways: tuple[tuple[str, Way, str], ...]) -> Figure:
    wanted = {way for _, way, _ in ways}
    parts = {cell: part for cell, part in cells(rows).items() if len(wanted - {_way(row) for row in part}) <= ABSENT}
    figure, axes = canvas(len(parts))
    for axis, ((task, length), part) in zip(axes[0], parts.items(), strict=True):
        for label, way, style in ways:
            if points := _curve(part, way, answers=not is_continued(task)):
                axis.plot(*zip(*points, strict=True), style, ms=4, lw=1, label=label)
        axis.set(title=f"{task}, {length} tokens", xlabel="bytes read, of the bulk's", xlim=(-0.02, 1.02))
        if is_continued(task):
            axis.set(yscale="log", ylabel="KL divergence from full attention", ylim=(1e-4, 1))
        else:
            axis.set(ylabel="found, of what full attention finds", ylim=(-0.03, 1.05))
    axes[0, 0].legend(fontsize=6)
    return figure


def draw_moments(rows: Rows) -> Figure:
    """By what the estimate is made from."""
    return _draw(rows, MOMENTS)


def draw_tokens(rows: Rows) -> Figure:
    """By what is read of a head: all of it, or some tokens, what these are chosen by included."""
    return _draw(rows, TOKENS)


TRIAL_FIGURES = {"moments": draw_moments, "tokens": draw_tokens}
