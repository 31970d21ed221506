"""Documents of the task `needle`, made as they are asked for: a long synthetic text, and a question about it."""

from collections.abc import Iterable
from typing import Any

from datasets import Dataset, Split
from needle import make_prompt

PROMPTS = 4  # texts per length, of sixteen questions each


def dataset(*, max_seq_lengths: Iterable[int] = (4096,), **metadata: Any) -> dict[str, Dataset]:
    """The split `test`: `context`, `question`, `answer` and `max_length` of every document.

    Args:
        max_seq_lengths: tokens of the texts, by the needle model's tokenizer; `--metadata` of the command line.
        metadata: the rest of it, and the model arguments; not used.

    Raises:
        ValueError: a length too short for the facts.
    """
    prompts = ((tokens, make_prompt(tokens=tokens, seed=seed)) for tokens in max_seq_lengths for seed in range(PROMPTS))
    rows = [
        {"context": prompt.context, "question": question, "answer": answer, "max_length": tokens}
        for tokens, prompt in prompts
        for question, answer in zip(prompt.questions, prompt.answers, strict=True)
    ]
    return {"test": Dataset.from_list(rows, split=Split.TEST)}
