"""One cache's answer to a question, greedily, and what it cost."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..models import find_inputs_device, forgets_states
from ..stats import CacheStats, count_bytes
from ..versions import pass_cache
from .asking import Asked


@dataclass
class Answer:
    """An answer, and what was measured while it was given."""

    cache: str  # name of its class
    reading_seconds: float = 0.0  # for the document
    first_seconds: float = 0.0  # from the question to the first token of the answer
    seconds: list[float] = field(default_factory=list)  # for each further token
    tokens: list[int] = field(default_factory=list)
    device_bytes: int = 0  # of the cache at the end
    host_bytes: int = 0
    stats: CacheStats | None = None  # of the question and the answer; None for DynamicCache


def read_document(model: PreTrainedModel, asked: Asked, cache: DynamicCache) -> Answer:
    """Read all before the question into an empty cache; an answer without tokens."""
    begin = time.perf_counter()
    read_tokens(model, asked.opening, cache)
    return Answer(type(cache).__name__, reading_seconds=time.perf_counter() - begin)


def read_tokens(model: PreTrainedModel, ids: list[int], cache: DynamicCache) -> int:
    """Read ids in one pass, or one by one where the model would forget what the cache holds; the likeliest next token,
    which is waited for."""
    given = torch.tensor([ids], dtype=torch.int64, device=find_inputs_device(model))
    most = 1 if cache.get_seq_length() and forgets_states(model.config.get_text_config(decoder=True)) else len(ids)
    for part in given.split(most, dim=1):
        logits = model(input_ids=part, **pass_cache(cache), logits_to_keep=1).logits
    return int(logits[0, -1].argmax())


def give_answer(
    model: PreTrainedModel,
    asked: Asked,
    cache: DynamicCache,
    answer: Answer,
    *,
    new_tokens: int,
    is_over: Callable[[list[int]], bool],
    tell: Callable[[], object],
) -> None:
    """Ask a cache that has read the document, and add an answer of at most `new_tokens` tokens; `is_over` says of its
    tokens whether it ends there, `tell` is called with each."""
    ids = asked.question
    while True:
        begin = time.perf_counter()
        answer.tokens.append(read_tokens(model, ids, cache))
        seconds = time.perf_counter() - begin
        tell()
        if ids is asked.question:
            answer.first_seconds = seconds
        else:
            answer.seconds.append(seconds)
        if len(answer.tokens) == new_tokens or is_over(answer.tokens):
            break
        ids = answer.tokens[-1:]
    answer.device_bytes, answer.host_bytes = count_bytes(cache)


def make_end_check(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: bool
) -> Callable[[list[int]], bool]:
    """Whether an answer of these tokens is over: by the model's and the tokenizer's tokens for that, and without a chat
    template by the end of a line."""
    end_ids = getattr(model.generation_config, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(end_ids if isinstance(end_ids, list) else [end_ids])}
    return lambda tokens: tokens[-1] in ends or (not chat and "\n" in str(tokenizer.decode(tokens)).lstrip())


def cut_answer(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """An answer's text, a piece for each of its tokens; special ones are empty, and so may parts of a character be."""
    texts = [str(tokenizer.decode(tokens[: count + 1], skip_special_tokens=True)) for count in range(len(tokens))]
    ends = [len(text.rstrip("\ufffd")) for text in texts[:-1]] + [len(texts[-1])]
    starts = [0, *ends[:-1]]
    return [texts[-1][start:end] for start, end in zip(starts, ends, strict=True)]


def count_same(one: list[int], other: list[int]) -> int:
    """How many tokens two answers begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
