"""Ways of deciding, tried on a pretrained model against full attention: `python -m eval.trials`.

    python -m eval.trials --tasks prose prose_niah --lengths 3072 --documents 12 --out trials.csv

Each document is read once, exactly. What follows it (prose, code: its own next tokens; a task: the answer that full
attention gives, greedily, as far as the expected one) is then fed to a copy of that state for every way of deciding,
with teacher forcing: KL divergence from full attention's next-token distributions, whether the likeliest token is the
same, and what was read. Where they are not all the same, the answer is generated, greedily, to see whether the expected
one is in it. One row a document and way; rows that the table holds are not measured again.
With `--prefill`, documents are read at each `prefill_threshold`, by selection, and compared with the same answers.
With `--peers`, so are caches that other methods made smaller (`eval/shared/peers.py`), which take part in nothing else.
"""

import argparse
import contextlib
import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from eval.shared.conversation import read_chats
from eval.shared.deciding import (
    NEARLY_ONE,
    WAY,
    compare,
    find_bulk_bits,
    find_sketch_share,
    find_token_options,
    follow,
    generate,
    has_own_reading,
    limit_reading,
    make_coded_cache,
    make_exact_cache,
    prefill,
    put_own_answer,
    split,
    summarize,
)
from eval.shared.language_model import DEFAULT, DTYPES, HELP, add_device, check_loading, label, load
from eval.shared.lm_tasks import check_tasks, find_task_manager
from eval.shared.peers import PEERS, SERVED, Prefilled
from eval.shared.sampled import read_as_gpus_do
from eval.shared.selecting import check_selected, find_prefill_threshold, list_prompt_ways
from eval.shared.tables import align, make_parser, read, table_of, text_file, to_amount, to_count, to_length, write
from eval.shared.texts import (
    CHAT,
    CODE,
    PROSE,
    Document,
    ask_as,
    is_continued,
    read_code,
    read_prose,
    read_task_documents,
)
from eval.shared.ways import (
    OWN,
    PROMPTS,
    Way,
    list_all_ways,
    list_few_ways,
    list_latent_ways,
    list_peer_ways,
    list_token_ways,
)
from qada_cache import CacheStats, KeyMoments, QAdACache
from qada_cache.key_moments.defaults import split_sources
from qada_cache.machine import describe_machine
from qada_cache.sketch import MIN_TOKENS
from qada_cache.state.layer import QAdALayer
from qada_cache.tuning import measuring

Known = dict[str, KeyMoments]  # by the prompt that they are of


def know(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ways: list[Way]) -> Known:
    """Key moments of the prompts that `ways` name."""
    prompts = [name for name in PROMPTS if any(name in way.moments.split("+") for way in ways)]
    return {name: KeyMoments.collect(model, tokenizer, name, progress=False) for name in prompts}


def make_cache_options(way: Way, known: Known) -> dict[str, Any]:
    """Options of `QAdACache` that make it decide by `way`."""
    options = {"criterion": "gaussian", "group_rule": way.rule, "moments": "current", "kernels": "auto"}
    options |= {"token_threshold": 0.0}
    options |= find_token_options(way.read)
    if way.criterion == "dense" and way.read.startswith(OWN):
        way = replace(way, criterion="qada", threshold=NEARLY_ONE)
    options["threshold"] = way.threshold
    if way.criterion != "qada":
        return options | {"criterion": way.criterion}
    current, other = split_sources(way.moments)
    moments = known[str(other)] if other else "current"
    return options | {"moments": ("current", moments) if current and other else moments}


def run_trial(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: Document,
    ways: list[Way],
    known: Known,
    bar: tqdm,
    cache: QAdACache | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each way, for one document; `cache`, which reads everything, may hold a beginning of it.

    Raises:
        ValueError: more tokens follow it than one query-adaptive call takes.
    """
    cache = make_exact_cache(model) if cache is None else cache
    exact = {"criterion": "dense", "moments": "current"}
    following = document.following.shape[1]
    if following > cache.options.window:
        raise ValueError(f"{following} tokens follow the text: more than one query-adaptive call takes")
    prefill(model, document, cache)
    keys = next(layer.store.near_keys for layer in cache.layers if isinstance(layer, QAdALayer) and layer.store)
    value_bytes = keys.element_size()
    right = False
    if document.expected:
        document, right = put_own_answer(model, tokenizer, document, cache.fork(**exact))
    full = follow(model, document, cache.fork(**exact))
    peers = [way for way in ways if way.criterion in PEERS]
    state = Prefilled(model, document.text, cache.options.local_tokens) if peers else None

    def judge(followed: Tensor, write_answer: Callable[[], Tensor]) -> dict[str, str]:
        scores = compare(full, followed)
        contained = right
        if document.expected and scores["same"] == "0":
            contained = document.expected in tokenizer.decode(write_answer()[0])
        return scores | {"right": str(int(right)), "found": str(int(contained))}

    def try_on(make: Callable[[], DynamicCache], *, at_once: bool) -> tuple[DynamicCache, dict[str, str]]:
        followed = follow(model, document, used := make(), at_once=at_once)
        return used, judge(followed, lambda: generate(model, document, make()))

    plain = DynamicCache(config=model.config)
    sizes = {"sinks": cache.options.sink_tokens, "window": cache.options.window}
    caches = {(16, 0.0): cache}  # that have read the document, by bits of the bulk and `prefill_threshold`
    for way in ways:
        if way in peers:
            judged = judge(state.follow(document, way), partial(state.generate, document, way))
            shares = {"kv_read": 1.0, "bytes_read": state.count_bytes_read(way), "q_local": 0.0}
        elif has_own_reading(way):
            prefill(model, document, plain)  # once
            with limit_reading(model, way.read, **sizes):
                _, judged = try_on(partial(copy.deepcopy, plain), at_once=True)
            kind, share = split(way.read)
            read = share + find_sketch_share(kind)  # every head's sketch
            shares = {"kv_read": 1.0, "bytes_read": read, "q_local": 0.0}
        else:
            deciding = make_cache_options(way, known)
            bits, theta = form = find_bulk_bits(way.read), find_prefill_threshold(way.read)
            if form not in caches:
                options = {"bulk_bits": bits, "prefill_threshold": theta, "moments": deciding["moments"]}
                caches[form] = make_exact_cache(model, **options) if bits == 16 else make_coded_cache(model, **options)
                prefill(model, document, caches[form])
                check_selected(caches[form])
            fork, judged = try_on(partial(caches[form].fork, **deciding), at_once=not way.read.startswith(OWN))
            stats = fork.stats()
            share = count_bytes_read(way, stats, value_bytes, bits)
            # Records have the same bytes in any dtype; fewer tokens lie in none.
            if bits < 16 and value_bytes != 2 and document.text.shape[1] < MIN_TOKENS + cache.options.local_tokens:
                share = math.nan
            shares = {"kv_read": 1 - stats.kv_sparsity, "bytes_read": share}
            shares["q_local"] = stats.sparsity
        yield asdict(way) | judged | {name: f"{share:.4f}" for name, share in shares.items()}
        bar.update()


def make_key(row: dict[str, Any]) -> tuple:
    """The columns that identify a row: its way and document."""
    return tuple(str(row.get(name, "")) for name in (*WAY, "document"))


def count_bytes_read(way: Way, stats: CacheStats, value_bytes: int, bits: int) -> float:
    """The share of the bulk's bytes that is read, with those of the sketch, as if values had `VALUE_BITS`."""
    if way.read.startswith(OWN):
        return measuring.count_bytes_read(stats, value_bytes, bits)
    return 1 - stats.kv_sparsity


def read_documents(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, task: str, length: int
) -> Iterator[Document]:
    """The documents of a task that the command line names."""
    if is_continued(task):
        sizes = {"length": length, "following": options.following}
        # Every fourth piece of prose was set apart once, to learn from; tables go on with the texts that they have.
        pieces = (piece for piece in read_prose(tokenizer, **sizes, text=options.text) if piece.index % 4 != 3)
        return islice(read_code(tokenizer, **sizes) if task == CODE else pieces, options.documents)
    if task == CHAT:
        return read_chats(tokenizer, length=length, count=options.documents)
    manager = find_task_manager(options.model, length, options.documents)
    return read_task_documents(task, tokenizer, length=length, count=options.documents, manager=manager)


def check_lengths(
    parser: argparse.ArgumentParser, options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> None:
    """End the program if a task has no document of one of the lengths."""
    for task, length in itertools.product(options.tasks, options.lengths):
        try:
            if next(read_documents(options, tokenizer, task, length), None) is None:
                parser.error(f"--lengths: no text has {length} tokens and {options.following} after them")
        except ValueError as error:
            parser.error(f"--tasks {task} --lengths {length}: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Try; returns the exit status."""
    parser = make_parser("trials", __doc__)
    add = parser.add_argument
    add("--model", default=DEFAULT, help=HELP)
    tasks = f"{PROSE}, {CODE}, {CHAT}, lm-eval tasks of one answer (default: {PROSE})"
    add("--tasks", nargs="+", default=[PROSE], help=tasks)
    add("--lengths", type=to_length, nargs="+", default=[3072], help="tokens (default: %(default)s)")
    add("--documents", type=to_count, default=12, help="of each task and length (default: %(default)s)")
    add("--following", type=to_count, default=64, help="tokens to predict of prose and code (default: %(default)s)")
    question = "whether a task's question is read exactly, as the text is, or sparsely (default: dense)"
    add("--question", choices=("sparse", "dense"), nargs="+", default=["dense"], help=question)
    add("--text", type=text_file, help="text file for prose (default: the Python language reference)")
    add("--few", action="store_true", help="only those ways that tell most")
    add("--tokens", action="store_true", help="ways of reading some of a head's tokens only")
    add("--own", action="store_true", help="with --tokens: the default and the economical settings alone")
    add("--latents", action="store_true", help="ways of reading some of the tokens of latent attention only")
    add("--bits", type=int, nargs="+", default=[16], choices=(16, 8, 4), help="of bulks (default: 16)")
    add("--prefill", type=to_amount, nargs="+", default=[], help="prefill_thresholds (0: exact); no other way")
    add("--sampled", action="store_true", help="with --prefill, as GPUs read them")
    add("--peers", action="store_true", help="other methods, to compare with: caches that evict, or of few bits")
    add("--dtype", choices=DTYPES, default="auto", help="(default: the model's own)")
    add_device(parser)
    judged = "document", "kl", "top1", "right", "found", "kv_read", "q_local"  # which `summarize` reads
    add("--out", type=table_of(*WAY, *judged), required=True, help="CSV table, added to if it exists")
    options = parser.parse_args(arguments)
    with check_loading(parser):
        if named := [task for task in options.tasks if task != CHAT and not is_continued(task)]:
            check_tasks(parser, named, options.model, options.lengths, options.documents)
        plain, longest = not (options.prefill or options.peers), max(options.lengths)
        where = {"dtype": options.dtype, "device": options.device}
        model, tokenizer = load(options.model, **where, tokens=longest, latents=plain)
    if options.peers and model.config.model_type not in SERVED:
        parser.error(f"--peers: other methods are tried on models of type {', '.join(SERVED)} alone")
    check_lengths(parser, options, tokenizer)
    with check_loading(parser):  # a tokenizer may not know the words of our prompts
        known = know(model, tokenizer, choose_ways(options))
    with read_as_gpus_do() if options.sampled else contextlib.nullcontext():
        run(options, model, tokenizer, known)
    print(align(summarize(read(options.out))))
    return 0


def choose_ways(options: argparse.Namespace) -> list[Way]:
    """The ways that the command line names."""
    peers = list_peer_ways() if options.peers else []
    if options.prefill:
        return [*list_prompt_ways(options.prefill, bits=options.bits), *peers]
    if options.latents:
        return list_latent_ways()
    if options.tokens:
        return [*list_token_ways(few=options.few, own=options.own, bits=options.bits), *peers]
    return [*list_few_ways(), *peers] if options.few else peers or list_all_ways()


def run(options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, known: Known) -> None:
    """Measure all rows that the table lacks."""
    done = {make_key(row) for row in read(options.out)} if options.out.exists() else set()
    ways, columns = choose_ways(options), {"model": label(options.model)}
    protocols = sum(1 if is_continued(task) else len(set(options.question)) for task in options.tasks)
    with tqdm(total=protocols * len(options.lengths) * options.documents * len(ways), unit="row") as bar:
        for task in options.tasks:
            for length in options.lengths:
                bar.set_postfix_str(f"{task}, {length} tokens")
                for document in read_documents(options, tokenizer, task, length):
                    cache = make_exact_cache(model)
                    for asked in ask_as(document, options.question):
                        place = {"task": asked.task, "length": length, "document": asked.index}
                        missing = [way for way in ways if make_key(columns | place | asdict(way)) not in done]
                        bar.update(len(ways) - len(missing))
                        if missing:
                            trial = run_trial(model, tokenizer, asked, missing, known, bar, cache)
                            rows = [place | row for row in trial]
                            write(options.out, rows, add=True, **columns, machine=describe_machine())


if __name__ == "__main__":
    sys.exit(main())
