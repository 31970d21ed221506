"""Figures from the committed tables, nothing measured again: `python -m eval.figures`.

Reads `trials.csv` (`python -m eval.trials`), `sweep*.csv` (`python -m eval.sweep`) and `heads.csv`
(`python -m eval.heads`) of a folder, and writes one PNG for each figure, the table of errors and the summary of the
trials beside them. The same tables give the same numbers and pictures.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from eval.shared import tables
from eval.shared.deciding import summarize
from eval.shared.drawing import HEADS_FIGURES, Heads, draw_moments, draw_tokens, make_canvas, make_error_table, write
from eval.shared.held_and_read import draw_held_and_read
from eval.shared.tables import Rows, group_cells, read

RESULTS = Path(__file__).parent / "results"
NAMES = {
    "qada": "QAdA",
    "oracle": "oracle",
    "static oracle": "static heads (of this task)",
    "static other": "static heads (of other tasks)",
}


def find_curves(rows: Rows) -> dict[str, list[tuple[float, float]]]:
    """By criterion, moments and group rule: `(share of query heads that are local, score)`, by rising share."""
    found = defaultdict(list)
    for row in rows:
        if row["criterion"] in NAMES:
            names = (NAMES[row["criterion"]], row["moments"], row["group_rule"])
            found[", ".join(filter(None, names))].append((float(row["q_heads_local"]), float(row["score"])))
    return {name: sorted(points) for name, points in found.items()}


def draw_performance(rows: Rows) -> Figure:
    """Score against local heads, for every task and length (the paper's figures 4 and 5)."""
    parts = group_cells(rows)
    figure, axes = make_canvas(min(3, len(parts)), -(-len(parts) // 3))
    for axis, ((task, length), part) in zip(axes.flat, parts.items(), strict=False):
        for name, points in find_curves(part).items():
            axis.plot(*zip(*points, strict=True), "o-", ms=3, label=name)
        for criterion, style, name in (("dense", ":", "full attention"), ("local", "--", "window only")):
            score = next(float(row["score"]) for row in part if row["criterion"] == criterion)
            axis.axhline(score, ls=style, c="grey", lw=1, label=name)
        axis.set(title=f"{task}, {length} tokens", xlabel="query heads local", ylabel="score", ylim=(-0.03, 1.05))
    for axis in axes.flat[len(parts) :]:
        axis.remove()
    axes[0, 0].legend(fontsize=7)
    return figure


def main(arguments: Iterable[str] | None = None) -> int:
    """Draw everything; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.figures", description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables (default: eval/results)")
    parser.add_argument("--out", type=Path, help="folder of the figures (default: that of the tables)")
    parser.add_argument("--note", default="SmolLM2-135M-Instruct (4-bit weights), two CPU cores")
    options = parser.parse_args(None if arguments is None else list(arguments))
    out = options.out or options.results
    for name in ("trials.csv", "sweep.csv", "heads.csv"):
        if not (options.results / name).is_file():
            parser.error(f"there is no {options.results / name}: python -m eval.{name.removesuffix('.csv')} makes it")
    for path in sorted(options.results.glob("sweep*.csv")):
        model = path.stem.removeprefix("sweep")  # "-NAME" of another model
        write(out, f"performance{model}", draw_performance(read(path)), model[1:] or options.note)
    heads = Heads(read(options.results / "heads.csv"))
    for name, draw_heads in HEADS_FIGURES.items():
        write(out, name, draw_heads(heads), options.note)
    trials = {path.name: read(path) for path in sorted(options.results.glob("trials[.-]*csv"))}  # no summary
    write(out, "moments", draw_moments(trials["trials.csv"]), options.note)
    table = make_error_table(heads)
    tables.write(out / "log_error.csv", table)
    every = [row for rows in trials.values() for row in rows]
    write(out, "tokens", draw_tokens(every), "4-bit weights, two CPU cores")
    tables.write(out / "trials_summary.csv", summarize(every))
    if options.results.samefile(RESULTS):  # of tables that are nobody else's
        write(out, "held_and_read", draw_held_and_read(RESULTS), "SmolLM2-135M-Instruct, prose, 3,072 tokens")
    print(f"wrote {len(list(out.glob('*.png')))} figures and two tables to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
