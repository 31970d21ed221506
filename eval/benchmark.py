"""Decoding speed at the byte limit, every method on the same work in one run: `python -m eval.benchmark`.

    python -m eval.benchmark --model llama-3.2-1b --tokens 32768 --out eval/results/benchmark-llama-3.2-1b-cpu.csv

Caches are filled with the same keys and values and decode the same tokens. A model given by its sizes has random
weights and a random context; QAdACache then has a forced share f of its KV heads flagged, the same number in each layer
as nearly as can be; with `tokens=` every head is flagged and reads that share of its tokens. A model that reads a text
of its own also has QAdACache's own flags timed, and own tokens. The limit is the time without a context, plus as much
of what a preallocated dense cache (StaticCache) takes on top as is read of the bulk's bytes, a sketch included.
Before anything is timed, QAdACache at f = 1 must give what DynamicCache gives. On an accelerator all methods first
take some steps that are not timed, so that whatever is compiled for them is there. On a CUDA device DynamicCache has
no attention of cuDNN's, which plans anew for every length that it meets, and for longer than a step takes; the row that
is named after it has torch's own choice, at lengths that it has not met.
"""

import argparse
import contextlib
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median_high
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, StaticCache

from eval.shared.counting import count_bus_bytes, count_held, count_read_bytes
from eval.shared.tables import make_parser, read, to_count
from eval.shared.timing import Peak, add_options, decode, load_model, measure_speeds, report
from eval.shared.workloads import (
    CUDNN,
    RESIDENT_TOKENS,
    TOKEN_SHARE,
    TOKENS,
    Work,
    fill,
    find_token_threshold,
    flag_heads,
    list_methods,
)
from qada_cache import QAdACache, restore_attention
from qada_cache.models.latent import find_latent_sizes

PREFIX = "QAdACache f="
OWN = {"QAdACache tokens=0.05": "--", "QAdACache": "--", "QAdACache, whole heads": "-."}
OTHERS = {"DynamicCache": "C3", "StaticCache": "C1", "no context": "0.5"}  # the baselines of every row
LIMITED = (PREFIX, "QAdACache resident f=", TOKENS, RESIDENT_TOKENS)  # methods whose time is compared with a limit
WARM_UP = 4  # steps, not timed: a graph is captured in the third, and compared in the fourth
SLOW = (CUDNN, "DynamicCache, offloading")  # by far, so that they are timed for `FEW` steps
FEW = 8
SHORTEST = 256  # tokens: of a context that hardly exceeds sinks and window, every method makes the same


def draw(table: Path) -> None:
    """Write a PNG beside the table, with one panel for each context length and batch.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from eval.shared.drawing import make_canvas, write

    rows = read(table)
    panels = sorted({(int(row["batch"]), int(row["tokens"])) for row in rows})
    figure, grid = make_canvas(len(panels), width=4.2, height=3.6)
    for axes, (batch, tokens) in zip(grid[0], panels, strict=True):
        times = {
            row["method"]: float(row["p50_ms"])
            for row in rows
            if (int(row["batch"]), int(row["tokens"])) == (batch, tokens)
        }
        plain = {name: ms for name, ms in times.items() if name.startswith(PREFIX) and "," not in name}
        forced = sorted((float(name[len(PREFIX) :]), ms) for name, ms in plain.items())
        if forced:
            axes.plot(*zip(*forced, strict=True), "o-", color="C0", label="QAdACache, share forced")
        nothing, static = times["no context"], times["StaticCache"]
        shares = [step / 100 for step in range(101)]  # a straight line, which the log scale bends
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


def check(work: Work) -> None:
    """QAdACache at f = 1, or of latents, against DynamicCache, on the very context that is timed.

    Two exact computations differ by rounding. How much that makes of a model's logits is told by DynamicCache with the
    context's tokens in reverse, which changes nothing but the order of sums: ours may be off by three times as much.
    Of 16 bits it tells nothing, as sums are kept in more: what rounding each layer's output makes is always allowed,
    and a tenth of what sinks and window are off never.

    Raises:
        RuntimeError: it is off by more.
    """
    model = work.model
    reverse = replace(work, states=[(keys.flip(2), values.flip(2)) for keys, values in work.states])
    makers = {
        "dense": lambda: DynamicCache(config=model.config),
        "ours": lambda: QAdACache(model, criterion=flag_heads(work, 1.0), token_threshold=0.0),
        "window": lambda: QAdACache(model, criterion="local"),
    }
    if find_latent_sizes(model.config) is not None:  # all heads read everything, and there is no window by itself
        makers["ours"] = lambda: QAdACache(model)
        del makers["window"]
    logits = {name: decode(work, fill(make(), work), steps=1)[1].float() for name, make in makers.items()}
    logits["reversed"] = decode(work, fill(DynamicCache(config=model.config), reverse), steps=1)[1].float()
    logits.setdefault("window", decode(work, DynamicCache(config=model.config), steps=1)[1].float())
    off = {name: float((result - logits["dense"]).norm() / logits["dense"].norm()) for name, result in logits.items()}
    rounding = 2 * torch.finfo(model.dtype).eps * len(work.states) ** 0.5
    allowed = min(max(3 * off["reversed"], rounding), 0.1 * off["window"])
    if not off["ours"] <= allowed:
        raise RuntimeError(
            f"QAdACache at f = 1 is off by {off['ours']:.2g} of DynamicCache's logits, {allowed:.2g} is allowed"
        )
    shown = ", ".join(f"{name} {error:.2g}" for name, error in off.items() if name != "dense")
    print(f"off DynamicCache's logits: {shown}")


def select_methods(made: dict[str, Callable[[], Cache]], asked: list[str] | None) -> dict[str, Callable[[], Cache]]:
    """The methods with the names `asked`, or whose names begin so, and the baselines; all methods if it is None.

    Raises:
        ValueError: there is none of that name.
    """
    if asked is None:
        return made
    selected = set(OTHERS)
    for prefix in asked:
        named = {prefix} & made.keys() or {name for name in made if name.startswith(prefix)}
        if not named:
            raise ValueError(f"--methods: none is {prefix!r}, of {', '.join(made)}")
        selected |= named
    return {name: make for name, make in made.items() if name in selected}


@contextlib.contextmanager
def allow_cudnn(allowed: bool) -> Iterator[None]:
    """Inside, torch may choose cuDNN's attention if `allowed`. On some GPUs it prefers that."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def list_runs(names: list[str], rounds: int, *, accelerated: bool) -> list[tuple[str, bool]]:
    """Methods in the order in which they run, and whether they are timed: rounds go over all of them in turn, so that
    none has the quiet machine to itself. The first round on an accelerator compiles, but `CUDNN` may meet its lengths
    once."""
    first = [(name, name == CUDNN) for name in names] if accelerated else []
    return first + [(name, True) for _ in range(rounds) for name in names if name != CUDNN]


def measure(work: Work, made: dict[str, Callable[[], Cache]], rounds: int, read: float) -> list[dict[str, Any]]:
    """A row for every method. `read` is the device's reading speed in bytes a second."""
    seconds: dict[str, list[float]] = {}
    figures: dict[str, dict[str, float]] = {}
    shares: dict[str, float] = {}
    accelerated, steps = work.model.device.type != "cpu", work.inputs.shape[1]
    with tqdm(list_runs(list(made), rounds, accelerated=accelerated), unit="run") as bar:
        for name, timed in bar:
            bar.set_postfix_str(name)
            restore_attention(work.model)
            peak = Peak(work.model.device)
            cache = made[name]()
            with allow_cudnn(name == CUDNN or isinstance(cache, StaticCache)):
                count = min(steps, WARM_UP + FEW) if name in SLOW or not timed else steps
                step_seconds = decode(work, cache, steps=count)[0]
            if timed:
                seconds.setdefault(name, []).extend(step_seconds)
            device, host = count_held(cache)
            if isinstance(cache, QAdACache):
                shares[name] = cache.stats().read_share
            figures[name] = {
                "read_mib": count_read_bytes(cache, name, count) / 2**20,
                "bus_mib": accelerated * count_bus_bytes(cache, count) / 2**20,
                "device_mib": device / 2**20,
                "host_mib": host / 2**20,
                "peak_device_mib": peak.device / 2**20,
                "peak_host_mib": peak.host / 2**20,
            }
            del cache  # the next `Peak` collects what is left
    median = {name: median_high(times) for name, times in seconds.items()}
    nothing, static = median["no context"], median["StaticCache"]
    rows = []
    for name in made:
        times = seconds[name]
        row: dict[str, Any] = {
            "method": name,
            "tokens": work.tokens,
            "batch": work.batch,
            "p50_ms": f"{1e3 * median[name]:.2f}",
            "mean_ms": f"{1e3 * fmean(times):.2f}",
            "p95_ms": f"{1e3 * sorted(times)[math.ceil(0.95 * len(times)) - 1]:.2f}",
            "tokens_per_s": f"{work.batch / median[name]:.1f}",
            "against_dynamic": f"{median['DynamicCache'] / median[name]:.2f}",
            "against_static": f"{static / median[name]:.2f}",
            "over_limit": "",
            "context_gb_per_s": "",
            **{key: f"{value:.1f}" for key, value in figures[name].items()},
            "over_bandwidth": f"{median[name] / (nothing + figures[name]['read_mib'] * 2**20 / read):.2f}",
        }
        if name.startswith(LIMITED):
            row["over_limit"] = f"{median[name] / (nothing + shares[name] * (static - nothing)):.2f}"
        if median[name] > 1.1 * nothing:  # else the difference is noise
            row["context_gb_per_s"] = f"{figures[name]['read_mib'] * 2**20 / (median[name] - nothing) / 1e9:.1f}"
        rows.append(row)
    return rows


def shape(text: str) -> tuple[int, int]:
    """Tokens and rows, of "8192" or "8192x8"."""
    tokens, by, rows = text.partition("x")
    tokens_and_rows = int(tokens), int(rows) if by else 1
    if tokens_and_rows[0] < SHORTEST or tokens_and_rows[1] < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least {SHORTEST} tokens, and one row")
    return tokens_and_rows


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = make_parser("benchmark", __doc__)
    add = add_options(parser, "method", "p50_ms", "over_limit")
    add("--tokens", type=shape, nargs="+", default=[(32768, 1)], metavar="TOKENS[xROWS]",
        help="of context, a row; 8192x8 is a batch of 8 (default: 32768)")  # fmt: skip
    add("--steps", type=to_count, default=8, help="tokens timed a round (default: %(default)s)")
    add("--rounds", type=to_count, default=3, help="over all methods (default: %(default)s)")
    add("--methods", nargs="+", metavar="NAME",
        help="those to time, by name or by how names begin; baselines always are (default: all)")  # fmt: skip
    options = parser.parse_args(arguments)
    model, make_work, _ = load_model(parser, options, tokens=max(options.tokens)[0])
    measured = measure_speeds(model.device)
    speed = {f"{name}_gb_per_s": f"{value / 1e9:.1f}" for name, value in measured.items()}
    print(f"memory: {speed}")
    kernels = os.environ.get("QADA_KERNELS", "auto")
    rows = []
    for tokens, batch in options.tokens:
        try:
            work = make_work(model, tokens=tokens, batch=batch, steps=options.steps, warm_up=WARM_UP, seed=options.seed)
            made = select_methods(list_methods(work, find_token_threshold(work, TOKEN_SHARE)), options.methods)
        except ValueError as error:
            parser.error(str(error))
        check(work)
        rows += measure(work, made, options.rounds, measured["read"])
        del work, made
        report(options, rows, kernels=kernels, **speed)  # a run may be cut off in the next length
    if options.out:
        with contextlib.suppress(ImportError):  # no picture without matplotlib
            draw(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
