"""What every head's estimate said, and what was true, token by token: `python -m eval.heads`.

    python -m eval.heads --tasks prose_niah prose_fwe --lengths 4096 --limit 4 --out heads.csv

Tasks of lm-eval are answered with full attention. For every decision a cache would take, the table gets `log A_local`,
the true `log A_bulk`, and eq. 7's estimate of it by each kind of key moments; and, as the yardstick of the estimates,
what the estimate by the prompt's own moments would miss if scores really were independent and Gaussian.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lm_eval
import torch
from torch import Tensor

from eval.shared import language_model
from eval.shared.lm_tasks import check_tasks, find_task_manager
from eval.shared.tables import make_parser, table_of, to_count, to_length, write
from qada_cache import KeyMoments, QAdACache
from qada_cache.attention import decode
from qada_cache.criterion import score_moments
from qada_cache.lm_eval import QAdALM
from qada_cache.names import PROMPTS
from qada_cache.state.observation import Observation


@dataclass
class Recorder:
    """Takes down every decision of the caches that it observes.

    Args:
        moments: kinds of key moments to estimate with, beside the current prompt's.
    """

    moments: dict[str, KeyMoments]
    rows: list[dict[str, Any]] = field(default_factory=list)
    labels: dict[str, Any] = field(default_factory=dict)

    def observe(self, cache: QAdACache) -> None:
        """Take down every decision of `cache`."""
        cache.observer = partial(self._write, cache)

    def _write(self, cache: QAdACache, seen: Observation) -> None:
        layer, query, rows, shape = cache.layers[seen.layer], seen.query, seen.rows, seen.flags.shape
        moments = layer.store.moments
        grouped = query.states.float().unflatten(1, shape[1:3])
        found = score_moments(grouped.flatten(2, 3), moments.mean, moments.covariance, scaling=query.scaling)
        mean, variance = (moment.view(shape) for moment in found)
        columns = {
            "log_local": seen.log_local,
            "log_bulk": seen.true_log_bulk,
            "current": rows.log_tokens + mean + 0.5 * variance,
            "iid": _draw_gaussian(mean, variance, rows.bulk_tokens.unsqueeze(2)),
        }
        for name, kept in self.moments.items():
            columns[name] = decode.estimate_by_others(kept, layer, query.states.float(), query, rows, shape[1])
        flat = {name: column.flatten(1, 2).cpu() for name, column in columns.items()}  # [rows, heads, queries]
        decided = rows.decided.expand(shape[0], 1, shape[3]).squeeze(1).cpu()
        for row, query in decided.nonzero().tolist():
            for head in range(shape[1] * shape[2]):
                values = {name: f"{float(column[row, head, query]):.3f}" for name, column in flat.items()}
                place = {
                    "document": self.labels["document"],
                    "token": layer.counters.steps,
                    "layer": layer.index,
                    "head": head,
                }
                self.rows.append({"task": self.labels["task"], "length": self.labels["length"], **place, **values})


def _draw_gaussian(mean: Tensor, variance: Tensor, count: Tensor) -> Tensor:
    """`log A_bulk` of as many scores drawn from the Gaussian as the bulk has tokens."""
    generator = torch.Generator().manual_seed(0)
    deviation = variance.sqrt()
    found = torch.empty_like(mean)
    for index in torch.cartesian_prod(*map(torch.arange, mean.shape)).tolist():
        place = tuple(index)
        tokens = int(count.expand_as(mean)[place])
        draws = torch.randn(tokens, generator=generator, dtype=torch.float64) if tokens else torch.empty(0).double()
        found[place] = (float(mean[place]) + float(deviation[place]) * draws).logsumexp(0) if tokens else -torch.inf
    return found


class RecordingLM(QAdALM):
    """Full attention for every answer, every decision taken down, document by document.

    Args:
        pretrained: as for `HFLM`.
        keywords: as for `HFLM`.
    """

    def __init__(self, pretrained: str, **keywords: Any) -> None:
        # At threshold 1 every head reads everything, and the current prompt's moments are there to estimate with.
        super().__init__(pretrained, cache="qada", cache_threshold=1.0, cache_moments="current", **keywords)
        self.recorder = Recorder({})

    def _make_cache(self) -> QAdACache:
        cache = super()._make_cache()
        if hasattr(self, "recorder"):
            self.recorder.labels["document"] = self.recorder.labels.get("document", -1) + 1
            self.recorder.observe(cache)
        return cache


def main(arguments: list[str] | None = None) -> int:
    """Record; returns the exit status."""
    parser = make_parser("heads", __doc__)
    add = parser.add_argument
    add("--model", default=language_model.DEFAULT, help=language_model.HELP)
    add("--tasks", nargs="+", default=["prose_niah", "prose_fwe"], help="of lm-eval, generating (default: %(default)s)")
    add("--lengths", type=to_length, nargs="+", default=[4096], help="tokens (default: %(default)s)")
    add("--moments", nargs="+", choices=PROMPTS, default=["random-words", "single-word"], help="(default: %(default)s)")
    add("--limit", type=to_count, default=16, help="documents per task and length (default: %(default)s)")
    language_model.add_device(parser)
    add("--out", type=table_of("document", "head", "log_local", "iid"), required=True, help="CSV table to write")
    options = parser.parse_args(arguments)
    with language_model.check_loading(parser):
        language_model.read_config(options.model, tokens=max(options.lengths), latents=False)
        where, gguf = language_model.find_hflm_source(options.model)
        check_tasks(parser, options.tasks, options.model, options.lengths, options.limit)
        lm = RecordingLM(where, batch_size=1, device=options.device, **gguf)
    recorder = Recorder({kind: KeyMoments.collect(lm.model, lm.tokenizer, kind) for kind in options.moments})
    lm.recorder = recorder
    for task in options.tasks:
        for length in options.lengths:
            recorder.labels = {"task": task, "length": length}
            lm_eval.simple_evaluate(
                lm,
                tasks=[task],
                limit=options.limit,
                task_manager=find_task_manager(options.model, length, options.limit),
                bootstrap_iters=0,
                log_samples=False,
            )
    write(options.out, recorder.rows)
    print(f"wrote {options.out}: {len(recorder.rows)} decisions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
