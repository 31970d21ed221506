"""`qada report`: a question about a document, answered with DynamicCache and with QAdACache, as one page of HTML."""

import time
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..attention.forward import restore_attention
from ..cache import QAdACache
from ..machine import describe_machine
from ..models import find_inputs_device, read_sizes
from ..models.loading import count_positions
from ..preparing import prepare
from ..sketch import MIN_TOKENS
from .answering import Answer, count_same, cut_answer, give_answer, make_end_check, read_document, read_tokens
from .asking import Asked, Request, ask
from .figures import list_figures
from .page import fill_page
from .reads import MOST_BYTES, Pass, Recorder

_WARM_UP_TOKENS = MIN_TOKENS + 256  # of the document: a bulk with a sketch, sinks and window


def report(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, request: Request, *, name: str, **options: Any
) -> str:
    """The page. Both caches answer greedily, timed. Then a fork of the QAdACache reads its answer once more, and an
    observer records which tokens are read. The model is in eval mode. The page calls it `name`. `options` are
    QAdACache's.

    Raises:
        ValueError: as `ask`.
        TypeError, ValueError, NotImplementedError, FileNotFoundError: as `QAdACache`.
    """
    asked = ask(tokenizer, request, count_positions(model.config))
    prepare(model, tokenizer, **options)
    described = _describe_model(model, name)
    with tqdm(total=2 + 3 * request.new_tokens, unit="step") as bar:
        answers, cache, recorder, passes = _measure(model, tokenizer, asked, request.new_tokens, options, bar)
    return fill_page(
        {
            "version": __version__,
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe_machine(),
            "threads": torch.get_num_threads(),
            "model": described,
            "cache": repr(cache),
            "document": {
                "name": request.name,
                "tokens": len(asked.words),
                "left_out": asked.left_out,
                "first": asked.first,
                "words": asked.words,
            },
            "question": {"text": request.question, "tokens": len(asked.question), "chat": asked.chat},
            "answers": [{"cache": each.cache, "pieces": cut_answer(tokenizer, each.tokens)} for each in answers],
            "same": count_same(*(each.tokens for each in answers)),
            "most": request.new_tokens,
            "rows": list_figures(*answers, on_cpu=find_inputs_device(model).type == "cpu"),
            "room": f"{MOST_BYTES >> 20} MiB",
            "sinks": cache.options.sink_tokens,
            "layers": recorder.layers,
            "heads": recorder.heads,
            "passes": [None if each is None else vars(each) for each in passes],
        }
    )


@torch.inference_mode()
def _measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Asked,
    new_tokens: int,
    options: dict[str, Any],
    bar: tqdm,
) -> tuple[list[Answer], QAdACache, Recorder, list[Pass | None]]:
    """DynamicCache's answer and QAdACache's, the QAdACache, and what `_record` returns for its answer."""
    is_over = make_end_check(model, tokenizer, asked.chat)

    def decode(cache: DynamicCache, started: Answer) -> Answer:
        bar.update()
        give_answer(model, asked, cache, started, new_tokens=new_tokens, is_over=is_over, tell=bar.update)
        bar.update(new_tokens - len(started.tokens))  # it may have ended before
        return started

    def warm_up(cache: DynamicCache) -> None:
        """Read a beginning of the document untimed, so that one-time work, as compiling kernels, is done."""
        for ids in (asked.opening[:_WARM_UP_TOKENS], asked.question, asked.question[:1]):
            read_tokens(model, ids, cache)

    restore_attention(model)  # so that no attention function of ours runs with DynamicCache
    warm_up(DynamicCache(config=model.config))
    stock_cache = DynamicCache(config=model.config)
    stock = decode(stock_cache, read_document(model, asked, stock_cache))
    del stock_cache
    warm_up(QAdACache(model, **options))
    cache = QAdACache(model, **options)
    started = read_document(model, asked, cache)
    observed_cache = cache.fork()
    ours = decode(cache, started)
    ours.stats = cache.stats()
    return [stock, ours], cache, *_record(model, asked, observed_cache, ours.tokens, bar)


def _record(
    model: PreTrainedModel, asked: Asked, cache: QAdACache, answer: list[int], bar: tqdm
) -> tuple[Recorder, list[Pass | None]]:
    """The `Recorder`, and what `cache`, which has read the document, reads for each token of `answer`: as many passes
    as a page has room for."""
    cache.observer = recorder = Recorder(cache)
    passes, size = list[Pass | None](), 0
    for ids in (asked.question, *([token] for token in answer[:-1])):
        read_tokens(model, ids, cache)
        recorded_pass = recorder.finish()
        size += 0 if recorded_pass is None else len(recorded_pass.packed)
        if passes and size > MOST_BYTES:
            break
        passes.append(recorded_pass)
        bar.update()
    cache.observer = None
    bar.update(bar.total - bar.n)
    return recorder, passes


def _describe_model(model: PreTrainedModel, name: str) -> str:
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_attention_heads", None) is None:
        raise ValueError(f"{config.model_type} has no attention, so no head reads anything that a page could show")
    layers, heads, kv_heads, _ = read_sizes(config)
    size, dtype = f"{model.num_parameters() / 1e6:,.0f}M parameters", str(model.dtype).removeprefix("torch.")
    where = find_inputs_device(model)
    return f"{name}: {size}, {layers} layers, {heads} query heads, {kv_heads} KV heads, {dtype} on {where}"
