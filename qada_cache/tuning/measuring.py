"""Loss, bytes and time of settings on pieces of text, against reading everything."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import QAdACache
from ..key_moments.prompts import knows
from ..models import find_inputs_device
from ..state import BULK_BITS
from ..stats import CacheStats
from ..tuned_choice import Thresholds
from ..versions import pass_cache

VALUE_BITS = 16  # bits a value of the bulk, for counting bytes in any dtype


class Piece(NamedTuple):
    """A stretch of text and its continuation."""

    prompt: Tensor  # int64 `[1, tokens]`
    following: Tensor  # int64 `[1, tokens]`


def read_default_text() -> str:
    """The topics of Python's help: real prose that nearly every Python carries. ValueError, if this one does not."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python has no help topics to read: give --text FILE") from error
    return "\n\n".join(topics.values())


def cut(text: str, tokenizer: PreTrainedTokenizerBase, *, count: int, tokens: int, following: int) -> list[Piece]:
    """`count` pieces of `tokens` in the prompt and `following` after it, spread evenly over the text, without overlap.

    Each begins with the token that begins a text, if the tokenizer puts one there. ValueError, if the text is too
    short, or the tokenizer does not know its words.
    """
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    ids = torch.tensor(token_ids, dtype=torch.long, device="cpu")
    begin = ids.new_tensor([index for index in tokenizer("").input_ids[:1] if index == tokenizer.bos_token_id])
    size = tokens - len(begin) + following
    if len(ids) < count * size:
        raise ValueError(
            f"the text has {len(ids)} tokens, and {count} pieces of {tokens} + {following} take {count * size}: give a "
            "longer text, or fewer tokens or pieces"
        )
    if not knows(tokenizer, text, ids):
        raise ValueError("the tokenizer does not know the words of the text: give another text")
    starts = (index * (len(ids) - size) // max(1, count - 1) for index in range(count))
    cuts = (torch.cat([begin, ids[start : start + size]])[None] for start in starts)
    return [Piece(taken[:, :tokens], taken[:, tokens:]) for taken in cuts]


def hold_out(pieces: list[Piece], count: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces in two parts: those to choose by, and `count` to confirm by, from all over the text."""
    places = {(index + 1) * len(pieces) // count - 1 for index in range(count)}
    apart = [piece for place, piece in enumerate(pieces) if place in places]
    return [piece for place, piece in enumerate(pieces) if place not in places], apart


def cut_both(
    text: str, other: str | None, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, following: int
) -> tuple[list[Piece], list[Piece]]:
    """`count` pieces to choose by, and half as many to confirm by, from the other text or, without one, held out.
    Sizes and errors as for `cut`."""
    few, sizes = count // 2, {"tokens": tokens, "following": following}
    if other is None:
        return hold_out(cut(text, tokenizer, count=count + few, **sizes), few)
    return cut(text, tokenizer, count=count, **sizes), cut(other, tokenizer, count=few, **sizes)


class Figures(NamedTuple):
    """Figures of one setting on one piece."""

    kl: float  # mean KL divergence of its next-token distributions from those of reading everything, in nats
    top1: float  # share of tokens whose likeliest next token is the same
    bytes_read: float  # share of the bulk's bytes that is read, with the sketch, as if values had `VALUE_BITS`
    seconds: float  # of a decoded token, the median


@torch.inference_mode()
def measure(
    model: PreTrainedModel, piece: Piece, settings: Sequence[Thresholds], bulk_bits: int | None = None
) -> Iterator[Figures]:
    """Figures of reading everything, then of every setting, in so many `bulk_bits`. The model is in eval mode.

    The prompt is read exactly, and once more where it is kept in few bits, so that these are compared as well. Each
    setting goes on from a copy of that state, a cache's default but for the setting. The following tokens are fed one
    by one: the queries of one call would share their reads.
    """
    fed = torch.cat([piece.prompt[:, -1:], piece.following[:, :-1]], dim=1).to(find_inputs_device(model))
    exact, read = QAdACache(model, bulk_bits=BULK_BITS), QAdACache(model, bulk_bits=bulk_bits)
    _read(model, piece, exact)
    full, seconds = _decode(model, exact.fork(criterion="dense"), fed)
    yield Figures(0.0, 1.0, 1.0, seconds)
    if read.options.codes_tokens:
        del exact
        _read(model, piece, read)
    else:
        read = exact
    for setting in settings:
        cache = read.fork(**asdict(setting))
        logits, seconds = _decode(model, cache, fed)
        bytes_read = count_bytes_read(cache.stats(), model.dtype.itemsize, cache.options.bulk_bits)
        yield Figures(*compare_logits(full, logits), bytes_read, seconds)


def _read(model: PreTrainedModel, piece: Piece, cache: QAdACache) -> None:
    ids = piece.prompt[:, :-1].to(find_inputs_device(model))
    model(input_ids=ids, **pass_cache(cache), logits_to_keep=1)


def _decode(model: PreTrainedModel, cache: QAdACache, ids: Tensor) -> tuple[Tensor, float]:
    """Logits `[tokens, vocabulary]` on the CPU, in the model's dtype, and the median seconds a token."""
    logits, seconds = [], []
    for token in ids.split(1, dim=1):
        begin = time.perf_counter()
        logits.append(model(input_ids=token, **pass_cache(cache)).logits[0].cpu())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return torch.cat(logits), median(seconds)


def compare_logits(full: Tensor, found: Tensor) -> tuple[float, float]:
    """`Figures.kl` and `Figures.top1` of logits `[tokens, vocabulary]`; computed in float64, one token at a time."""
    divergence = 0.0
    for one, other in zip(full, found, strict=True):  # a vocabulary in float64 takes a MiB a token
        truth, guess = one.double().log_softmax(dim=-1), other.double().log_softmax(dim=-1)
        divergence += float((truth.exp() * (truth - guess)).sum())
    return divergence / len(full), float((full.argmax(dim=-1) == found.argmax(dim=-1)).double().mean())


def count_bytes_read(stats: CacheStats, value_bytes: int, bulk_bits: int) -> float:
    """`Figures.bytes_read` of a cache of a model whose values have so many bytes; ValueError, if it decided about
    nothing. With few `bulk_bits` all tokens that were read are taken for records."""
    if not stats.dense_bulk_bytes:
        raise ValueError("a QAdACache reads nothing of this model's layers, so there is nothing to tune")
    in_any_dtype = 8 * value_bytes / VALUE_BITS  # sketch and records have the same bytes in any, the bulk's divisor not
    bulk_bytes = stats.bulk_read_bytes * (in_any_dtype if bulk_bits < BULK_BITS else 1)
    return (bulk_bytes + stats.sketch_read_bytes * in_any_dtype) / stats.dense_bulk_bytes
