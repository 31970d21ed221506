"""lm-eval's `HFLM` with every token it scores or generates read through a QAdACache.

`lm_eval --model hf --model_args pretrained=...,cache=qada`, or `--model hf-qada`.
"""

import atexit
import functools
import inspect
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import lm_eval.evaluator
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from qada_cache import CacheStats, QAdACache, StaticHeads, prepare, tuned_choice
from qada_cache.prefix_store.filling import keep_as_made
from qada_cache.tuned_choice import Thresholds
from qada_cache.versions import pass_cache

from . import scoring
from .beginnings import Beginnings

logger = logging.getLogger(__name__)

NOT_MEASURED = "N/A"  # lm-eval's own word for it: no token had a bulk to decide about
# "qada" is the model's default, which for latents is to read all of them.
CRITERIA = {"qada": None} | {name: name for name in ("gaussian", "oracle", "static", "local", "dense")}
# `QAdACache`'s own keywords, so that an option added there is one here; the criterion is what `cache=` names.
_NAMES = (*inspect.signature(QAdACache).parameters, "heads")
KEYWORDS = tuple(f"cache_{name}" for name in (*_NAMES, "store") if name not in ("model", "config", "criterion"))


def split_arguments(cache: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split model arguments into keywords of `QAdACache` and those of `HFLM`; `cache` is one of `CRITERIA`.

    Arguments that start with `cache_` are the cache's, but for transformers' `cache_dir`. ValueError, if `cache` or
    `cache_*` is unknown, or `cache_heads` missing or out of place; FileNotFoundError, if that file is not there.
    """
    if cache not in CRITERIA:
        raise ValueError(f"unknown cache={cache}: use one of {', '.join(CRITERIA)}")
    rest, options = {}, {}
    for name, value in arguments.items():
        if not name.startswith("cache_") or name == "cache_dir":
            rest[name] = value
        elif name in KEYWORDS:
            options[name.removeprefix("cache_")] = value
        else:
            raise ValueError(f"unknown {name}={value}: use one of {', '.join(KEYWORDS)}")
    heads = options.pop("heads", None)
    if (cache == "static") != (heads is not None):
        raise ValueError("cache=static needs cache_heads=FILE, written by StaticHeads.save, and only it takes one")
    criterion = CRITERIA[cache] if heads is None else StaticHeads.load(heads)
    return {"criterion": criterion, **options}, rest


def make_metrics(batches: Sequence[CacheStats]) -> dict[str, Any]:
    """Entries of lm-eval's results for one task, from the caches of its batches; its table has them beside scores."""

    def average(share: str, *, weight: str) -> Any:
        weighed = [each for each in batches if getattr(each, weight)]  # the shares of others are nan
        whole = sum(getattr(each, weight) for each in weighed)
        return sum(getattr(each, share) * getattr(each, weight) for each in weighed) / whole if whole else NOT_MEASURED

    return {
        "cache_sparsity,none": average("sparsity", weight="decisions"),
        "cache_kv_sparsity,none": average("kv_sparsity", weight="decisions"),
        "cache_read_share,none": average("read_share", weight="dense_bulk_bytes"),
        "cache_bulk_read_bytes,none": sum(each.bulk_read_bytes for each in batches),
        "cache_streamed_bytes,none": sum(each.streamed_bytes for each in batches),
        "cache_device_bytes,none": max(each.device_bytes for each in batches),
        "cache_host_bytes,none": max(each.host_bytes for each in batches),
    }


def _count_responses(tasks: Mapping[str, Any]) -> Counter[str]:
    """How many responses of a model these tasks, by name or in groups, take, by their names."""
    counted: Counter[str] = Counter()
    for each in tasks.values():
        if isinstance(each, Mapping):
            counted += _count_responses(each)
        for request in getattr(each, "instances", None) or ():
            counted[request.task_name] += request.repeats
    return counted


_evaluate = lm_eval.evaluator.evaluate


@functools.wraps(_evaluate)
def _evaluate_and_report(*args: Any, **kwargs: Any) -> Any:
    lm = kwargs["lm"] if "lm" in kwargs else args[0]
    totals = getattr(lm, "cache_totals", None)  # through lm-eval's CachingLM as well
    if totals is None:
        return _evaluate(*args, **kwargs)
    totals.clear()
    lm.saved_tokens.clear()
    lm.responses.clear()
    results = _evaluate(*args, **kwargs)
    expected = _count_responses(kwargs["task_dict"] if "task_dict" in kwargs else args[1])
    gathered, saved = lm.gather_object(totals), lm.gather_object(lm.saved_tokens)
    resumed = sum(lm.gather_object(expected - lm.responses) or (), Counter[str]())
    if results is not None:
        tuned, computed = {"cache_tuned,none": lm.cache_tuned} if lm.cache_tuned else {}, set().union(*gathered)
        for task in results["results"].keys() & computed:
            results["results"][task] |= make_metrics([each for part in gathered for each in part.get(task, [])]) | tuned
            if lm.beginnings is not None:
                results["results"][task]["cache_saved_tokens,none"] = sum(part[task] for part in saved)
        if kept := sorted(results["configs"].keys() - computed):
            logger.warning(
                f"nothing was computed for {', '.join(kept)}, as lm-eval had kept all responses (use_cache): there is "
                "nothing to report of QAdACache"
            )
        if parts := [f"{count} of {name}" for name, count in sorted(resumed.items()) if name in computed]:
            logger.warning(
                f"lm-eval had kept {', '.join(parts)} responses (use_cache): what is reported of QAdACache is of the "
                "others alone"
            )
    return results


# lm-eval asks the model for nothing that ends up with a task's results.
lm_eval.evaluator.evaluate = _evaluate_and_report


class QAdALM(HFLM):
    """An `HFLM` that prefills prompts exactly, and decodes or scores answers query-adaptively.

    The last token of a prompt counts as part of the answer: its query yields the answer's first token. Otherwise that
    token, and a whole one-token answer, would be full attention's. A text scored from its start
    (`loglikelihood_rolling`) has no prompt: all of it is query-adaptive. (By the current prompt's moments alone, not
    updated, nothing is known then: every head reads everything.)

    Args:
        pretrained: as for `HFLM`.
        cache: one of `CRITERIA`.
        keywords: `cache_*` are the cache's (see `split_arguments`); `cache_store` is a folder of a `PrefixStore`, which
            what prompts begin with is taken from; all others are `HFLM`'s.

    Raises:
        ValueError, TypeError: an argument the cache cannot take, or a store under mixed precision.
        RuntimeError: one of several processes on CPUs, and accelerate was not told so.
        NotImplementedError: a model the cache does not support.
    """

    def __init__(self, pretrained: Any, *positional: Any, cache: str = "qada", **keywords: Any) -> None:
        store = keywords.pop("cache_store", None)
        if isinstance(store, bool) or store == "" or os.path.isfile(str(store)):  # as lm-eval reads what it is given
            raise ValueError(f"cache_store takes a folder, got {store!r}")
        options, keywords = split_arguments(cache, keywords)
        options = options if store is None else keep_as_made(options)
        super().__init__(pretrained, *positional, **keywords)
        if self.device.type == "cpu" and hasattr(self, "accelerator"):  # `HFLM` shares requests on GPUs alone
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
            if self._world_size > 1:  # gloo's threads abort a process that ends before them
                atexit.register(self.accelerator.state.destroy_process_group)
        elif self.device.type == "cpu" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise RuntimeError(
                "every process would run all requests, as accelerate takes this one to be alone: on CPUs, set "
                "ACCELERATE_USE_CPU=true for all of them"
            )
        # A wrong option or model is refused before any request. The tokenizer need not be the one beside the model.
        prepare(self.model, self.tokenizer, **options)
        taken = (first := QAdACache(self.model, **options)).options
        self.cache_tuned = tuned_choice.describe(taken) if taken.tuned else ""  # the setting that these caches take
        # All caches of a run go by one setting, whatever `qada tune` keeps meanwhile.
        setting = asdict(Thresholds.of(taken))
        if taken.tuned:
            setting |= {name: getattr(taken, name) for name in tuned_choice.LEFT_OPEN}
        self._cache_options = {"progress": True} | options | setting | {"tuned": False}
        if store is not None and self.mixed_precision_dtype is not None:
            raise ValueError(f"cache_store={store} keeps keys in the model's dtype: give dtype=, no mixed precision")
        self._change, self._alone = scoring.find_change(self.model), scoring.reads_by_column(first)
        self._first_position = scoring.find_first_position(self.model)
        self.beginnings = None if store is None else Beginnings(str(store), self.model, self._cache_options)
        self.saved_tokens: Counter[str] = Counter()  # by task: of prompts, those that were stored
        # By task: statistics of its caches in this process, at the end of their batches, shares as means.
        self.cache_totals: dict[str, list[CacheStats]] = {}
        self.responses: Counter[str] = Counter()  # by task: those that this process computed
        self._task = "none"

    def _run_by_task(self, name: str, requests: list[Instance], disable_tqdm: bool = False) -> list:
        """`HFLM`'s method `name`, task by task: no cache serves two tasks, so its counters are one task's. A process
        that shares requests with others runs its own alone, and not the repeated ones that lm-eval adds: those are for
        models that compute together, and would be counted."""
        tasks: dict[str | None, list[int]] = {}
        seen: Counter[int] = Counter()
        for place, request in enumerate(requests):
            seen[id(request)] += 1
            if seen[id(request)] <= (request.repeats or len(requests)):
                tasks.setdefault(request.task_name, []).append(place)
        results: dict[int, Any] = {}
        processes, self._world_size = self._world_size, 1
        try:
            for task, places in tasks.items():
                self._task = task or "none"  # requests made by hand need not name one
                answers = getattr(super(), name)([requests[place] for place in places], disable_tqdm=disable_tqdm)
                results.update(zip(places, answers, strict=True))
                self.responses[self._task] += len(places)
        finally:
            self._world_size = processes
        answered = {id(requests[place]): answer for place, answer in results.items()}
        return [results.get(place, answered[id(request)]) for place, request in enumerate(requests)]

    loglikelihood = functools.partialmethod(_run_by_task, "loglikelihood")
    loglikelihood_rolling = functools.partialmethod(_run_by_task, "loglikelihood_rolling")
    generate_until = functools.partialmethod(_run_by_task, "generate_until")

    def _make_cache(self) -> QAdACache:
        return QAdACache(self.model, **self._cache_options)

    def _read_prompt(self, ids: Tensor, mask: Tensor, first_position: int = 0) -> QAdACache:
        """A cache that has read the token ids `[rows, tokens]`, exactly, or holds them from the store."""
        if self.beginnings is None or not ids.shape[1]:
            cache, begun, saved = self._make_cache(), 0, 0
        else:
            cache, saved = self.beginnings.make_cache(ids, mask)
            begun = cache.get_seq_length()
        if begun < ids.shape[1]:
            self._forward(cache, ids[:, begun:], mask, first_position, logits_to_keep=1)
        if self.beginnings is not None and ids.shape[1]:
            self.beginnings.keep(cache, ids, mask, saved)
            self.saved_tokens[self._task] += saved
        return cache

    def _count(self, stats: CacheStats) -> None:
        means = replace(stats, local_share=stats.local_share.mean(), kv_local_share=stats.kv_local_share.mean())
        self.cache_totals.setdefault(self._task, []).append(means)

    @torch.no_grad()
    def _forward(self, cache: QAdACache, ids: Tensor, mask: Tensor, first_position: int = 0, **options: Any) -> Tensor:
        """Log-probabilities `[rows, tokens, vocabulary]` after each of the new tokens `ids` `[rows, tokens]`. The
        `mask` `[rows, cached + tokens]` is 0 at padding. Positions are given: by itself the model counts padding, and
        begins with a `first_position` that `generate`, which gives them too, does not know."""
        positions = first_position + (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        precision = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=precision, enabled=precision is not None):
            logits = self.model(
                ids, attention_mask=mask, position_ids=positions, **pass_cache(cache), use_cache=True, **options
            ).logits
        return torch.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        # generate() itself decodes the one token that is left, which is no chunk of a prompt: these are exact
        generation_kwargs["prefill_chunk_size"] = None
        cache = self._read_prompt(context[:, :-1], generation_kwargs["attention_mask"][:, :-1])
        if context.shape[1] > 1:
            beams = generation_kwargs.get("num_beams") or self.model.generation_config.num_beams or 1
            if beams > 1:  # generate() repeats the rows of a prompt, not those of a cache
                cache.reorder_cache(torch.LongTensor([row for row in range(len(context)) for _ in range(beams)]))
        tokens = super()._model_generate(context, max_length, stop, **pass_cache(cache), **generation_kwargs)
        self._count(cache.stats(gather=True))
        return tokens

    def _detect_batch_size(self, requests: Sequence | None = None, pos: int = 0) -> int:
        """As `HFLM`, but not again for texts that are shorter than earlier ones, by at most a half."""
        tokens = min(len(requests[pos][1] + requests[pos][2]) - 1, self.max_length) if requests else self.max_length
        known = [size for length, size in self.batch_sizes.items() if tokens <= length <= 2 * tokens]
        if not known:
            self.batch_sizes[tokens] = super()._detect_batch_size(requests, pos)
        return max(known) if known else self.batch_sizes[tokens]

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None) -> list:
        pairs = [(context, continuation) for _, context, continuation in requests]
        rows = scoring.make_rows(pairs, self.max_length, self._change)

        def choose_size(start: int, most: Sequence[int]) -> int:
            size = 1 if self._alone else override_bs or self.batch_size
            if size != "auto":
                return size
            part = len(most) / self.batch_schedule  # of the rows, which take one size: N of them for "auto:N"
            return self._detect_batch_size([(None, [0] * most[int(start // part * part)], [0])])

        batches = scoring.make_batches(rows, choose_size, self._change)
        answers: list[Any] = [None] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        with bar:
            forward = functools.partial(self._forward, first_position=self._first_position)
            prefill = functools.partial(self._read_prompt, first_position=self._first_position)
            for stats, scores in scoring.score(batches, forward, prefill, self.device):
                self._count(stats)
                for index, log_likelihood, greedy in scores:
                    answers[index] = (log_likelihood, greedy)
                    if requests[index][0] is not None:  # None for the windows of a longer text
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], answers[index])
                bar.update(len(scores))
        return answers
