"""Whether decoding has become slower than it was: `python -m eval.regressions`.

    python -m eval.regressions             # the tables of `eval.benchmark` against what was recorded
    python -m eval.regressions --record    # then add them to the record

Milliseconds differ between machines and days. The speed against StaticCache, measured in the same run, differs less: it
may not fall below `BOUND` of its median over the recorded runs. The exit status is 1 if one does.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from statistics import median

from eval.shared.tables import Rows, align, read, write

RESULTS = Path(__file__).parent / "results"
RECORD = "medians.csv"
KEY = ("model", "dtype", "method", "tokens", "batch")
BOUND = 0.75  # of the median: what differs by less between two runs of the same code is noise


def list_ours(results: Path) -> Rows:
    """The present rows of our methods, of every table of a benchmark on a CPU."""
    rows = [row for path in sorted(results.glob("benchmark-*-cpu.csv")) for row in read(path)]
    return [row for row in rows if row["method"].startswith("QAdACache") and row["against_static"]]


def compare(present: Rows, record: Rows) -> list[dict[str, str]]:
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


def main(arguments: Iterable[str] | None = None) -> int:
    """Compare, say what was found, and record; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.regressions", description=__doc__.split("\n\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables (default: eval/results)")
    parser.add_argument("--record", action="store_true", help=f"add the present tables to {RECORD}")
    options = parser.parse_args(None if arguments is None else list(arguments))
    path = options.results / RECORD
    present = list_ours(options.results)
    table = compare(present, read(path) if path.exists() else [])
    slower = [row for row in table if float(row["of it"]) < BOUND]
    if table:
        print(align(table))
    print(f"{len(slower)} of {len(table)} are below {BOUND} of the median of the recorded runs")
    if options.record:
        kept = (*KEY, "p50_ms", "against_dynamic", "against_static", "machine")
        write(path, [{name: row[name] for name in kept} for row in present], add=True, date=date.today().isoformat())
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
