"""Figures of the tables of `eval.heads` and `eval.trials`, as files that are the same on every machine."""

from collections import defaultdict
from pathlib import Path
from statistics import mean

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.shared.tables import Rows, group_cells
from eval.shared.texts import is_continued
from qada_cache.state import SKETCH_BITS

ORACLE = 0.6  # the threshold at which a head counts as long-context in truth
ESTIMATES = ("current", "random-words", "single-word")
Way = tuple[str, str, str, str]
TOKENS_CELL = ("prose", "3072")
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
SKETCH = f"sketch of {SKETCH_BITS} bits"
TOKENS = (
    ("QAdACache", ("qada", "current+random-tokens", "any", f"{SKETCH}, threshold 0.95"), "o-"),
    ("QAdACache, threshold 0.7", ("qada", "current+random-tokens", "any", f"{SKETCH}, threshold 0.7"), "o"),
    ("QAdACache, threshold 0.4", ("qada", "current+random-tokens", "any", f"{SKETCH}, threshold 0.4"), "o"),
    ("QAdACache, whole heads", ("qada", "current+random-tokens", "any", ""), "p-"),
    ("whole heads, oracle", ("oracle", "", "any", ""), "p:"),
    ("a share of the tokens, by true score", ("dense", "", "any", "true"), "s:"),
    ("pages of 16 by bounds (Quest, but in all layers)", ("dense", "", "any", "pages of 16"), "x-"),
    *((method, ("evicted", "", "any", method), ".-") for method in ("SnapKV", "ExpectedAttention", "TOVA", "KeyDiff")),
    ("4 bits", ("quantized", "", "any", "4 bits"), "D"),
    ("2 bits", ("quantized", "", "any", "2 bits"), "d"),
)


def make_canvas(columns: int = 1, rows: int = 1, width: float = 4.6, height: float = 3.2) -> tuple[Figure, np.ndarray]:
    """A figure and its axes, `[rows, columns]`."""
    mpl.rcParams["font.family"] = "DejaVu Sans"  # comes with matplotlib: the same on every machine
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=110)
    return figure, figure.subplots(rows, columns, squeeze=False)


def write(folder: Path, name: str, figure: Figure, note: str) -> None:
    """The figure as a PNG whose bytes depend on nothing but what it shows."""
    figure.suptitle(note, fontsize=7, color="grey")
    figure.savefig(folder / f"{name}.png", metadata={"Software": None})


def find_local_share(log_local: np.ndarray, log_bulk: np.ndarray) -> np.ndarray:
    """The local share of attention, from the logarithms of both masses."""
    return 1 / (1 + np.exp(np.clip(log_bulk - log_local, -700, 700)))


class Heads:
    """`heads.csv` as columns.

    Attributes:
        needed: whether a head was long-context in truth, at `ORACLE`.
    """

    def __init__(self, rows: Rows) -> None:
        self.text = {name: np.array([row[name] for row in rows]) for name in ("task", "length")}
        whole = ("document", "token", "layer", "head")
        self.place = {name: np.array([int(row[name]) for row in rows]) for name in whole}
        numbers = ("log_local", "log_bulk", "iid", *(name for name in ESTIMATES if name in rows[0]))
        self.log = {name: np.array([float(row[name]) for row in rows]) for name in numbers}
        self.needed = self.find_called("log_bulk", ORACLE)
        self.layers, self.heads = (int(self.place[name].max()) + 1 for name in ("layer", "head"))

    def find_called(self, name: str, threshold: float) -> np.ndarray:
        """Whether a head is called long-context, going by the column `name` for `log A_bulk`."""
        return find_local_share(self.log["log_local"], self.log[name]) < threshold

    def average_by_head(self, flags: np.ndarray, which: np.ndarray | None = None) -> np.ndarray:
        """The share of flags that are set, `[layers, heads]`, over all rows or those of `which`."""
        index = self.place["layer"] * self.heads + self.place["head"]
        chosen = np.ones_like(flags) if which is None else which
        size = self.layers * self.heads
        total = np.bincount(index[chosen], minlength=size)
        return (np.bincount(index[chosen], flags[chosen], minlength=size) / np.maximum(total, 1)).reshape(
            self.layers, self.heads
        )

    def list_tasks(self) -> list[str]:
        """Their names, in the table's order."""
        return list(dict.fromkeys(self.text["task"].tolist()))


def draw_sparsity(heads: Heads) -> Figure:
    """How many query heads are local: token by token, and against the threshold, by task (figure 6)."""
    figure, axes = make_canvas(2)
    thresholds = np.concatenate([np.linspace(0.01, 0.95, 48), [0.99, 0.995]])
    for index, task in enumerate(heads.list_tasks()):
        which = heads.text["task"] == task
        for name, style in (("log_bulk", "-"), ("current", "--")):
            shares = [1 - heads.find_called(name, float(tau))[which].mean() for tau in thresholds]
            label = f"{task}, {'oracle' if name == 'log_bulk' else 'QAdA'}"
            axes[0, 1].plot(thresholds, shares, style, color=f"C{index}", label=label)
        steps = heads.place["document"][which] * 1000 + heads.place["token"][which]
        local = ~heads.find_called("current", ORACLE)[which]
        axes[0, 0].plot([local[steps == step].mean() for step in np.unique(steps)], color=f"C{index}", label=task)
    axes[0, 0].set(xlabel="token (documents in turn)", ylabel=f"query heads local, QAdA at {ORACLE}", ylim=(0, 1.03))
    axes[0, 1].set(xlabel="threshold", ylabel="query heads local", ylim=(0, 1.03))
    for axis in axes[0]:
        axis.legend(fontsize=7)
    return figure


def draw_maps(heads: Heads) -> Figure:
    """How often each head is long-context, by task: in truth, and by QAdA (figure 7)."""
    tasks = heads.list_tasks()
    figure, axes = make_canvas(len(tasks), 2, 3.6, 2.4)
    for column, task in enumerate(tasks):
        which = heads.text["task"] == task
        for row, (name, title) in enumerate((("log_bulk", "oracle"), ("current", "QAdA"))):
            share = heads.average_by_head(heads.find_called(name, ORACLE), which)
            image = axes[row, column].imshow(share, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axes[row, column].set(title=f"{title}, {task}", xlabel="query head", ylabel="layer")
    figure.colorbar(image, ax=axes, label="share of tokens long-context")
    return figure


def draw_ranks(heads: Heads) -> Figure:
    """Rank correlation, between tasks, of how often each head is long-context in truth (figure 8)."""
    tasks = heads.list_tasks()
    shares = [heads.average_by_head(heads.needed, heads.text["task"] == task).flatten() for task in tasks]
    ranks = np.array([_rank(share) for share in shares])
    figure, axes = make_canvas(width=6.5)
    matrix = np.corrcoef(ranks) if len(tasks) > 1 else np.ones((1, 1))
    image = axes[0, 0].imshow(matrix, vmin=-1, vmax=1, cmap="coolwarm")
    axes[0, 0].set(xticks=range(len(tasks)), yticks=range(len(tasks)), xticklabels=tasks, yticklabels=tasks)
    for row, column in np.ndindex(matrix.shape):
        axes[0, 0].text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center")
    figure.colorbar(image, ax=axes, label="Spearman's rank correlation")
    return figure


def _rank(values: np.ndarray) -> np.ndarray:
    """Ranks, the mean rank for ties."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts) + (last - 1))[inverse] / 2


def draw_deciles(heads: Heads) -> Figure:
    """What QAdA calls long-context, by deciles of the true local share; and recall of the needed (figure 9)."""
    figure, axes = make_canvas(2)
    share = find_local_share(heads.log["log_local"], heads.log["log_bulk"])
    decile = np.minimum((share * 10).astype(int), 9)
    called = heads.find_called("current", ORACLE)
    true = [float((called & heads.needed)[decile == bin_].sum()) for bin_ in range(10)]
    false = [float((called & ~heads.needed)[decile == bin_].sum()) for bin_ in range(10)]
    total = [max(int((decile == bin_).sum()), 1) for bin_ in range(10)]
    middle = np.arange(10) / 10 + 0.05
    axes[0, 0].bar(middle, np.divide(true, total), 0.09, label="needed")
    axes[0, 0].bar(middle, np.divide(false, total), 0.09, bottom=np.divide(true, total), label="not needed")
    axes[0, 0].set(xlabel="true local share of attention", ylabel="share called long-context", ylim=(0, 1.05))
    thresholds = np.linspace(0.02, 0.98, 49)
    for name in ESTIMATES:
        if name in heads.log:
            recalls = [heads.find_called(name, float(tau))[heads.needed].mean() for tau in thresholds]
            axes[0, 1].plot(thresholds, recalls, label=name)
    axes[0, 1].set(xlabel="threshold", ylabel=f"recall of heads long-context at {ORACLE}", ylim=(0, 1.03))
    for axis in axes[0]:
        axis.legend(fontsize=7)
    return figure


def draw_kinds(heads: Heads) -> Figure:
    """Which heads are always local, vary, or are mostly long-context, in truth (figure 2)."""
    share = np.sort(heads.average_by_head(heads.needed).flatten())
    figure, axes = make_canvas()
    kinds = (("always local", share < 0.01, "C0"), ("varying", (share >= 0.01) & (share <= 0.5), "C1"),
             ("mostly long-context", share > 0.5, "C3"))  # fmt: skip
    for name, which, colour in kinds:
        axes[0, 0].bar(np.arange(len(share))[which], share[which] + 0.005, color=colour, label=f"{name}: {which.sum()}")
    axes[0, 0].set(xlabel="query heads of all layers, sorted", ylabel="share of tokens long-context", ylim=(0, 1.05))
    axes[0, 0].legend(fontsize=7)
    return figure


def make_error_table(heads: Heads) -> list[dict[str, str]]:
    """How far the estimates of `log A_bulk` are off (table 2): mean and quantiles of the absolute error."""
    rows = []
    for task in heads.list_tasks():
        which = heads.text["task"] == task
        truth = heads.log["log_bulk"][which]
        pairs = [(name, heads.log[name][which], truth) for name in ESTIMATES if name in heads.log]
        # What is left for the prompt's own moments if scores are drawn from that very Gaussian.
        pairs.append(("i.i.d. Gaussian", heads.log["current"][which], heads.log["iid"][which]))
        distance = np.abs(heads.log["log_local"][which] - truth)
        for name, estimate, true in pairs:
            error = np.abs(estimate - true)
            rows.append({
                "task": task,
                "moments": name,
                "mean_log_error": f"{error.mean():.3f}",
                "median": f"{np.median(error):.3f}",
                "p90": f"{np.quantile(error, 0.9):.3f}",
                "mean_log_distance_bulk_local": f"{distance.mean():.3f}",
            })  # fmt: skip
    return rows


HEADS_FIGURES = {
    "sparsity": draw_sparsity,
    "head_maps": draw_maps,
    "rank_correlation": draw_ranks,
    "deciles": draw_deciles,
    "head_kinds": draw_kinds,
}


def _find_curve(rows: Rows, way: Way, *, answers: bool) -> list[tuple[float, float]]:
    """Share of the bulk's bytes read, and KL divergence or the share found of what full attention finds."""
    points = defaultdict(list)
    for row in rows:
        if _find_way(row) == way:
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


def _find_way(row: dict[str, str]) -> Way:
    read = row.get("read", "").partition(", ")[0]
    if row["criterion"] == "qada" and read:  # a curve of what heads read, not of which ones
        read += f", threshold {row['threshold']}"
    return row["criterion"], row["moments"], row["rule"], read


def _plot(axis: Axes, rows: Rows, ways: tuple[tuple[str, Way, str], ...], *, answers: bool) -> None:
    colours = mpl.colormaps["tab20"].colors
    for (label, way, style), colour in zip(ways, colours[::2] + colours[1::2], strict=False):
        if points := _find_curve(rows, way, answers=answers):
            axis.plot(*zip(*points, strict=True), style, ms=4, lw=1, label=label, color=colour)


def draw_moments(rows: Rows) -> Figure:
    """By what the estimate is made from: one panel a task and length, where nearly all of these ways were tried."""
    wanted = {way for _, way, _ in MOMENTS}
    parts = {
        cell: part
        for cell, part in group_cells(rows).items()
        if len(wanted - {_find_way(row) for row in part}) <= ABSENT
    }
    figure, axes = make_canvas(len(parts))
    for axis, ((task, length), part) in zip(axes[0], parts.items(), strict=True):
        _plot(axis, part, MOMENTS, answers=not is_continued(task))
        axis.set(title=f"{task}, {length} tokens", xlabel="bytes read, of the bulk's", xlim=(-0.02, 1.02))
        if is_continued(task):
            axis.set(yscale="log", ylabel="KL divergence from full attention", ylim=(1e-4, 1))
        else:
            axis.set(ylabel="found, of what full attention finds", ylim=(-0.03, 1.05))
    axes[0, 0].legend(fontsize=6)
    return figure


def draw_tokens(rows: Rows) -> Figure:
    """By what is read, or kept, of each head: prose, one panel a model."""
    models = defaultdict(list)
    for row in rows:
        if (row["task"], row["length"]) == TOKENS_CELL:
            models[row["model"]].append(row)
    figure, axes = make_canvas(len(models), width=4.2)
    for axis, (model, part) in zip(axes[0], models.items(), strict=True):
        _plot(axis, part, TOKENS, answers=False)
        axis.set_title(f"{model.removesuffix('.gguf')}, prose, {TOKENS_CELL[1]} tokens", fontsize=8)
        axis.set(xlabel="bytes read, of the bulk's", xscale="log", yscale="log", xlim=(0.015, 1.1), ylim=(1e-4, 3))
    axes[0, 0].set(ylabel="KL divergence from full attention")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=6, loc="outside right center")
    return figure
