"""Ways of deciding, tried on a pretrained model against full attention: `python -m eval.trials`.

    python -m eval.trials --tasks prose prose_niah --lengths 3072 --documents 12 --out trials.csv

Each document is read once, exactly. What follows it (prose: its own next tokens; a task: the answer that full attention
gives, greedily, as far as the expected one) is then fed in one query-adaptive call to a copy of that state for every
way of deciding, with teacher forcing: KL divergence from full attention's next-token distributions, whether the
likeliest token is the same, and what was read. Where they are not all the same, the answer is generated, greedily,
to see whether the expected one is in it. One row a document and way; rows that the table holds are not measured again.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.deciding.tokens import OWN, VALUE_BITS, reading, sketch_share, split, token_options
from eval.deciding.trial_summary import summary
from eval.deciding.ways import PROMPTS, Knowledge, Way, all_ways, deciding, experiments, few_ways, token_ways
from eval.models.language_model import DEFAULT, HELP, hflm_source, label, load
from eval.reporting.machine import machine
from eval.reporting.tables import plain, read, write
from eval.sweep import ORACLE, task_manager
from eval.texts.documents import PROSE, Document, prose, task_documents, with_dense_question
from qada_cache import CacheStats, KeyMoments, QAdACache, StaticHeads
from qada_cache.attention import decide, decode
from qada_cache.criterion import GROUP_RULES
from qada_cache.kernels import decision
from qada_cache.key_moments.defaults import sources
from qada_cache.state.layer import QAdALayer

CALIBRATION = 4  # pieces of prose that errors and local shares are learned from, none of those measured
SPARE = 8  # tokens that an answer may have beside the expected ones: quotation marks, a word or two
NEARLY_ONE = 1 - 1e-9  # a threshold that makes every head long-context; at 1 they would read everything
EVERY = 4  # of the text's pieces, one in so many is kept for that


def learn(model: PreTrainedModel, documents: list[Document]) -> tuple[Tensor, Tensor]:
    """Of each head `[layers, heads]`: the mean error of its estimate of `log A_bulk`, and how often it is local."""
    config = model.config.get_text_config(decoder=True)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    errors, share, queries = torch.zeros(layers, heads), torch.zeros(layers, heads), 0
    estimates: dict[int, Tensor] = {}
    original = decide.estimated_log_bulk

    def keep(layer: QAdALayer, *args: Any, **kwargs: Any) -> Tensor:
        estimates[layer.index] = original(layer, *args, **kwargs)
        return estimates[layer.index]

    def compare(layer: QAdALayer, flags: Tensor, scores: Tensor, far_lse: Tensor, *rest: Any) -> None:
        geometry = rest[-1]
        local, bulk = decision.log_mass(scores, geometry.local), decide.log_bulk_mass(scores, far_lse, geometry)
        errors[layer.index] += (bulk - estimates[layer.index]).sum(dim=(0, 3)).flatten()
        share[layer.index] += (torch.sigmoid(local - bulk) >= ORACLE).sum(dim=(0, 3)).flatten()

    with (
        mock.patch.object(decide, "estimated_log_bulk", keep),
        mock.patch.object(decode, "audit", compare),
        mock.patch.object(QAdALayer, "is_audited", return_value=True),
    ):
        for document in documents:
            cache = QAdACache(model, threshold=1.0, moments="current")
            prefill(model, document, cache)
            follow(model, document, cache)
            queries += document.answer.shape[1]
    return errors / queries, share / queries


def know(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ways: list[Way], calibration: list[Document]
) -> Knowledge:
    """What these ways of deciding are told beforehand; what is learned from no documents is left out."""
    prompts = [name for name in PROMPTS if any(name in way.moments.split("+") for way in ways)]
    moments = {name: KeyMoments.collect(model, tokenizer, name, progress=False) for name in prompts}
    return Knowledge(moments, *(learn(model, calibration) if calibration else ()))


def cache_options(way: Way, known: Knowledge) -> dict[str, Any]:
    """Of `QAdACache`, for what it can be asked for of a way; kernels decide by themselves, so they are left out."""
    options = {"group_rule": way.rule if way.rule in GROUP_RULES else "any", "moments": "current", "kernels": "torch"}
    options["token_threshold"] = 0.0
    if own := token_options(way.read):
        options |= own | {"kernels": "auto"}
    if way.criterion == "dense" and way.read.startswith(OWN):
        way = replace(way, criterion="qada", threshold=NEARLY_ONE)
    if way.criterion == "static":
        return options | {"criterion": StaticHeads.from_oracle(known.local_share, way.threshold)}
    options["threshold"] = way.threshold
    if way.criterion != "qada":
        return options | {"criterion": way.criterion}
    experiment = way.moments in experiments(known)  # which changes the current prompt's
    current, other = sources("current" if experiment else way.moments)
    moments = known.moments[str(other)] if other else "current"
    return options | {"moments": ("current", moments) if current and other else moments}


@torch.no_grad()
def prefill(model: PreTrainedModel, document: Document, cache: QAdACache) -> None:
    """Read what `cache` lacks of the prompt but its question, exactly."""
    left = document.prompt[:, cache.get_seq_length() : -document.question]
    if left.shape[1]:
        model(left.to(model.device), past_key_values=cache, logits_to_keep=1)


@torch.no_grad()
def follow(model: PreTrainedModel, document: Document, cache: QAdACache, *, at_once: bool = True) -> Tensor:
    """Log-probabilities `[tokens, vocabulary]` of what follows a prompt that `cache` holds.

    The question in one call; the rest with it, or token by token, as in decoding: the queries of one call share the
    tokens that they read.
    """
    question, rest = document.prompt[:, -document.question :].to(model.device), document.answer[:, :-1].to(model.device)
    parts = [torch.cat([question, rest], dim=1)] if at_once else [question, *rest.split(1, dim=1)]
    logits = [model(part, past_key_values=cache).logits[0] for part in parts if part.shape[1]]
    return torch.cat(logits)[document.question - 1 :].float().log_softmax(dim=-1)


def compare(full: Tensor, found: Tensor) -> dict[str, str]:
    """Log-probabilities `[tokens, vocabulary]` of a way against those of full attention."""
    same = found.argmax(dim=-1) == full.argmax(dim=-1)
    return {
        "tokens": str(len(same)),
        "kl": f"{float((full.exp() * (full - found)).sum(dim=-1).mean()):.6f}",
        "top1": f"{float(same.float().mean()):.4f}",
        "same": str(int(same.all())),
    }


def generate(model: PreTrainedModel, document: Document, cache: QAdACache) -> Tensor:
    """An answer `[1, tokens]`, greedily, somewhat longer than the right one."""
    ids = document.prompt.to(model.device)
    most = document.answer.shape[1] + SPARE
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=most, do_sample=False
    )
    return out[:, ids.shape[1] :].cpu()


def spoken(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Document, cache: QAdACache
) -> tuple[Document, bool]:
    """The document with full attention's own answer, up to the expected one if that is in it, and whether it is.

    `cache` holds all of the prompt but its question, and reads everything.
    """
    said = generate(model, document, cache)
    for tokens in range(1, said.shape[1] + 1):
        if document.expected in tokenizer.decode(said[0, :tokens]):
            return replace(document, answer=said[:, :tokens]), True
    return replace(document, answer=said), False


def exact_cache(model: PreTrainedModel) -> QAdACache:
    """One that reads everything, and from which forks of all ways can go on."""
    return QAdACache(model, moments="current", token_threshold=0.0, threshold=1.0)


def trial(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: Document,
    ways: list[Way],
    known: Knowledge,
    bar: tqdm,
    cache: QAdACache | None = None,
) -> Iterator[dict[str, Any]]:
    """A row for each way, of one document; `cache`, which reads everything, may hold a beginning of it.

    Raises:
        ValueError: more tokens follow it than one query-adaptive call takes.
    """
    cache = exact_cache(model) if cache is None else cache
    exact = {"criterion": "dense", "moments": "current"}
    following = document.question + document.answer.shape[1] - 1
    if following > cache.options.window:
        raise ValueError(f"{following} tokens follow the text: more than one query-adaptive call takes")
    prefill(model, document, cache)
    keys = next(layer.store.near_keys for layer in cache.layers if isinstance(layer, QAdALayer) and layer.store)
    dim, value_bytes = keys.shape[3], keys.element_size()
    right = False
    if document.expected:
        document, right = spoken(model, tokenizer, document, cache.fork(**exact))
    full = follow(model, document, cache.fork(**exact))
    for way in ways:
        twin = cache.fork(**cache_options(way, known))
        with deciding(way, known), reading(way.read):
            compared = compare(full, follow(model, document, twin, at_once=not way.read.startswith(OWN)))
            found = right and compared["same"] == "1"
            if right and not found:
                said = generate(model, document, cache.fork(**cache_options(way, known)))
                found = document.expected in tokenizer.decode(said[0])
        stats = twin.stats()
        yield {
            **asdict(way),
            **compared,
            "right": str(int(right)),
            "found": str(int(found)),
            "kv_read": f"{1 - stats.kv_sparsity:.4f}",
            "bytes_read": f"{bytes_read(way, stats, dim, value_bytes):.4f}",
            "q_local": f"{stats.sparsity:.4f}",
        }
        bar.update()


def key(row: dict[str, Any]) -> tuple:
    """What tells rows apart."""
    names = ("model", "task", "length", "document", "criterion", "moments", "rule", "threshold", "read")
    return tuple(str(row.get(name, "")) for name in names)


def bytes_read(way: Way, stats: CacheStats, dim: int, value_bytes: int) -> float:
    """Of the bulk's bytes, those that are read, and of what tokens are chosen by; as if values had `VALUE_BITS`."""
    if way.read.startswith(OWN):
        sketched = stats.sketched_bytes / stats.offered_bytes * (8 * value_bytes / VALUE_BITS)
        return (stats.pulled_bytes + stats.spared_bytes) / stats.offered_bytes + sketched
    kv_read = 1 - stats.kv_sparsity
    if not way.read:
        return kv_read
    kind, share = split(way.read)
    return kv_read * share + sketch_share(kind, dim)  # by the sketch of every head


def documents_of(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, task: str, length: int
) -> Iterator[Document]:
    """The documents of a task that the command line names."""
    if task == PROSE:
        pieces = prose(tokenizer, length=length, following=options.following, text=options.text)
        return islice((piece for piece in pieces if not calibrates(piece)), options.documents)
    where, gguf = hflm_source(options.model)
    manager = task_manager(where, length, gguf.get("gguf_file"), documents=options.documents)
    return task_documents(task, tokenizer, length=length, count=options.documents, manager=manager)


def asked_as(document: Document, protocols: list[str]) -> list[Document]:
    """The document by every protocol that its question is read by, the one that reads least of it first."""
    if document.question == 1:
        return [document]
    asked = {"sparse": document, "dense": with_dense_question(document)}
    return [asked[protocol] for protocol in ("sparse", "dense") if protocol in protocols]


def calibrates(piece: Document) -> bool:
    """Whether a piece of prose is one of those that are learned from: some from every part of the text."""
    return piece.index % EVERY == EVERY - 1


def main(arguments: list[str] | None = None) -> int:
    """Try; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.trials", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", default=DEFAULT, help=HELP)
    add("--tasks", nargs="+", default=[PROSE], help=f"{PROSE}, or lm-eval tasks with one answer (default: {PROSE})")
    add("--lengths", type=int, nargs="+", default=[3072], help="tokens (default: %(default)s)")
    add("--documents", type=int, default=12, help="of each task and length (default: %(default)s)")
    add("--following", type=int, default=64, help="tokens of prose to predict (default: %(default)s)")
    add(
        "--question",
        choices=("sparse", "dense"),
        nargs="+",
        default=["dense"],
        help="whether a task's question is read exactly, as the text is, or sparsely (default: dense)",
    )
    add("--text", type=Path, help="text file for prose (default: the Python language reference)")
    add("--few", action="store_true", help="only those ways that tell most")
    add("--tokens", action="store_true", help="ways of reading some of a head's tokens only")
    add("--own", action="store_true", help="with --tokens: the default and the economical setting alone")
    add("--dtype", default="auto", help="(default: the model's own)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    add("--out", type=Path, required=True, help="CSV table, added to if it exists")
    options = parser.parse_args(arguments)
    if not options.out.parent.is_dir():
        parser.error(f"--out: there is no folder {options.out.parent}")
    try:
        model, tokenizer = load(options.model, dtype=options.dtype, device=options.device)
    except (OSError, ValueError) as error:
        parser.error(f"--model: {error}")
    run(options, model, tokenizer)
    print(plain(summary(read(options.out))))
    return 0


def chosen_ways(options: argparse.Namespace) -> list[Way]:
    """Those that the command line asks for."""
    if options.tokens:
        return token_ways(few=options.few, own=options.own)
    return few_ways() if options.few else all_ways()


def run(options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Measure what the table does not hold yet."""
    done = {key(row) for row in read(options.out)} if options.out.exists() else set()
    ways, everywhere = chosen_ways(options), {"model": label(options.model)}
    calibration = []
    if not (options.few or options.tokens):
        pieces = prose(tokenizer, length=min(options.lengths), following=options.following, text=options.text)
        calibration = list(islice(filter(calibrates, pieces), CALIBRATION))
    known = know(model, tokenizer, ways, calibration)
    protocols = sum(1 if task == PROSE else len(set(options.question)) for task in options.tasks)
    with tqdm(total=protocols * len(options.lengths) * options.documents * len(ways), unit="row") as bar:
        for task in options.tasks:
            for length in options.lengths:
                bar.set_postfix_str(f"{task}, {length} tokens")
                for document in documents_of(options, tokenizer, task, length):
                    cache = exact_cache(model)
                    for asked in asked_as(document, options.question):
                        place = {"task": asked.task, "length": length, "document": asked.index}
                        left = [way for way in ways if key(everywhere | place | asdict(way)) not in done]
                        bar.update(len(ways) - len(left))
                        if left:
                            rows = [place | row for row in trial(model, tokenizer, asked, left, known, bar, cache)]
                            write(options.out, rows, add=True, **everywhere, machine=machine())


if __name__ == "__main__":
    sys.exit(main())
