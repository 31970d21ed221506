"""The paper's figures from the committed tables, nothing measured again: `python -m eval.figures`.

Reads `sweep.csv` (`python -m eval.sweep`) and `heads.csv` (`python -m eval.heads`) of a folder, and the needle model's
`moments-4096.csv` and `moment_lengths-4096.csv` (`python -m eval.moments`) if they are there, and writes one PNG for
each figure, and the table of errors, beside them. The same tables give the same numbers and pictures.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from eval import tables

RESULTS = Path(__file__).parent / "results"
ORACLE = 0.6  # the threshold at which a head counts as long-context in truth
ESTIMATES = ("random-words", "single-word", "current")
NAMES = {
    "qada": "QAdA",
    "oracle": "oracle",
    "static oracle": "static (this task)",
    "static other": "static (other tasks)",
}
COLOURS = {"QAdA": "C0", "oracle": "C2", "static (this task)": "C1", "static (other tasks)": "C3"}
Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    """The rows of a table."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def canvas(columns: int = 1, rows: int = 1, width: float = 4.6, height: float = 3.2) -> tuple[Figure, np.ndarray]:
    """A figure and its axes, `[rows, columns]`."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=110)
    return figure, figure.subplots(rows, columns, squeeze=False)


def local_share(log_local: np.ndarray, log_bulk: np.ndarray) -> np.ndarray:
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
        self.needed = self.called("log_bulk", ORACLE)
        self.layers, self.heads = (int(self.place[name].max()) + 1 for name in ("layer", "head"))

    def called(self, name: str, threshold: float) -> np.ndarray:
        """Whether a head is called long-context, going by the column `name` for `log A_bulk`."""
        return local_share(self.log["log_local"], self.log[name]) < threshold

    def by_head(self, flags: np.ndarray, which: np.ndarray | None = None) -> np.ndarray:
        """The share of flags that are set, `[layers, heads]`, over all rows or those of `which`."""
        index = self.place["layer"] * self.heads + self.place["head"]
        chosen = np.ones_like(flags) if which is None else which
        size = self.layers * self.heads
        total = np.bincount(index[chosen], minlength=size)
        return (np.bincount(index[chosen], flags[chosen], minlength=size) / np.maximum(total, 1)).reshape(
            self.layers, self.heads
        )

    def tasks(self) -> list[str]:
        """Their names, in the table's order."""
        return list(dict.fromkeys(self.text["task"].tolist()))


def curves(rows: Rows, *, moments: str = "random-words", rule: str = "head") -> dict[str, list[tuple[float, float]]]:
    """By criterion: `(share of query heads local, score)`, by rising sparsity."""
    found = defaultdict(list)
    for row in rows:
        if row["criterion"] not in NAMES or row["group_rule"] != rule or row["moments"] not in ("", moments):
            continue
        found[NAMES[row["criterion"]]].append((float(row["q_heads_local"]), float(row["score"])))
    return {name: sorted(points) for name, points in found.items()}


def cells(rows: Rows) -> dict[tuple[str, str], Rows]:
    """The table's rows by task and length."""
    found = defaultdict(list)
    for row in rows:
        found[row["task"], row["length"]].append(row)
    return dict(found)


def draw_performance(rows: Rows) -> Figure:
    """Score against sparsity of query heads, for every task and length (the paper's figures 4 and 5)."""
    parts = cells(rows)
    figure, axes = canvas(len(parts))
    for axis, ((task, length), part) in zip(axes[0], parts.items(), strict=True):
        for name, points in curves(part).items():
            axis.plot(*zip(*points, strict=True), "o-", ms=3, label=name,
                      color=COLOURS[name])  # fmt: skip
        for criterion, style in (("dense", ":"), ("local", "--")):
            score = next(float(row["score"]) for row in part if row["criterion"] == criterion)
            axis.axhline(
                score, ls=style, c="grey", lw=1, label={"dense": "full attention"}.get(criterion, "window only")
            )
        axis.set(title=f"{task}, {length} tokens", xlabel="query heads local", ylabel="score", ylim=(-0.03, 1.05))
    axes[0, 0].legend(fontsize=7)
    return figure


def draw_worst_case(rows: Rows) -> Figure:
    """The worst loss of score over tasks and lengths, by the sparsity reached there (figures 4 and 5, below)."""
    figure, axes = canvas()
    dense = {cell: next(float(row["score"]) for row in part if row["criterion"] == "dense")
             for cell, part in cells(rows).items()}  # fmt: skip
    settings = defaultdict(list)
    for row in rows:
        if row["criterion"] in NAMES and row["group_rule"] == "head" and row["moments"] in ("", "random-words"):
            lost = dense[row["task"], row["length"]] - float(row["score"])
            settings[NAMES[row["criterion"]], row["threshold"]].append((float(row["q_heads_local"]), lost))
    for name in dict.fromkeys(name for name, _ in settings):
        points = sorted(
            (float(np.mean([local for local, _ in found])), max(lost for _, lost in found))
            for (criterion, _), found in settings.items()
            if criterion == name and len(found) == len(dense)
        )
        if points:
            axes[0, 0].plot(*zip(*points, strict=True), "o-", ms=3, label=name, color=COLOURS[name])
    axes[0, 0].set(xlabel="query heads local, mean over tasks and lengths", ylabel="worst loss of score")
    axes[0, 0].legend(fontsize=7)
    return figure


def draw_moments(rows: Rows) -> Figure:
    """QAdA by the prompt its key moments come from (figure 5e to g)."""
    return _ablation(rows, "moments", lambda row: row["group_rule"] == "head", "query heads local")


def draw_group_rules(rows: Rows) -> Figure:
    """QAdA by the rule for the query heads of a KV head: score against what memory traffic follows."""
    return _ablation(rows, "group_rule", lambda row: row["moments"] == "random-words", "KV heads read")


def draw_moment_lengths(rows: Rows) -> Figure:
    """QAdA by the bulk length that its key moments are made for (figure 5g): recall and query heads local."""
    figure, axes = canvas(2)
    for rule in dict.fromkeys(row["group_rule"] for row in rows):
        chosen = [row for row in rows if row["group_rule"] == rule]
        lengths = [int(row["moments"]) for row in chosen]
        for axis, column in zip(axes[0], ("recall", "q heads local"), strict=True):
            axis.semilogx(
                lengths, [float(row[column]) for row in chosen], "o-", ms=3, base=2, label=f"group_rule {rule}"
            )
            axis.axvline(int(rows[0]["prompt tokens"]), ls=":", c="grey", lw=1)
            axis.set(xlabel="tokens that the moments are for (dotted: the prompt)", ylabel=column, ylim=(-0.03, 1.05))
    axes[0, 0].legend(fontsize=7)
    return figure


def draw_recall(rows: Rows) -> Figure:
    """Recall of the needle model's facts against query heads local and KV heads read, by group rule and moments."""
    figure, axes = canvas(2)
    groups = [("default", rule, f"random words, {rule}", "o-") for rule in ("head", "mean", "all")]
    groups += [(kind, "head", kind, "s--") for kind in ("current", "single-word", "haystack")]
    groups += [("oracle", "head", "oracle", "k*"), ("sinks + window", "head", "sinks + window", "kx")]
    for kind, rule, label, style in groups:
        points = sorted(
            (float(row["q heads local"]), float(row["KV heads read"]), float(row["recall"]))
            for row in rows
            if (row["moments"], row["group_rule"]) == (kind, rule)
        )
        local, read_heads, recall = zip(*points, strict=True)
        axes[0, 0].plot(local, recall, style, ms=4, label=label)
        axes[0, 1].plot(read_heads, recall, style, ms=4, label=label)
    for axis, name in zip(axes[0], ("query heads local", "KV heads read"), strict=True):
        axis.set(xlabel=name, ylabel=f"recall, {rows[0]['questions']} questions", ylim=(-0.03, 1.05))
    axes[0, 0].legend(fontsize=7, loc="lower left")
    return figure


def _ablation(rows: Rows, column: str, wanted: Callable[[dict[str, str]], bool], xlabel: str) -> Figure:
    parts = cells(rows)
    figure, axes = canvas(len(parts))
    for axis, ((task, length), part) in zip(axes[0], parts.items(), strict=True):
        chosen = [row for row in part if row["criterion"] == "qada" and wanted(row)]
        for kind in dict.fromkeys(row[column] for row in chosen):
            points = sorted(
                (
                    float(row["q_heads_local"]) if "query" in xlabel else 1 - float(row["kv_heads_local"]),
                    float(row["score"]),
                )
                for row in chosen
                if row[column] == kind
            )
            axis.plot(*zip(*points, strict=True), "o-", ms=3, label=kind)
        axis.set(title=f"{task}, {length} tokens", xlabel=xlabel, ylabel="score", ylim=(-0.03, 1.05))
    axes[0, 0].legend(fontsize=7)
    return figure


def draw_sparsity(heads: Heads) -> Figure:
    """How many query heads are local: token by token, and against the threshold, by task (figure 6)."""
    figure, axes = canvas(2)
    thresholds = np.concatenate([np.linspace(0.01, 0.95, 48), [0.99, 0.995]])
    for index, task in enumerate(heads.tasks()):
        which = heads.text["task"] == task
        for name, style in (("log_bulk", "-"), ("random-words", "--")):
            shares = [1 - heads.called(name, float(tau))[which].mean() for tau in thresholds]
            label = f"{task}, {'oracle' if name == 'log_bulk' else 'QAdA'}"
            axes[0, 1].plot(thresholds, shares, style, color=f"C{index}", label=label)
        steps = heads.place["document"][which] * 1000 + heads.place["token"][which]
        local = ~heads.called("random-words", ORACLE)[which]
        axes[0, 0].plot([local[steps == step].mean() for step in np.unique(steps)], color=f"C{index}", label=task)
    axes[0, 0].set(xlabel="token (documents in turn)", ylabel=f"query heads local, QAdA at {ORACLE}", ylim=(0, 1.03))
    axes[0, 1].set(xlabel="threshold", ylabel="query heads local", ylim=(0, 1.03))
    for axis in axes[0]:
        axis.legend(fontsize=7)
    return figure


def draw_maps(heads: Heads) -> Figure:
    """How often each head is long-context, by task: in truth, and by QAdA (figure 7)."""
    tasks = heads.tasks()
    figure, axes = canvas(len(tasks), 2, 3.6, 2.4)
    for column, task in enumerate(tasks):
        which = heads.text["task"] == task
        for row, (name, title) in enumerate((("log_bulk", "oracle"), ("random-words", "QAdA"))):
            share = heads.by_head(heads.called(name, ORACLE), which)
            image = axes[row, column].imshow(share, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axes[row, column].set(title=f"{title}, {task}", xlabel="query head", ylabel="layer")
    figure.colorbar(image, ax=axes, label="share of tokens long-context")
    return figure


def draw_ranks(heads: Heads) -> Figure:
    """Rank correlation, between tasks, of how often each head is long-context in truth (figure 8)."""
    tasks = heads.tasks()
    shares = [heads.by_head(heads.needed, heads.text["task"] == task).flatten() for task in tasks]
    ranks = np.array([_ranks(share) for share in shares])
    figure, axes = canvas(width=6.5)
    matrix = np.corrcoef(ranks) if len(tasks) > 1 else np.ones((1, 1))
    image = axes[0, 0].imshow(matrix, vmin=-1, vmax=1, cmap="coolwarm")
    axes[0, 0].set(xticks=range(len(tasks)), yticks=range(len(tasks)), xticklabels=tasks, yticklabels=tasks)
    for row, column in np.ndindex(matrix.shape):
        axes[0, 0].text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center")
    figure.colorbar(image, ax=axes, label="Spearman's rank correlation")
    return figure


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks, the mean rank for ties."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts) + (last - 1))[inverse] / 2


def draw_deciles(heads: Heads) -> Figure:
    """What QAdA calls long-context, by deciles of the true local share; and recall of the needed (figure 9)."""
    figure, axes = canvas(2)
    share = local_share(heads.log["log_local"], heads.log["log_bulk"])
    decile = np.minimum((share * 10).astype(int), 9)
    called = heads.called("random-words", ORACLE)
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
            recalls = [heads.called(name, float(tau))[heads.needed].mean() for tau in thresholds]
            axes[0, 1].plot(thresholds, recalls, label=name)
    axes[0, 1].set(xlabel="threshold", ylabel=f"recall of heads long-context at {ORACLE}", ylim=(0, 1.03))
    for axis in axes[0]:
        axis.legend(fontsize=7)
    return figure


def draw_kinds(heads: Heads) -> Figure:
    """Which heads are always local, vary, or are mostly long-context, in truth (figure 2)."""
    share = np.sort(heads.by_head(heads.needed).flatten())
    figure, axes = canvas()
    kinds = (("always local", share < 0.01, "C0"), ("varying", (share >= 0.01) & (share <= 0.5), "C1"),
             ("mostly long-context", share > 0.5, "C3"))  # fmt: skip
    for name, which, colour in kinds:
        axes[0, 0].bar(np.arange(len(share))[which], share[which] + 0.005, color=colour, label=f"{name}: {which.sum()}")
    axes[0, 0].set(xlabel="query heads of all layers, sorted", ylabel="share of tokens long-context", ylim=(0, 1.05))
    axes[0, 0].legend(fontsize=7)
    return figure


def error_table(heads: Heads) -> list[dict[str, str]]:
    """How far the estimates of `log A_bulk` are off (table 2): mean and quantiles of the absolute error."""
    rows = []
    for task in heads.tasks():
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


MOMENTS_FIGURES = {
    "recall": ("moments-4096.csv", draw_recall),
    "moment_lengths": ("moment_lengths-4096.csv", draw_moment_lengths),
}
SWEEP_FIGURES = {
    "performance": draw_performance,
    "worst_case": draw_worst_case,
    "moments": draw_moments,
    "group_rules": draw_group_rules,
}
HEADS_FIGURES = {
    "sparsity": draw_sparsity,
    "head_maps": draw_maps,
    "rank_correlation": draw_ranks,
    "deciles": draw_deciles,
    "head_kinds": draw_kinds,
}


def write(folder: Path, name: str, figure: Figure, note: str) -> None:
    """The figure as a PNG whose bytes depend on nothing but what it shows."""
    figure.suptitle(note, fontsize=7, color="grey")
    figure.savefig(folder / f"{name}.png", metadata={"Software": None})


def main(arguments: Iterable[str] | None = None) -> int:
    """Draw everything; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.figures", description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables (default: eval/results)")
    parser.add_argument("--out", type=Path, help="folder of the figures (default: that of the tables)")
    parser.add_argument("--note", default="needle model, a 0.9M-parameter test model: no evidence about a real LLM")
    options = parser.parse_args(None if arguments is None else list(arguments))
    out = options.out or options.results
    for name in ("sweep.csv", "heads.csv"):
        if not (options.results / name).is_file():
            parser.error(f"there is no {options.results / name}: python -m eval.{name.removesuffix('.csv')} makes it")
    mpl.rcParams["font.family"] = "DejaVu Sans"  # comes with matplotlib: the same on every machine
    sweep, heads = read(options.results / "sweep.csv"), Heads(read(options.results / "heads.csv"))
    for name, draw in SWEEP_FIGURES.items():
        write(out, name, draw(sweep), options.note)
    for name, draw_heads in HEADS_FIGURES.items():
        write(out, name, draw_heads(heads), options.note)
    for name, (source, draw) in MOMENTS_FIGURES.items():
        if (options.results / source).is_file():
            write(out, name, draw(read(options.results / source)), options.note)
    table = error_table(heads)
    tables.write(out / "log_error.csv", table)
    print(f"wrote {len(list(out.glob('*.png')))} figures and log_error.csv to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
