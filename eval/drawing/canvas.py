"""Empty figures, and finished ones as files that are the same on every machine."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure


def canvas(columns: int = 1, rows: int = 1, width: float = 4.6, height: float = 3.2) -> tuple[Figure, np.ndarray]:
    """A figure and its axes, `[rows, columns]`."""
    mpl.rcParams["font.family"] = "DejaVu Sans"  # comes with matplotlib: the same on every machine
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", dpi=110)
    return figure, figure.subplots(rows, columns, squeeze=False)


def write(folder: Path, name: str, figure: Figure, note: str) -> None:
    """The figure as a PNG whose bytes depend on nothing but what it shows."""
    figure.suptitle(note, fontsize=7, color="grey")
    figure.savefig(folder / f"{name}.png", metadata={"Software": None})
