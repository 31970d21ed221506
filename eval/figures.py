"""What follows from the committed tables, nothing measured again: `python -m eval.figures`.

    python -m eval.figures draw              # figures, the table of errors, the summary of the trials
    python -m eval.figures compare           # the tables of `eval.benchmark` against what was recorded
    python -m eval.figures compare --record  # then add them to the record

`draw` reads `trials.csv` (`python -m eval.trials`), `sweep*.csv` (`python -m eval.sweep`) and `heads.csv`
(`python -m eval.heads`) of a folder, and writes beside them. The same tables give the same numbers and pictures.

`compare`: milliseconds differ between machines and days. The speed against StaticCache, measured in the same run,
differs less: it may not fall below `BOUND` of its median over the recorded runs. The exit status is 1 if one does.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from eval.shared import tables
from eval.shared.deciding import summarize
from eval.shared.drawing import HEADS_FIGURES, Heads, draw_moments, draw_tokens, make_canvas, make_error_table, write
from eval.shared.held_and_read import draw_held_and_read
from eval.shared.tables import Rows, group_cells, read

RESULTS = Path(__file__).parent / "results"
RECORD = "medians.csv"
KEY = ("model", "dtype", "method", "tokens", "batch")
BOUND = 0.75  # of the median: what differs by less between two runs of the same code is noise
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


def draw(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Write every figure, and both tables."""
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
    tables.write(out / "log_error.csv", make_error_table(heads))
    every = [row for rows in trials.values() for row in rows]
    write(out, "tokens", draw_tokens(every), "4-bit weights, two CPU cores")
    tables.write(out / "trials_summary.csv", summarize(every))
    if options.results.samefile(RESULTS):  # of tables that are nobody else's
        write(out, "held_and_read", draw_held_and_read(RESULTS), "SmolLM2-135M-Instruct, prose, 3,072 tokens")
    print(f"wrote {len(list(out.glob('*.png')))} figures and two tables to {out}")
    return 0


def list_ours(results: Path) -> Rows:
    """The present rows of our methods, of every table of a benchmark on a CPU."""
    rows = [row for path in sorted(results.glob("benchmark-*-cpu.csv")) for row in read(path)]
    return [row for row in rows if row["method"].startswith("QAdACache") and row["against_static"]]


def find_medians(present: Rows, record: Rows) -> list[dict[str, str]]:
    """One row for each present one that was recorded before: its ratio, the median of those, one over the other."""
    before = defaultdict(list)
    for row in record:
        before[tuple(row[name] for name in KEY)].append(float(row["against_static"]))
    found = []
    for row in present:
        if ratios := before[tuple(row[name] for name in KEY)]:
            now, usual = float(row["against_static"]), median(ratios)
            measured = {"now": f"{now:.2f}", "median": f"{usual:.2f}", "of it": f"{now / usual:.2f}"}
            found.append({name: row[name] for name in KEY} | measured | {"runs": str(len(ratios))})
    return found


def compare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Say which benchmarks are slower than they were, 1 if any is; and record."""
    path, present = options.results / RECORD, list_ours(options.results)
    table = find_medians(present, read(path) if path.exists() else [])
    slower = [row for row in table if float(row["of it"]) < BOUND]
    if table:
        print(tables.align(table))
    print(f"{len(slower)} of {len(table)} are below {BOUND} of the median of the recorded runs")
    if options.record:
        kept, today = (*KEY, "p50_ms", "against_dynamic", "against_static", "machine"), date.today().isoformat()
        tables.write(path, [{name: row[name] for name in kept} for row in present], add=True, date=today)
    return int(bool(slower))


def main(arguments: Iterable[str] | None = None) -> int:
    """Do what is asked; returns the exit status."""
    parser = tables.make_parser("figures", __doc__)
    parts = parser.add_subparsers(required=True, metavar="draw|compare")
    add = (part := parts.add_parser("draw", help="figures, and tables that sum others up")).add_argument
    part.set_defaults(run=draw)
    add("--out", type=Path, help="folder of the figures (default: that of the tables)")
    add("--note", default="SmolLM2-135M-Instruct (4-bit weights), two CPU cores")
    compared = parts.add_parser("compare", help="benchmarks with earlier ones")
    compared.add_argument("--record", action="store_true", help=f"add the present tables to {RECORD}")
    compared.set_defaults(run=compare)
    for each in (part, compared):
        each.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables (default: eval/results)")
    options = parser.parse_args(None if arguments is None else list(arguments))
    return options.run(parser, options)


if __name__ == "__main__":
    sys.exit(main())
