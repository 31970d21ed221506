"""Scores against sparsity on lm-eval tasks, for every way of deciding: `python -m eval.sweep`.

    python -m eval.sweep --tasks prose_niah prose_vt --lengths 1024 4096 --limit 16 --out sweep.csv
    python -m eval.sweep --model ID_OR_PATH --tasks ruler_vt ruler_fwe --lengths 8192 16384 --out sweep.csv

Criteria x thresholds x moments x group rules x tasks x lengths, in one tidy table, a row for each. A prompt is read
once for each `--prefill` and `--bits`, and all that is left to measure of its task and length answers it from a copy of
that state. Rows that the table holds already are not measured again, so a sweep may be interrupted, and widened later.
Tasks must be generation tasks.
"""

import argparse
import itertools
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from eval.shared import language_model
from eval.shared.lm_tasks import check_tasks, make_task_manager
from eval.shared.selecting import check_selected
from eval.shared.tables import make_parser, read, table_of, to_amount, to_count, to_length, to_share, write
from qada_cache import QAdACache, StaticHeads
from qada_cache.criterion import GROUP_RULES
from qada_cache.key_moments.defaults import DEFAULT_MOMENTS
from qada_cache.lm_eval import QAdALM
from qada_cache.machine import describe_machine
from qada_cache.state import THRESHOLD, TOKEN_THRESHOLD
from qada_cache.tuning.measuring import count_bytes_read
from qada_cache.versions import pass_cache

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.995)  # the paper's
ALPHAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6)
ORACLE = 0.6  # the threshold that static heads are found with


@dataclass(frozen=True)
class Variant:
    """One way of deciding: a row of the table, but for its results.

    Args:
        criterion: "qada", "oracle", "static oracle" (heads found on the task itself), "static other" (on the other
            tasks of the sweep), "dense", "local"; "selected": the cache's defaults, by which heads read some tokens.
        moments: for "qada" and "selected": as for `QAdACache`.
        group_rule: as for `QAdACache`.
        threshold: as for `QAdACache`; for static criteria alpha, the share of heads made local.
        prefill: `prefill_threshold` that the prompt is read with.
        bits: of the bulk, `bulk_bits`.
    """

    criterion: str
    moments: str = ""
    group_rule: str = "head"
    threshold: float = 0.0
    prefill: float = 0.0
    bits: int = 16


def list_variants(options: argparse.Namespace) -> list[Variant]:
    """The variants that the command line names, and always full attention and sinks + window."""
    variants = [Variant("dense"), Variant("local")]
    for theta, bits in itertools.product(options.prefill, options.bits):
        variants += [Variant("dense", prefill=theta, bits=bits)] * (theta > 0)
        variants += [Variant("selected", DEFAULT_MOMENTS, "any", THRESHOLD, theta, bits)] * options.tokens
    for rule in options.group_rules:
        variants += [Variant("oracle", "", rule, threshold) for threshold in options.thresholds]
        variants += [Variant("qada", kind, rule, tau) for kind in options.moments for tau in options.thresholds]
    variants += [Variant(f"static {heads}", "", "head", alpha) for heads in options.static for alpha in options.alphas]
    return variants


class SweepLM(QAdALM):
    """A `QAdALM` that reads each prompt once for all variants with the same `prefill` and `bits`, and generates every
    variant's answer then. Later calls with the prompt return the stored answer of `shown`.

    Args:
        pretrained, gguf_file, keywords: as for `HFLM`.

    Attributes:
        measured: cache options by variant; all variants generate when a prompt is first met.
        shown: the variant whose answers `_model_generate` returns.
        kept: generated tokens and statistics of the cache, by prompt and variant.
        heads: by variant, the share of decisions in which each head was local, and the number of decisions.
    """

    def __init__(self, pretrained: str, *, gguf_file: str | None = None, **keywords: Any) -> None:
        super().__init__(pretrained, cache="dense", gguf_file=gguf_file, **keywords)
        self.gguf_file = gguf_file
        self.measured: dict[Variant, dict[str, Any]] = {}
        self.shown: Variant | None = None
        self.kept: dict[bytes, dict[Variant, tuple[Tensor, Any]]] = {}
        self.heads: dict[Variant, tuple[Tensor, int]] = {}

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        key = context.cpu().numpy().tobytes()
        if key not in self.kept:
            self.kept[key] = {}
            mask, caches = generation_kwargs["attention_mask"], {}
            for variant, options in self.measured.items():
                if (way := (variant.prefill, variant.bits)) not in caches:
                    # A cache that selects or codes tokens needs the queries' energies, which default moments have.
                    moments = "current" if way == (0.0, 16) else DEFAULT_MOMENTS
                    whole = {"moments": moments, "token_threshold": 0.0}  # heads are read whole
                    caches[way] = QAdACache(self.model, **whole, prefill_threshold=way[0], bulk_bits=way[1])
                    self._forward(caches[way], context[:, :-1], mask[:, :-1], logits_to_keep=1)
                    check_selected(caches[way])
                fork = caches[way].fork(**options)
                # HFLM's own: QAdALM's would prefill again.
                tokens = HFLM._model_generate(self, context, max_length, stop, **pass_cache(fork), **generation_kwargs)
                stats = fork.stats()
                self.kept[key][variant] = tokens, stats
                if stats.decisions:
                    share, count = self.heads.get(variant, (0.0, 0))
                    total = count + stats.decisions
                    self.heads[variant] = (share * count + stats.local_share * stats.decisions) / total, total
        assert self.shown is not None
        tokens, stats = self.kept[key][self.shown]
        self._count(stats)
        return tokens


def evaluate(lm: SweepLM, task: str, length: int, limit: int | None) -> dict[str, Any]:
    """lm-eval's results for the variant `lm.shown`: its score, and the shares of local heads."""
    results = lm_eval.simple_evaluate(
        lm,
        tasks=[task],
        limit=limit,
        task_manager=make_task_manager(lm.pretrained, length, lm.gguf_file, limit),
        bootstrap_iters=100,  # not 0, which would keep back the standard errors that need no bootstrap
        log_samples=False,
        confirm_run_unsafe_code=True,
    )["results"][task]
    numbers = {name.split(",")[0]: value for name, value in results.items() if isinstance(value, (int, float))}
    local, kv_local = numbers.get("cache_sparsity"), numbers.get("cache_kv_sparsity")
    scores = {name: value for name, value in numbers.items() if not name.startswith("cache_") and "stderr" not in name}
    scores.pop("sample_len", None)
    metric = str(length) if str(length) in scores else next(iter(scores))
    error = numbers.get(f"{metric}_stderr")  # lm-eval gives none of RULER's scores
    return {
        "metric": metric,
        "score": f"{scores[metric]:.4f}",
        "score_stderr": "" if error is None else f"{error:.4f}",
        "q_heads_local": "" if local is None else f"{local:.4f}",
        "kv_heads_local": "" if kv_local is None else f"{kv_local:.4f}",
    }


def measure(
    lm: SweepLM, options: argparse.Namespace, wanted: dict[Variant, dict[str, Any]], task: str, length: int
) -> list[dict[str, Any]]:
    """Rows for variants, given with their cache options, of one task and length."""
    lm.kept, lm.heads, lm.measured = {}, {}, wanted
    rows = []
    for variant in wanted:
        lm.shown = variant
        results = evaluate(lm, task, length, options.limit)
        stats, sizes = [ways[variant][1] for ways in lm.kept.values()], (lm.model.dtype.itemsize, variant.bits)
        # Some prompts may be sinks and window alone.
        read = [count_bytes_read(each, *sizes) for each in stats if each.dense_bulk_bytes]
        results["bytes_read"] = f"{sum(read) / len(read):.4f}"
        rows.append({"task": task, "length": length, **asdict(variant), "documents": len(lm.kept), **results})
    return rows


def make_cache_options(variant: Variant) -> dict[str, Any]:
    """Keywords of `QAdACache`."""
    options: dict[str, Any] = {"group_rule": variant.group_rule, "threshold": variant.threshold}
    if variant.criterion == "selected":
        options["token_threshold"] = TOKEN_THRESHOLD
    if variant.moments:
        return {"moments": variant.moments, **options}
    return {"criterion": variant.criterion, **options, "moments": "current"}


def measure_static(lm: SweepLM, options: argparse.Namespace, done: set, bar: tqdm) -> None:
    """Static heads, found by an oracle pass over each task and length, then measured like the rest."""
    cells = [(task, length) for task in options.tasks for length in options.lengths]
    kinds = [heads for heads in options.static if heads == "oracle" or len(set(options.tasks)) > 1]
    wanted = {Variant(f"static {heads}", "", "head", alpha): heads for heads in kinds for alpha in options.alphas}
    missing = {cell: [variant for variant in wanted if (*cell, variant) not in done] for cell in cells}
    bar.update(len(cells) * len(options.static) * len(options.alphas))
    if not any(missing.values()):
        return
    oracle, shares = Variant("oracle", "", "head", ORACLE), {}
    for task, length in cells:
        measure(lm, options, {oracle: make_cache_options(oracle)}, task, length)
        shares[task, length] = lm.heads[oracle][0]
    for (task, length), missing_variants in missing.items():
        others = [share for (other, _), share in shares.items() if other != task]
        local_shares = {"oracle": shares[task, length], "other": sum(others) / max(len(others), 1)}
        measured = {
            variant: {
                "criterion": StaticHeads.from_oracle(local_shares[wanted[variant]], variant.threshold),
                "moments": "current",
            }
            for variant in missing_variants
        }
        if measured:
            write(options.out, measure(lm, options, measured, task, length), add=True, machine=describe_machine())


def read_known(path: Path) -> set[tuple[str, int, Variant]]:
    """Task, length and variant of each row in the table."""
    rows = read(path) if path.exists() else []
    variants = [
        Variant(row["criterion"], row["moments"], row["group_rule"], float(row["threshold"]), **_find_reading(row))
        for row in rows
    ]
    return {(row["task"], int(row["length"]), variant) for row, variant in zip(rows, variants, strict=True)}


def _find_reading(row: dict[str, str]) -> dict[str, Any]:
    """`prefill` and `bits` of a row. Older tables lack these columns: 0 and 16."""
    return {"prefill": float(row.get("prefill") or 0), "bits": int(row.get("bits") or 16)}


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep; returns the exit status."""
    parser = make_parser("sweep", __doc__)
    add = parser.add_argument
    add("--model", default=language_model.DEFAULT, help=language_model.HELP)
    add("--tasks", nargs="+", default=["prose_niah"], help="lm-eval generation tasks (default: %(default)s)")
    add(
        "--lengths",
        type=to_length,
        nargs="+",
        default=[4096],
        help="tokens, of tasks that take them (default: %(default)s)",
    )
    add("--moments", nargs="+", default=[DEFAULT_MOMENTS], help="(default: %(default)s)")
    add("--group-rules", nargs="+", default=["any"], choices=GROUP_RULES, help="(default: %(default)s)")
    add("--thresholds", type=to_share, nargs="*", default=list(THRESHOLDS), help="(default: the paper's twelve)")
    add("--static", nargs="*", default=["oracle"], choices=("oracle", "other"), help="(default: %(default)s)")
    add("--alphas", type=to_share, nargs="*", default=list(ALPHAS), help="of static heads (default: the paper's)")
    add("--tokens", action="store_true", help="the cache's defaults, too, by which heads read some tokens only")
    add("--prefill", type=to_amount, nargs="+", default=[0.0], help="prefill_threshold of prompts (default: 0, exact)")
    add("--bits", type=int, nargs="+", default=[16], choices=(16, 8, 4), help="of bulks (default: 16)")
    add("--limit", type=to_count, help="documents per task and length (default: all that the task has)")
    add("--batch-size", default="1", help="as lm-eval's (default: %(default)s)")
    add("--dtype", choices=language_model.DTYPES, default="auto", help="(default: the model's own)")
    language_model.add_device(parser)
    known = table_of("task", "length", "criterion", "moments", "group_rule", "threshold")  # what `read_known` reads
    add("--out", type=known, required=True, help="CSV table, added to if it exists")
    options = parser.parse_args(arguments)
    done, wanted = read_known(options.out), list_variants(options)
    with language_model.check_loading(parser):
        language_model.read_config(options.model, tokens=max(options.lengths))
        pretrained, gguf = language_model.find_hflm_source(options.model)
        check_tasks(parser, options.tasks, options.model, options.lengths, options.limit)
        loaded = gguf if options.dtype == "auto" else gguf | {"dtype": options.dtype}
        lm = SweepLM(pretrained, **loaded, batch_size=options.batch_size, device=options.device)
    normal = [variant for variant in wanted if not variant.criterion.startswith("static")]
    try:
        for variant in normal:  # before minutes of measuring
            QAdACache(lm.model, **make_cache_options(variant))
    except (OSError, ValueError, NotImplementedError) as error:
        parser.error(str(error))
    with tqdm(total=len(wanted) * len(options.tasks) * len(options.lengths), unit="row") as bar:
        for task in options.tasks:
            for length in options.lengths:
                bar.set_postfix_str(f"{task} {length}")
                missing = {
                    variant: make_cache_options(variant) for variant in normal if (task, length, variant) not in done
                }
                if missing:
                    write(
                        options.out, measure(lm, options, missing, task, length), add=True, machine=describe_machine()
                    )
                bar.update(len(normal))
        if options.static:
            measure_static(lm, options, done, bar)
    return 0


if __name__ == "__main__":
    sys.exit(main())
