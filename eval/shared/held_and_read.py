"""The picture of the front page: what is lost, against the bytes that a method holds and those that it reads."""

from collections import defaultdict
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from eval.shared.drawing import SKETCH, TOKENS_CELL, make_canvas
from eval.shared.tables import read
from qada_cache.state import THRESHOLD, TOKEN_THRESHOLD

MODEL = "smollm2"
OURS = "QAdACache: 16, 8, 4 bits"
HELD = {"16": "QAdACache, 16 bits", "8": "QAdACache", "4": "QAdACache, 4 bits"}  # by bits, the row of `memory-*.csv`
LLAMA = "8, 4 bits (as llama.cpp's q8_0, q4_0)"
SHARE = "4, 2 bits (as QuantizedCache's)"
PEERS = {
    "SnapKV": "SnapKV", "ExpectedAttention": "Expected Attention", "TOVA": "TOVA", "KeyDiff": "KeyDiff",
    "4 bits": SHARE, "2 bits": SHARE,
}  # fmt: skip
STYLES = {OURS: "o-", LLAMA: "P-", SHARE: "D-"}
Point = tuple[float, float, float]  # bytes held and bytes read, of those in 16 bits; KL


def average(path: Path) -> dict[str, tuple[float, float]]:
    """By what is read, of the rows under the default threshold or none: mean bytes read, and mean KL."""
    groups = defaultdict(list)
    for row in read(path):
        if (row["model"], row["task"], row["length"]) == (MODEL, *TOKENS_CELL) and row["threshold"] in (
            "0.0",
            f"{THRESHOLD}",
        ):
            groups[row["read"]].append(row)
    return {
        way: (mean(float(row["bytes_read"]) for row in rows), mean(float(row["kl"]) for row in rows))
        for way, rows in groups.items()
    }


def read_methods(results: Path) -> dict[str, list[Point]]:
    """The points of every method, on SmolLM2's prose, from the committed tables.

    `bits/trials.csv` does not count the bytes of few bits: those of `bits/trials-bfloat16.csv` stand for them. What
    ours hold is all that `stats()` counts, of DynamicCache's; of others, their tokens or bits.
    """
    found = defaultdict(list)
    rungs = {(row["keys"], row["values"]): row for row in read(results / "rungs-smollm2.csv")}
    losses, bytes_read = average(results / "bits/trials.csv"), average(results / "bits/trials-bfloat16.csv")
    rows = read(results / f"memory-{MODEL}.csv")
    held = {row["cache"]: float(row["over_dynamic"]) for row in rows if row["tokens"] == TOKENS_CELL[1]}
    for bits, cache in HELD.items():
        way = f"{SKETCH}{'' if bits == '16' else f' over {bits}'}, {TOKEN_THRESHOLD}"
        found[OURS].append((held[cache], bytes_read[way][0], losses[way][1]))
    for code in ("q8_0", "q4_0"):
        row = rungs[code, code]
        share = float(row["of_16_bits"])
        found[LLAMA].append((share, share, float(row["kl"].split()[0])))
    for way, (share, loss) in average(results / "trials-peers.csv").items():
        found[PEERS[way.partition(", ")[0]]].append((share, share, loss))
    return found


def draw_held_and_read(results: Path) -> Figure:
    """KL divergence from full attention, against both."""
    figure, axes = make_canvas(2, width=4.2)
    for name, points in read_methods(results).items():
        for axis, place in zip(axes[0], (0, 1), strict=True):
            where = [point[place] for point in points], [point[2] for point in points]
            axis.plot(*where, STYLES.get(name, ".-"), ms=7 if name == OURS else 4, lw=1, label=name)
    panels = ("held", "all keys and values"), ("read for a token", "the long context's")
    for axis, (what, of) in zip(axes[0], panels, strict=True):
        axis.set(xscale="log", yscale="log", xlim=(0.03, 1.5), ylim=(1e-5, 5))
        axis.set(title=f"bytes {what}", xlabel=f"of {of} in 16 bits")
        axis.axvline(1, ls=":", c="grey", lw=1)
        axis.set_xticks([0.05, 0.1, 0.2, 0.5, 1], ["5%", "10%", "20%", "50%", "100%"], minor=False)
        axis.minorticks_off()
    axes[0, 0].set(ylabel="KL divergence from full attention")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=7, loc="outside right center")
    return figure
