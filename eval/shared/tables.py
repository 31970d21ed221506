"""Tables of results: rows as dicts of the same keys, as aligned text and as CSV."""

import argparse
import csv
import math
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qada_cache.machine import describe_machine

Rows = list[dict[str, str]]
NEAR = 128  # tokens that a cache always reads by default, sinks and window


def table_of(*columns: str) -> Callable[[str], Path]:
    """The argument type of a table that a command writes, or adds rows to; all its versions had these `columns`. It
    refuses a file without them, so that neither another command's table nor other text is written over."""

    def check(path: str) -> Path:
        if not (table := Path(path)).parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {table.parent}")
        if table.is_dir():
            raise argparse.ArgumentTypeError(f"{table} is a folder, name a file in it")
        if not os.access(table if table.exists() else table.parent, os.R_OK | os.W_OK):
            raise argparse.ArgumentTypeError(f"{table} cannot be written")
        if table.exists() and table.stat().st_size:
            with table.open(encoding="utf-8", errors="replace") as file:
                header = file.readline(10_000).strip()
            if not set(columns) <= set(header.split(",")):
                raise argparse.ArgumentTypeError(f"{table} exists, and is no table of this command")
        return table

    return check


def text_file(path: str) -> Path:
    """One with some text to be read, of a command line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read as text in UTF-8: {error}") from error
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{path} is empty")
    return Path(path)


def to_share(text: str) -> float:
    """A number in [0, 1], of a command line."""
    if not 0 <= (value := float(text)) <= 1:
        raise ValueError
    return value


def to_amount(text: str) -> float:
    """A finite number that is not negative, of a command line."""
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError
    return value


def to_count(text: str) -> int:
    """A whole number above 0, of a command line."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def to_length(text: str) -> int:
    """A text's tokens, of a command line: sinks and window, two others at least, and the last token, which asks."""
    if (value := int(text)) <= NEAR + 2:
        raise ValueError
    return value


to_share.__name__, to_count.__name__ = "share (a number in [0, 1])", "count (a whole number above 0)"
to_length.__name__ = f"length (a whole number above {NEAR + 2})"
to_amount.__name__ = "amount (a number, not negative)"  # which argparse names


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """That of `python -m eval.NAME`, whose docstring is `doc`."""
    return _Parser(prog=f"python -m eval.{name}", description=(doc or "").split("\n\n")[0])


class _Parser(argparse.ArgumentParser):
    """Takes each of several values once: what is measured twice would count twice."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options = super().parse_args(args, namespace)
        for name, given in vars(options).items():
            if isinstance(given, list):
                setattr(options, name, list(dict.fromkeys(given)))
        return options


def read(path: Path) -> Rows:
    """The rows of a table that was written."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def group_cells(rows: Rows) -> dict[tuple[str, str], Rows]:
    """The table's rows by task and length."""
    found = defaultdict(list)
    for row in rows:
        found[row["task"], row["length"]].append(row)
    return dict(found)


def align(table: list[dict[str, Any]]) -> str:
    """Aligned text: the first column to the left, figures to the right."""
    lines = [list(table[0]), *([str(cell) for cell in row.values()] for row in table)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    aligned = ("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)
    return "\n".join(aligned)


def report(rows: list[dict[str, Any]], out: Path | None, *, add: bool = False, **everywhere: object) -> None:
    """Print the machine and the table, and `write` it with the machine in a last column if a file was given."""
    print(describe_machine())
    print(align(rows))
    if out:
        write(out, rows, add=add, **everywhere, machine=describe_machine())


def write(path: Path, table: list[dict[str, Any]], *, add: bool = False, **everywhere: object) -> None:
    """The table as a CSV file; `everywhere` are columns with the same value in all rows.

    With `add`, the rows go below those of a file that is there already, which may have had other columns.
    """
    rows = [row | everywhere for row in table]
    columns = list(rows[0])
    old: Rows = read(path) if add and path.exists() else []
    goes_on = bool(old) and list(old[0]) == columns
    if old and not goes_on:  # what a table made by an older version does not say is left empty
        rows, columns = [*old, *rows], list(dict.fromkeys([*columns, *old[0]]))
    with path.open("a" if goes_on else "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        if not goes_on:
            writer.writeheader()
        writer.writerows(rows)
