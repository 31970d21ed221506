"""Documents of the `needle` tasks, made as they are asked for: a long synthetic text, and something to say after it."""

from collections.abc import Callable, Iterable
from typing import Any

from datasets import Dataset, Split

from qada_cache.needle import SENTENCES, NeedlePrompt, make_prompt

PROMPTS = 4  # texts per length, of sixteen questions each
BEGUN = 4  # words of a sentence that is to be continued


def dataset(*, max_seq_lengths: Iterable[int] = (4096,), **metadata: Any) -> dict[str, Dataset]:
    """The split `test`: `context`, `question`, `answer` and `max_length` of every document.

    Args:
        max_seq_lengths: tokens of the texts, by the needle model's tokenizer; `--metadata` of the command line.
        metadata: the rest of it, and the model arguments; not used.

    Raises:
        ValueError: a length too short for the facts.
    """
    return _documents(max_seq_lengths, lambda prompt: zip(prompt.questions, prompt.answers, strict=True))


def noise_dataset(*, max_seq_lengths: Iterable[int] = (4096,), **metadata: Any) -> dict[str, Dataset]:
    """As `dataset`, but the same texts end in the middle of one of their twelve noise sentences.

    The last few words are enough to finish it, so this needs nothing of the long context.
    """
    halves = [(" ".join(sentence[:BEGUN]), " ".join(sentence[BEGUN:])) for sentence in SENTENCES]
    return _documents(max_seq_lengths, lambda prompt: halves)


def _documents(
    lengths: Iterable[int], asked: Callable[[NeedlePrompt], Iterable[tuple[str, str]]]
) -> dict[str, Dataset]:
    """The split, of what is `asked` about each prompt: questions with their answers."""
    prompts = ((tokens, make_prompt(tokens=tokens, seed=seed)) for tokens in lengths for seed in range(PROMPTS))
    rows = [
        {"context": prompt.context, "question": question, "answer": answer, "max_length": tokens}
        for tokens, prompt in prompts
        for question, answer in asked(prompt)
    ]
    return {"test": Dataset.from_list(rows, split=Split.TEST)}
