"""A picture of `eval.benchmark`'s table: time per token by the share of KV heads that read the long context."""

from pathlib import Path
from typing import Any

PREFIX = "QAdACache f="
OTHERS = {"DynamicCache": "C3", "StaticCache": "C1", "no context": "0.5"}


def draw(rows: list[dict[str, Any]], path: Path, note: str) -> None:
    """Write a PNG with one panel for each context length and batch; `rows` are those of the table.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["font.family"] = "DejaVu Sans"  # comes with matplotlib: the same on every machine
    panels = sorted({(row["batch"], row["tokens"]) for row in rows})
    figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained", dpi=110)
    for axes, (batch, tokens) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        times = {
            row["method"]: float(row["p50_ms"]) for row in rows if (row["batch"], row["tokens"]) == (batch, tokens)
        }
        forced = sorted((float(name[len(PREFIX) :]), ms) for name, ms in times.items() if name.startswith(PREFIX))
        axes.plot(*zip(*forced, strict=True), "o-", color="C0", label="QAdACache, share forced")
        nothing, static = times["no context"], times["StaticCache"]
        axes.plot([0, 1], [nothing, static], ":", color="C1", label="StaticCache's share of the reading")
        for name, colour in OTHERS.items():
            axes.axhline(times[name], color=colour, linewidth=1, label=name)
        if own := times.get("QAdACache, own flags"):
            axes.axhline(own, color="C0", linestyle="--", linewidth=1, label="QAdACache, own flags")
        axes.set(
            title=f"{tokens:,} tokens, batch {batch}",
            xlabel="share of KV heads that read the long context",
            ylabel="ms per token",
            yscale="log",
        )
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_minor_formatter("{x:.0f}")
        axes.tick_params(which="both", labelsize=7)
    axes.legend(fontsize=6)
    figure.suptitle(note, fontsize=7, color="grey")
    figure.savefig(path, metadata={"Software": None})
