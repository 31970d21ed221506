"""Tables of results: rows as dicts of the same keys, as aligned text and as CSV."""

import csv
from pathlib import Path
from typing import Any

Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    """The rows of a table that was written."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def plain(table: list[dict[str, Any]]) -> str:
    """Aligned text: the first column to the left, figures to the right."""
    lines = [list(table[0]), *([str(cell) for cell in row.values()] for row in table)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def write(path: Path, table: list[dict[str, Any]], *, add: bool = False, **everywhere: object) -> None:
    """The table as a CSV file; `everywhere` are columns with the same value in all rows.

    With `add`, the rows go below those of a file that is there already.
    """
    header = not (add and path.exists())
    with path.open("a" if add else "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*table[0], *everywhere], lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(row | everywhere for row in table)
