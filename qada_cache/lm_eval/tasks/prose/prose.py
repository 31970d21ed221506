"""Documents of the `prose` tasks and their scores; see `questions` for what they ask."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from datasets import Dataset, Split

from qada_cache.lm_eval.tasks.prose import classes, fitting, haystack, questions

FORMS: dict[str, Callable[..., questions.Question]] = {
    "needles": questions.needles,
    "variables": questions.variables,
    "common_words": questions.common_words,
    "frequent_words": questions.frequent_words,
    "classes": classes.classes,
}


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

    A document depends on its number, not on how many there are.

    Args:
        form: one of `FORMS`, given by the task.
        answer_tokens: room for the answer; given by the task.
        options: of the form; given by the task.
        max_seq_lengths: tokens of prompt and answer; `--metadata` of the command line, like the following.
        documents: of each length.
        text: path of a text to use instead of the Python language reference.
        seed: of all random draws.
        model_arguments: name the tokenizer.

    Raises:
        OSError, ValueError: the text or the tokenizer cannot be used, or a length is too short.
    """
    prose, ruler = haystack.load(text), fitting.ruler_of(model_arguments)
    rows = []
    for length in max_seq_lengths:
        settings, size = dict(options or {}), fitting.SMALLEST
        if form == "common_words" and length < 4096:
            settings = {"often": 6, "seldom": 1, **settings}  # RULER's, for short lists
        for number in range(documents):

            def make(size: int, number: int = number, settings: dict = settings) -> questions.Question:
                draw = Random(f"{form} {settings} {seed} {number}")
                return FORMS[form](draw, size, prose, where=haystack.whereabouts(seed, number), **settings)

            question, size = fitting.fit(make, ruler, length - answer_tokens, size)
            rows.append(
                {
                    "input": question.prompt,
                    "gen_prefix": question.prefix,
                    "outputs": question.answers,
                    "max_length": length,
                }
            )
    return {"test": Dataset.from_list(rows, split=Split.TEST)}


def process_results(document: Mapping[str, Any], answers: Sequence[str]) -> dict[str, float]:
    """RULER's score, the share of expected strings in the answer, under the name of the length."""
    said = answers[0].lower()
    found = [expected.lower() in said for expected in document["outputs"]]
    return {str(document["max_length"]): sum(found) / len(found)}
