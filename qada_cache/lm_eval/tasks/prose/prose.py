"""Documents of the `prose` tasks, as long as they may be in tokens of the model's own tokenizer, and their scores."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from random import Random
from typing import Any

from datasets import Dataset, Split
from transformers import AutoTokenizer

from qada_cache.lm_eval.tasks.prose import questions
from qada_cache.lm_eval.tasks.prose.questions import Question

SMALLEST = 8  # a document's size, whatever that counts, when nothing is known
FULL = 0.985  # of the room: a document that fills it to here is not made longer
GOLDEN = 0.6180339887498949  # successive multiples, modulo 1, are spread evenly however many there are
load_tokenizer = cache(AutoTokenizer.from_pretrained)  # once: of a GGUF file it takes seconds


def fit(
    make: Callable[[int], Question], measure: Callable[[Question], int], room: int, guess: int
) -> tuple[Question, int]:
    """The largest question, or nearly, of at most `room` tokens, and its size.

    Sizes are interpolated, so that a few measurements do, and two when `guess` is that of a similar document.

    Raises:
        ValueError: even the smallest is too long, or a larger one is no longer.
    """
    best, low, high = make(SMALLEST), SMALLEST, sys.maxsize
    least = used = measure(best)
    if used > room:
        raise ValueError(f"{room} tokens are too few: the prompt alone takes {used}, set larger max_seq_lengths")
    size = max(guess, 2 * low)
    while used < FULL * room and high > low + 1:
        question = make(size)
        tokens = measure(question)
        if tokens <= least:
            raise ValueError(f"a prompt of size {size} has no more tokens, {tokens}, than one of {SMALLEST}")
        slope = (tokens - least) / (size - SMALLEST)
        if tokens <= room:
            best, low, used = question, size, tokens
        else:
            high = size
        wanted = SMALLEST + int(((FULL + 1) / 2 * room - least) / slope)
        size = max(low + 1, min(wanted, high - 1))
    return best, low


def make_ruler(model_arguments: Mapping[str, Any]) -> Callable[[Question], int]:
    """A function that counts a question's tokens: with the answer's prefix, and in the chat template if there is one.

    lm-eval's model arguments name the tokenizer as for RULER's tasks, by `tokenizer`, `pretrained` or `model`, its
    `revision` and `subfolder`, and `gguf_file` where the model is one.

    Raises:
        OSError, ValueError: no tokenizer is named, or it cannot be loaded.
    """
    name = next(filter(None, map(model_arguments.get, ("tokenizer", "pretrained", "model"))), None)
    if not isinstance(name, str):
        raise ValueError(
            "no tokenizer to measure lengths with: it comes from --model_args pretrained=... or tokenizer=..., or from "
            "the metadata of a TaskManager"
        )
    given: dict[str, Any] = {"trust_remote_code": bool(model_arguments.get("trust_remote_code"))}
    given |= {name: str(model_arguments[name]) for name in ("revision", "subfolder") if model_arguments.get(name)}
    if model_arguments.get("gguf_file") and not model_arguments.get("tokenizer"):
        given["gguf_file"] = model_arguments["gguf_file"]
    tokenizer = load_tokenizer(name, **given)

    def count(text: str) -> int:
        return len(tokenizer(text, verbose=False).input_ids)

    around = 0
    if tokenizer.chat_template:  # what it puts around a prompt is kept free, whether or not it is applied
        said = [{"role": "user", "content": "A"}]
        chat = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        around = count(str(chat)) - count("A")
    return lambda question: around + count(f"{question.prompt} {question.prefix}")


def dataset(
    *,
    form: str,
    answer_tokens: int,
    options: Mapping[str, Any] | None = None,
    max_seq_lengths: Iterable[int] = (4096,),
    documents: int = 64,
    text: str | None = None,
    seed: int = 0,
    **model_arguments: Any,
) -> dict[str, Dataset]:
    """The split `test`: `input`, `gen_prefix`, `outputs` and `max_length` of every document.

    A document depends on its number, not on how many there are. A task gives the `form` (a maker of `questions`), its
    `options`, and the room for the answer. `--metadata` may give the lengths (tokens of prompt and answer), the number
    of `documents` of each, the path of a `text` to use instead of the Python language reference, and the seed. Model
    arguments name the tokenizer.

    Raises:
        OSError, ValueError: the text or the tokenizer cannot be used, or a length is too short.
        ValueError: another option of `--metadata` is wrong.
    """
    lengths = list(max_seq_lengths) if isinstance(max_seq_lengths, Iterable) else []
    if not lengths or not all(type(length) is int for length in lengths):
        raise ValueError(f"max_seq_lengths is a list of numbers of tokens, as [4096], got {max_seq_lengths!r}")
    if type(documents) is not int or documents < 1:
        raise ValueError(f"documents is a number of at least 1, got {documents!r}")
    if text == "":
        raise ValueError("text is the path of a text file, got ''")
    prose, ruler = questions.load(text), make_ruler(model_arguments)

    def make(settings: dict[str, Any], number: int, size: int) -> Question:
        draw = Random(f"{form} {settings} {seed} {number}")
        where = (Random(seed).random() + number * GOLDEN) % 1.0  # far from those of the numbers before it
        return getattr(questions, form)(draw, size, prose, where=where, **settings)

    rows = []
    for length in lengths:
        settings, size = dict(options or {}), SMALLEST
        if form == "common_words" and length < 4096:
            settings = {"often": 6, "seldom": 1, **settings}  # RULER's, for short lists
        for number in range(documents):
            question, size = fit(partial(make, settings, number), ruler, length - answer_tokens, size)
            columns = {"input": question.prompt, "gen_prefix": question.prefix, "outputs": question.answers}
            rows.append({**columns, "max_length": length})
    return {"test": Dataset.from_list(rows, split=Split.TEST)}


def process_results(document: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """RULER's score, the share of expected strings in the answer, under the name of the length."""
    said = answers[0].lower()
    found = [expected.lower() in said for expected in document["outputs"]]
    return {str(document["max_length"]): sum(found) / len(found)}
