"""The paper's figures from the committed tables, nothing measured again: `python -m eval.figures`.

Reads `sweep.csv` (`python -m eval.sweep`) and `heads.csv` (`python -m eval.heads`) of a folder, and the needle model's
`moments-4096.csv` and `moment_lengths-4096.csv` (`python -m eval.moments`) if they are there, and writes one PNG for
each figure, and the table of errors, beside them. The same tables give the same numbers and pictures.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from eval import tables
from eval.canvas import canvas, write
from eval.head_figures import HEADS_FIGURES, Heads, error_table
from eval.tables import Rows, read

RESULTS = Path(__file__).parent / "results"
NAMES = {
    "qada": "QAdA",
    "oracle": "oracle",
    "static oracle": "static (this task)",
    "static other": "static (other tasks)",
}
COLOURS = {"QAdA": "C0", "oracle": "C2", "static (this task)": "C1", "static (other tasks)": "C3"}


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
