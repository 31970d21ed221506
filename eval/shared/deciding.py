"""Ways of deciding and of reading, tried on documents against full attention: what `eval.trials` measures.

Ways are those of `QAdACache`, and others to compare with, which transformers' own cache serves. Of these, a fixed share
of every head's tokens is chosen for a KV head by an estimate of their scores, for all query heads of the group
together; what is chosen is read exactly, and the rest is left out. The estimate is made from bounds of pages; "true"
knows.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from eval.shared.tables import Rows
from eval.shared.texts import Document
from eval.shared.ways import OWN, Way
from qada_cache import QAdACache
from qada_cache.models import attention_table, find_full_attention_layers
from qada_cache.models.latent import find_latent_sizes
from qada_cache.state.layer import find_adaptive_tokens
from qada_cache.tuning.measuring import compare_logits
from qada_cache.versions import pass_cache

SPARE = 8  # tokens that an answer may have beside the expected ones: quotation marks, a word or two
NEARLY_ONE = 1 - 1e-9  # a threshold that makes every head long-context; at 1 they would read everything
WAY = ("model", "task", "length", "criterion", "moments", "rule", "threshold", "read")


def estimate_by_pages(grouped_queries: Tensor, keys: Tensor, size: int) -> Tensor:
    """The most that a token of each page can score, as Quest has it; arguments as for `estimate`."""
    tokens, pages = keys.shape[2], -(-keys.shape[2] // size)
    low, high = (
        torch.nn.functional.pad(keys, (0, 0, 0, pages * size - tokens), value=value).unflatten(2, (pages, size))
        for value in (math.inf, -math.inf)
    )
    bound = grouped_queries.clamp_min(0) @ high.amax(dim=3).mT + grouped_queries.clamp_max(0) @ low.amin(dim=3).mT
    return bound.repeat_interleave(size, dim=-1)[..., :tokens]


def estimate(kind: str, grouped_queries: Tensor, keys: Tensor) -> Tensor:
    """Scores `[batch, kv_heads, queries, tokens]` of queries `[batch, kv_heads, queries, dim]`, before scaling."""
    return (
        grouped_queries @ keys.mT if kind == "true" else estimate_by_pages(grouped_queries, keys, int(kind.split()[-1]))
    )


def find_sketch_share(kind: str) -> float:
    """Bytes of what estimates are made from, over those of the keys and values."""
    return 0.0 if kind == "true" else 1 / int(kind.split()[-1])  # a least and a greatest key a page


def choose(scores: Tensor, group: int, share: float) -> Tensor:
    """Bool, the shape of `scores` `[batch, kv_heads, group * queries, tokens]`: this share of the tokens of each group.

    Those that get most of its heads' attention, all together.
    """
    together = scores.unflatten(2, (group, -1)).softmax(dim=-1).sum(dim=2)
    best = together.topk(math.ceil(share * scores.shape[-1]), dim=-1).indices
    selected = torch.zeros_like(together, dtype=torch.bool).scatter_(-1, best, True)
    return selected.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)


def split(tokens: str) -> tuple[str, float]:
    """Of "pages of 16, 0.05": how scores are estimated, and the share of the bulk that is read; whole if empty.

    Of one of the product's ways, as "sketch of 1.5 bits, 1.0", it is the token threshold.
    """
    kind, _, share = tokens.partition(", ")
    return kind, float(share or 1)


def find_bulk_bits(tokens: str) -> int:
    """Bits a value of the bulk, for a way of reading: "sketch of 1.5 bits over 8, 4.4" is of 8, without them 16."""
    kind = split(tokens)[0].split()
    return int(kind[-1]) if "over" in kind else 16


def find_token_options(tokens: str) -> dict[str, Any]:
    """Of `QAdACache`, for one of the product's ways of reading."""
    kind, theta = split(tokens)
    return {"token_threshold": theta, "sketch_bits": float(kind.split()[2])} if kind.startswith(OWN) else {}


def has_own_reading(way: Way) -> bool:
    """Whether full attention serves a way, and is told what to read (`limit_reading`): nothing of `QAdACache` takes
    part."""
    return way.criterion == "dense" and bool(way.read) and not way.read.startswith(OWN)


@contextmanager
def limit_reading(model: PreTrainedModel, tokens: str, *, sinks: int, window: int) -> Iterator[None]:
    """Full attention of a text's next tokens reads so much of the text in every head: see `split`. One row; `sinks`
    tokens and the last `window` of the text are read anyway. Other layers than full-attention ones are as ever."""
    (kind, share), config = split(tokens), model.config.get_text_config(decoder=True)
    full_layers = find_full_attention_layers(DynamicCache(config=config), config)
    ours = {module for module in model.modules() if getattr(module, "layer_idx", None) in full_layers}

    def read_some(
        base: Callable, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ):
        queries, held = query.shape[2], key.shape[2] - query.shape[2]
        bulk = slice(sinks, held - window)
        if module not in ours or bulk.stop <= bulk.start:
            return base(module, query, key, value, mask, **kwargs)
        kv_heads, scaling = key.shape[1], kwargs.get("scaling") or query.shape[3] ** -0.5
        grouped_queries = query.reshape(1, kv_heads, -1, query.shape[3]).float()
        scores = estimate(kind, grouped_queries, key[:, :, bulk].float()) * scaling
        read = torch.ones(query.shape[1], queries, key.shape[2], dtype=torch.bool, device=key.device).tril(held)
        read[:, :, bulk] = choose(scores, query.shape[1] // kv_heads, share).view(query.shape[1], queries, -1)
        least = torch.finfo(query.dtype).min
        added = torch.zeros(read.shape, dtype=query.dtype, device=key.device).masked_fill(~read, least)
        return base(module, query, key, value, added[None], **kwargs)

    attention_table.place(read_some, tables=attention_table.find_own_tables(model, model.config))
    try:
        yield
    finally:
        attention_table.displace(read_some)


def make_exact_cache(model: PreTrainedModel, **options: Any) -> QAdACache:
    """One that reads everything, and from which forks of all ways can go on; `options` say what it holds."""
    return QAdACache(model, **{"moments": "current", **options, "token_threshold": 0.0, "threshold": 1.0})


def make_coded_cache(model: PreTrainedModel, **options: Any) -> QAdACache:
    """As `make_exact_cache`, but with tokens coded in the metric of the queries. A cache of latents that reads them all
    has no such metric, so that of latents has a threshold of nearly 1 instead."""
    if find_latent_sizes(model.config.get_text_config(decoder=True)) is None:
        return make_exact_cache(model, **options)
    return QAdACache(model, criterion="gaussian", threshold=NEARLY_ONE, token_threshold=0.0, **options)


@torch.no_grad()
def prefill(model: PreTrainedModel, document: Document, cache: DynamicCache) -> None:
    """Read what `cache` lacks of the text, exactly."""
    left = document.text[:, cache.get_seq_length() :]
    if left.shape[1]:
        model(left.to(model.device), **pass_cache(cache), logits_to_keep=1)


@torch.no_grad()
def follow(model: PreTrainedModel, document: Document, cache: DynamicCache, *, at_once: bool = True) -> Tensor:
    """Log-probabilities `[tokens, vocabulary]` of what follows a prompt that `cache` holds.

    The question in one call; the rest with it, or token by token, as in decoding: the queries of one call share the
    tokens that they read. Where heads decide for fewer tokens at once, in calls of so many.
    """
    ids, question = document.following.to(model.device), document.question
    ours = isinstance(cache, QAdACache)
    most = find_adaptive_tokens(cache.layers, cache.options.window) if ours else ids.shape[1]
    parts = [ids] if at_once else [ids[:, :question], *ids[:, question:].split(1, dim=1)]
    pieces = [piece for part in parts if part.shape[1] for piece in part.split(most, dim=1)]
    logits = [model(piece, **pass_cache(cache)).logits[0] for piece in pieces]
    return torch.cat(logits)[question - 1 :].float().log_softmax(dim=-1)


def compare(full: Tensor, found: Tensor) -> dict[str, str]:
    """Log-probabilities `[tokens, vocabulary]` of a way against those of full attention."""
    kl, same = compare_logits(full, found)
    return {"tokens": str(len(full)), "kl": f"{kl:.6f}", "top1": f"{same:.4f}", "same": str(int(same == 1))}


def generate(model: PreTrainedModel, document: Document, cache: DynamicCache) -> Tensor:
    """An answer `[1, tokens]`, greedily, somewhat longer than the right one."""
    ids = document.prompt.to(model.device)
    most = document.answer.shape[1] + SPARE
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), **pass_cache(cache), max_new_tokens=most, do_sample=False
    )
    return out[:, ids.shape[1] :].cpu()


def put_own_answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Document, cache: DynamicCache
) -> tuple[Document, bool]:
    """The document with full attention's own answer, up to the expected one if that is in it, and whether it is.

    `cache` holds all of the prompt but its question, and reads everything.
    """
    said = generate(model, document, cache)
    for tokens in range(1, said.shape[1] + 1):
        if document.expected in tokenizer.decode(said[0, :tokens]):
            return replace(document, answer=said[:, :tokens]), True
    return replace(document, answer=said), False


def summarize(rows: Rows) -> list[dict[str, Any]]:
    """One row for each model, task, length and way: means over documents, `±` their standard errors.

    `found` counts the right answers, of the questions that full attention answers rightly; prose has none. `also_found`
    counts them of the other questions; it is empty where a row does not say ("found" is empty, in older tables).
    """
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row.get(name, "") for name in WAY)].append(row)
    made = []
    for way, group in groups.items():
        asked = [row for row in group if row["right"] == "1"]
        missed = [row["found"] for row in group if row["right"] == "0"] if asked else []
        made.append({
            **dict(zip(WAY, way, strict=True)),
            "documents": len(group),
            "kl": format_with_error([float(row["kl"]) for row in group], 4),
            "top1": format_with_error([float(row["top1"]) for row in group], 3),
            "found": f"{sum(row['found'] == '1' for row in asked)}/{len(asked)}" if asked else "",
            "also_found": f"{missed.count('1')}/{len(missed)}" if missed and "" not in missed else "",
            "kv_read": f"{mean(float(row['kv_read']) for row in group):.3f}",
            "bytes_read": f"{mean(float(row.get('bytes_read') or row['kv_read']) for row in group):.3f}",
            "q_local": f"{mean(float(row['q_local']) for row in group):.3f}",
        })  # fmt: skip
    return made


def format_with_error(values: list[float], digits: int) -> str:
    """The mean `±` its standard error."""
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{mean(values):.{digits}f} ± {error:.{digits}f}"
