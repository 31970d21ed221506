"""Statistics of a run's caches, task by task, in lm-eval's results."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import lm_eval.evaluator

from qada_cache import CacheStats

NOT_MEASURED = "N/A"  # lm-eval's own word for it: no token had a bulk to decide about


@dataclass
class Totals:
    """Sums over the caches of one task's batches.

    Attributes:
        decisions: decisions taken per layer, the weight of a cache's sparsity.
        local, kv_local: of those, how many called a query head local, or did not need a KV head's bulk; the mean
            over heads.
        bulk_read_bytes: bulk bytes read by query-adaptive calls.
        read_bytes, dense_bulk_bytes: their ratio is `CacheStats.read_share`.
        device_bytes, host_bytes: the most that one batch's cache held, of each kind.
    """

    decisions: int = 0
    local: float = 0.0
    kv_local: float = 0.0
    bulk_read_bytes: int = 0
    read_bytes: int = 0
    dense_bulk_bytes: int = 0
    device_bytes: int = 0
    host_bytes: int = 0

    def add(self, stats: CacheStats) -> None:
        """Take in one batch's cache, at the end of the batch, when it is largest."""
        if stats.decisions:
            self.decisions += stats.decisions
            self.local += stats.sparsity * stats.decisions
            self.kv_local += stats.kv_sparsity * stats.decisions
        self.bulk_read_bytes += stats.bulk_read_bytes
        self.read_bytes += stats.bulk_read_bytes + stats.resident_hit_bytes + stats.sketch_read_bytes
        self.dense_bulk_bytes += stats.dense_bulk_bytes
        self.device_bytes = max(self.device_bytes, stats.device_bytes)
        self.host_bytes = max(self.host_bytes, stats.host_bytes)

    def merge(self, other: "Totals") -> None:
        """Add another process's totals; bytes held are the larger of both."""
        for name in (field.name for field in fields(self)):
            combine = max if name in ("device_bytes", "host_bytes") else sum
            setattr(self, name, combine([getattr(self, name), getattr(other, name)]))

    def metrics(self) -> dict[str, Any]:
        """The totals as entries of lm-eval's results; its table prints them beside the scores."""
        return {
            "cache_sparsity,none": self.local / self.decisions if self.decisions else NOT_MEASURED,
            "cache_kv_sparsity,none": self.kv_local / self.decisions if self.decisions else NOT_MEASURED,
            "cache_read_share,none": self.read_bytes / self.dense_bulk_bytes if self.dense_bulk_bytes else NOT_MEASURED,
            "cache_bulk_read_bytes,none": self.bulk_read_bytes,
            "cache_device_bytes,none": self.device_bytes,
            "cache_host_bytes,none": self.host_bytes,
        }


def install() -> None:
    """Have `lm_eval.evaluator.evaluate` report the totals of a model that keeps some. Idempotent.

    lm-eval asks the model for nothing that ends up with a task's results, so its function is wrapped.
    """
    if not hasattr(lm_eval.evaluator.evaluate, "_reports_caches"):
        lm_eval.evaluator.evaluate = _reporting(lm_eval.evaluator.evaluate)


def _reporting(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(evaluate)
    def evaluate_and_report(*args: Any, **kwargs: Any) -> Any:
        lm = kwargs["lm"] if "lm" in kwargs else args[0]
        totals: dict[str, Totals] | None = getattr(lm, "cache_totals", None)  # through lm-eval's CachingLM as well
        if totals is None:
            return evaluate(*args, **kwargs)
        totals.clear()
        results = evaluate(*args, **kwargs)
        gathered = lm.gather_object(totals)
        if results is not None:
            for task in results["results"].keys() & totals.keys():
                whole = Totals()
                for part in gathered:
                    whole.merge(part.get(task, Totals()))
                tuned = {"cache_tuned,none": lm.cache_tuned} if lm.cache_tuned else {}
                results["results"][task] |= whole.metrics() | tuned
        return results

    evaluate_and_report._reports_caches = True  # type: ignore[attr-defined]  # marks what has been wrapped
    return evaluate_and_report
