"""A picture of `eval.benchmark`'s table: time per token by the share of KV heads that read the long context."""

import textwrap
from pathlib import Path

from eval.reporting.tables import read

PREFIX = "QAdACache f="
OWN = {"QAdACache tokens=0.05": "--", "QAdACache": "--", "QAdACache, whole heads": "-."}
OTHERS = {"DynamicCache": "C3", "StaticCache": "C1", "no context": "0.5"}


def draw(table: Path) -> None:
    """Write a PNG beside the table, with one panel for each context length and batch.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from eval.drawing.canvas import canvas, write

    rows = read(table)
    panels = sorted({(int(row["batch"]), int(row["tokens"])) for row in rows})
    figure, grid = canvas(len(panels), width=4.2, height=3.6)
    for axes, (batch, tokens) in zip(grid[0], panels, strict=True):
        times = {
            row["method"]: float(row["p50_ms"])
            for row in rows
            if (int(row["batch"]), int(row["tokens"])) == (batch, tokens)
        }
        forced = sorted((float(name[len(PREFIX) :]), ms) for name, ms in times.items() if name.startswith(PREFIX))
        axes.plot(*zip(*forced, strict=True), "o-", color="C0", label="QAdACache, share forced")
        nothing, static = times["no context"], times["StaticCache"]
        shares = [step / 100 for step in range(101)]  # straight, but not on this scale
        line = [nothing + share * (static - nothing) for share in shares]
        axes.plot(shares, line, ":", color="C1", label="StaticCache's share of the reading")
        for name, colour in OTHERS.items():
            axes.axhline(times[name], color=colour, linewidth=1, label=name)
        for name, style in OWN.items():
            if name in times:
                axes.axhline(times[name], color="C0", linestyle=style, linewidth=1, label=name)
        axes.set(
            title=f"{tokens:,} tokens, batch {batch}",
            xlabel="share of KV heads that read the long context",
            ylabel="ms per token",
            yscale="log",
        )
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_minor_formatter("{x:.0f}")
        axes.tick_params(which="both", labelsize=7)
    figure.legend(*axes.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=2 * len(panels))
    note = "{model}, {dtype}; {machine}".format(**rows[0])
    write(table.parent, table.stem, figure, textwrap.fill(note, 70 * len(panels)))
