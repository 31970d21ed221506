"""Tables of `python -m eval.trials`, row by row, summed up: means over documents, and how sure they are."""

import math
from collections import defaultdict
from statistics import mean, stdev
from typing import Any

from eval.reporting.tables import Rows

WAY = ("model", "task", "length", "criterion", "moments", "rule", "threshold", "read")


def summary(rows: Rows) -> list[dict[str, Any]]:
    """One row for each model, task, length and way: means over documents, `±` their standard errors.

    `found` counts the right answers, of the questions that full attention answers rightly; prose has none.
    """
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row.get(name, "") for name in WAY)].append(row)
    made = []
    for way, group in groups.items():
        asked = [row for row in group if row["right"] == "1"]
        made.append({
            **dict(zip(WAY, way, strict=True)),
            "documents": len(group),
            "kl": _with_error([float(row["kl"]) for row in group], 4),
            "top1": _with_error([float(row["top1"]) for row in group], 3),
            "found": f"{sum(row['found'] == '1' for row in asked)}/{len(asked)}" if asked else "",
            "kv_read": f"{mean(float(row['kv_read']) for row in group):.3f}",
            "bytes_read": f"{mean(float(row.get('bytes_read') or row['kv_read']) for row in group):.3f}",
            "q_local": f"{mean(float(row['q_local']) for row in group):.3f}",
        })  # fmt: skip
    return made


def _with_error(values: list[float], digits: int) -> str:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{mean(values):.{digits}f} ± {error:.{digits}f}"
