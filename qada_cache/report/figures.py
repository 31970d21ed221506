"""Measurements as rows of the page's table."""

from statistics import median
from typing import Any

from .answering import Answer


def list_figures(stock: Answer, ours: Answer, *, on_cpu: bool) -> list[dict[str, Any]]:
    """Rows for DynamicCache and QAdACache, each `what`, how it is known, and `cells`: a text, and the value that bars
    are drawn by, None where there is none."""
    stats = ours.stats
    assert stats is not None
    passes = max(1, stats.steps)
    read = stats.bulk_read_bytes + stats.sketch_read_bytes
    sizes = stock.device_bytes + stock.host_bytes, stats.device_bytes + stats.host_bytes
    one = "On a CPU both are one memory. " if on_cpu else ""
    return [
        _make_row(
            "Long context read for each token of the answer",
            f"Stored keys and values, sinks and newest left out, the sketch included: mean of {stats.steps} passes. "
            "QAdACache counts what it reads; DynamicCache's heads read all, which is arithmetic.",
            _compare(stats.dense_bulk_bytes / passes, read / passes) if stats.dense_bulk_bytes else [None, None],
        ),
        _make_row("Cache held in the end", "All layers, on the device and in host memory.", _compare(*sizes)),
        _make_row(
            "Of this on the device",
            f"{one}The rest is the long context, offloaded." if stats.host_bytes else "Nothing is offloaded.",
            [_format_mib(stock.device_bytes), _format_mib(stats.device_bytes)],
        ),
        _make_row(
            "Reading the document", "One pass, once.", [_format_seconds(each.reading_seconds) for each in (stock, ours)]
        ),
        _make_row(
            "From the question to the first token",
            "One pass, once.",
            [_format_seconds(each.first_seconds) for each in (stock, ours)],
        ),
        _make_row(
            "Each further token",
            "Median of "
            + " and ".join(str(len(each.seconds)) for each in (stock, ours))
            + "; least to most in brackets.",
            [_spread(each.seconds) for each in (stock, ours)],
        ),
    ]


def _make_row(what: str, how: str, cells: list[tuple[str, float] | None]) -> dict[str, Any]:
    filled = [("not measured", None) if cell is None else cell for cell in cells]
    return {"what": what, "how": how, "cells": [{"text": text, "value": value} for text, value in filled]}


def _compare(stock: float, ours: float) -> list[tuple[str, float] | None]:
    """Bytes of both, and the second's share of the first's."""
    return [_format_mib(stock), (f"{_format_mib(ours)[0]}, {ours / stock:.1%}", ours)]


def _format_mib(count: float) -> tuple[str, float]:
    mib = count / 2**20
    return (f"{mib:,.2f} MiB" if mib < 10 else f"{mib:,.1f} MiB"), count


def _format_seconds(seconds: float) -> tuple[str, float]:
    return (f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"), seconds


def _spread(seconds: list[float]) -> tuple[str, float] | None:
    if not seconds:
        return None
    middle, least, most = (1e3 * each for each in (median(seconds), min(seconds), max(seconds)))
    return f"{middle:.1f} ms ({least:.1f} to {most:.1f})", middle
