"""Documents of the `needle` tasks, made as they are asked for: a long synthetic text, and something to say after it."""

from typing import Any

from datasets import Dataset, Split

from qada_cache.needle import SENTENCES, make_prompt

PROMPTS = 4  # texts per length, of sixteen questions each
BEGUN = 4  # words of a sentence that is to be continued


def dataset(*, max_seq_lengths: list[int] | tuple[int, ...] = (4096,), **metadata: Any) -> dict[str, Dataset]:
    """The split `test`: `context`, `question`, `answer` and `max_length` of every document.

    Args:
        max_seq_lengths: tokens of the texts, by the needle model's tokenizer; `--metadata` of the command line.
        metadata: the rest of it, and the model arguments; not used.

    Raises:
        ValueError: a length too short for the facts.
    """
    documents = []
    for tokens in max_seq_lengths:
        for seed in range(PROMPTS):
            prompt = make_prompt(tokens=tokens, seed=seed)
            documents += [
                {"context": prompt.context, "question": question, "answer": answer, "max_length": tokens}
                for question, answer in zip(prompt.questions, prompt.answers, strict=True)
            ]
    return {"test": Dataset.from_list(documents, split=Split.TEST)}


def noise_dataset(*, max_seq_lengths: list[int] | tuple[int, ...] = (4096,), **metadata: Any) -> dict[str, Dataset]:
    """As `dataset`, but the same texts end in the middle of one of their twelve noise sentences.

    The last few words are enough to finish it, so this needs nothing of the long context.
    """
    documents = []
    for tokens in max_seq_lengths:
        for seed in range(PROMPTS):
            context = make_prompt(tokens=tokens, seed=seed).context
            documents += [
                {
                    "context": context,
                    "question": " ".join(sentence[:BEGUN]),
                    "answer": " ".join(sentence[BEGUN:]),
                    "max_length": tokens,
                }
                for sentence in SENTENCES
            ]
    return {"test": Dataset.from_list(documents, split=Split.TEST)}
