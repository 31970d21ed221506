"""What GPUs and hosts are assumed to do, for `eval.gpu_plan`."""

import functools
from pathlib import Path
from typing import NamedTuple

from eval.shared.tables import Rows, read

RESULTS = Path(__file__).parents[1] / "results"
RESOURCES, HOST, MEASURED = (
    RESULTS / name for name in ("triton-resources.csv", "launch_time.csv", "benchmark-llama-3-8b-cuda.csv")
)
MEASURED_LAYERS = 32  # of the model of `MEASURED`
WARPS = 4  # of a program of each kernel, with heads of fewer than 256 channels
SCORES, MOST_TOKENS = 1024, 256  # that a program estimates, or chooses among, at once
MOST_HEADS = 8  # whose scores it estimates at once


class Gpu(NamedTuple):
    """By data sheets, but for the bus."""

    memory_gib: int
    memory_gb_s: float
    bus_gb_s: float  # between host and device: what was measured on an H100 (PCIe 5.0), and is usual for PCIe 4.0
    schedulers: int  # four a multiprocessor, each issues an instruction of a warp in a cycle
    ghz: float  # boost
    architecture: str  # the row of `triton-resources.csv`


GPUS = {
    "H100": Gpu(80, 3350.0, 50.0, 4 * 132, 1.755, "sm_90"),
    "A100": Gpu(80, 2039.0, 25.0, 4 * 108, 1.41, "sm_80"),
    "RTX 4090": Gpu(24, 1008.0, 25.0, 4 * 128, 2.52, "sm_80"),
}


class Host(NamedTuple):
    """Milliseconds of a step of one layer on the host."""

    dynamic: float  # `DynamicCache` and the model's own part, as measured beside an H100
    replayed: dict[str, float]  # ours by a graph, by sketch, as in `launch_time.csv`


def read_host() -> Host:
    """What was measured."""
    (nothing,) = (row for row in read(MEASURED) if row["method"] == "no context")
    replayed = {row["sketch"]: float(row["graph_us"]) / 1e3 for row in read(HOST)}
    return Host(float(nothing["p50_ms"]) / MEASURED_LAYERS, replayed)


def count_instructions(*, dim: int, group: int, tokens: int, segments: int, sketch: str, architecture: str) -> int:
    """Of warps, that a decode step of one KV head of one row issues, at most: its kernels' code, once for every block
    of tokens that a program takes at once. `tokens` are stored, of a bulk in `segments`."""
    queries = 1 << (group - 1).bit_length()
    estimated = min(MOST_TOKENS, SCORES // min(queries, MOST_HEADS))
    blocks = {
        "local_kernel": 1 + segments + group,
        "estimate_kernel": -(-tokens // estimated),
        "selected_kernel": -(-tokens // min(MOST_TOKENS, SCORES // queries)),
    }
    rows = [row for row in _read_resources(RESOURCES) if (row["sketch"], row["architecture"]) == (sketch, architecture)]
    found = 0
    for kernel, count in blocks.items():
        sizes = [(int(row["dim"]), int(row["group"]), row) for row in rows if row["kernel"] == kernel]
        nearest = min((size for size in sizes if size[0] >= dim and size[1] >= group), key=lambda size: size[:2])
        found += WARPS * count * int(nearest[2]["instructions"])
    return found


@functools.cache
def _read_resources(table: Path) -> Rows:
    return read(table)
